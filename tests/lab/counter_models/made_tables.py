"""Small made-up tables with known answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.counter_table import CounterPredictor, CounterTable
from wattcast.power import power_model
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.hybrid_rail import EventRail, HybridRail, RailClock, RailVoltage
from wattcast.power.power_model import event_intensity

CORE_HZ = np.array([600e6, 700e6, 800e6, 900e6, 1000e6, 1100e6])
MEMORY_HZ = np.array([800e6, 2000e6, 3000e6])
EVENTS = ("int_busy_cycle", "l2_busy_cycle", "shared_busy_cycle")


def truth(floored: bool = False) -> HybridRail:
    """A device whose costs and voltages the tests know."""
    level = np.array([0.85, 0.86, 0.90, 0.95, 1.0, 1.12])
    floors = (MEMORY_HZ, np.array([0.85, 1.0, 1.0])) if floored else ()
    core = EventRail(
        "core", RailClock.CORE, RailVoltage(CORE_HZ, level, *floors), leakage_a=12.0, clock_f=8e-9
    )
    memory = EventRail("memory", RailClock.MEMORY, clock_f=6e-9)
    costs = {
        "active_cycle": 1e-8,
        "int_busy_cycle": 4e-8,
        "l2_busy_cycle": 2.5e-8,
        "shared_busy_cycle": 3e-8,
    }
    return HybridRail(
        20.0, (replace(core, event_f=costs), replace(memory, event_f={"dram_busy_cycle": 1.5e-8}))
    )


def made_table(
    noise: float = 0.0, floored: bool = False, benchmarks: int = 14, seed: int = 3
) -> CounterTable:
    """Rows that ``truth`` would draw: each benchmark at every pair of clocks, the first of them
    idle.
    """
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.0, 1.0, (benchmarks, 4)) * rng.integers(0, 2, (benchmarks, 4))
    share[0] = 0.0
    core, memory = (a.ravel() for a in np.meshgrid(CORE_HZ, MEMORY_HZ, indexing="ij"))
    work = np.repeat(np.arange(benchmarks), core.size)
    clock_hz, memory_hz = np.tile(core, benchmarks), np.tile(memory, benchmarks)
    rate = share[work] * np.stack([clock_hz] * 3 + [memory_hz], axis=1)
    names = (*EVENTS, "dram_busy_cycle")
    predictors = tuple(
        CounterPredictor(
            name,
            "memory" if name == "dram_busy_cycle" else "core",
            full=1e9 if name in EVENTS else 2e9,
        )
        for name in names
    )
    blank = CounterTable(
        name="made",
        power_w=np.ones(work.size),
        clock_hz=clock_hz,
        memory_clock_hz=memory_hz,
        occurrence=rate,
        predictors=predictors,
        benchmark=work,
        benchmark_names=tuple(f"b{i}" for i in range(benchmarks)),
        group=np.arange(benchmarks) // 2,
        group_names=tuple(f"g{i}" for i in range((benchmarks + 1) // 2)),
        default_hz=(1000e6, 2000e6),
    )
    power_w = truth(floored).power(activity_of(blank)).total_w[:, 0]
    return replace(blank, power_w=power_w * (1.0 + noise * rng.standard_normal(work.size)))


def tegra_table() -> tuple[CounterTable, HybridRail]:
    """Rows the published Tegra K1 model would draw: idle, each event alone, eight mixtures, at 30
    clock pairs.
    """
    model = power_model.load_saved_model(Path("tegra-k1")).model
    names = model.required_events
    rail_of = {
        e: rail
        for r, rail in zip(model.rails, ("core", "memory", "host"), strict=True)
        for e in r.event_f
    }
    rng = np.random.default_rng(11)
    top = np.array(
        [
            {"instruction": 3e10, "cycle": 1.0 if "per" in n else 5e8}.get(n.split("_")[-1], 3e7)
            for n in names
        ]
    )
    stress = top * rng.uniform(0.5, 1.0, len(names))
    work = np.vstack(
        [np.zeros(len(names)), np.diag(stress), stress * rng.uniform(0, 1, (8, len(names)))]
    )
    core, memory = (
        np.array([72, 252, 396, 540, 684, 852]) * 1e6,
        np.array([204, 300, 396, 600, 924]) * 1e6,
    )
    pairs = [a.ravel() for a in np.meshgrid(core, memory, indexing="ij")]
    clock_hz, memory_hz = (np.tile(a, len(work)) for a in pairs)
    benchmark = np.repeat(np.arange(len(work)), pairs[0].size)
    on_host = np.array([rail_of[name] == "host" for name in names])
    labels = tuple(f"b{i}" for i in range(len(work)))
    table = CounterTable(
        name="tegra",
        power_w=np.ones(benchmark.size),
        clock_hz=clock_hz,
        memory_clock_hz=memory_hz,
        occurrence=work[benchmark] * np.where(on_host, 1.0, (clock_hz / 852e6)[:, np.newaxis]),
        predictors=tuple(CounterPredictor(name, rail_of[name]) for name in names),
        benchmark=benchmark,
        benchmark_names=labels,
        group=np.arange(len(work)),
        group_names=labels,
        voltage_v={
            "core": model.rails[0].voltage.level_at(clock_hz),
            "memory": np.full(benchmark.size, 1.35),
            "host": np.full(benchmark.size, 1.05),
        },
    )
    return replace(table, power_w=model.power(activity_of(table)).total_w[:, 0]), model


def activity_of(table: CounterTable) -> Activity:
    """One second of each row of a table, as a model sees it."""
    names = ("active_cycle", *(p.event for p in table.predictors))
    value = np.concatenate(
        [(table.busy() * table.clock_hz)[:, np.newaxis], table.occurrence], axis=1
    )
    at = OperatingPoint(
        table.clock_hz[:, np.newaxis], memory_clock_hz=table.memory_clock_hz[:, np.newaxis]
    )
    return Activity(
        np.ones((table.rows, 1)), value[:, np.newaxis, :], names, at, ActivitySource.PROFILED
    )


def anchored_w(
    model: HybridRail, activity: Activity, reference: Activity, measured_w: np.ndarray
) -> np.ndarray:
    """Total power when that of the same work is known at one setting, ``(*sweep, interval)``.

    What the model misses there is taken for activity of the first rail that no counter sees, so it
    scales like that rail's counted events: P(f) = P̂(f) + (P_0 - P̂_0)·D(f)/D_0, with
    D = V²·Σ C_i·ρ_i; for work without events D = V²·f.
    """
    now, then = _switching(model, activity), _switching(model, reference)
    missed_w = np.asarray(measured_w) - model.power(reference).total_w
    return np.asarray(model.power(activity).total_w + missed_w * now / then)


def _switching(model: HybridRail, activity: Activity) -> np.ndarray:
    """How much the first rail switches, in a unit of its own; its clock stands in where nothing is
    counted.
    """
    rail = model.rails[0]
    square = rail.volt(activity.at) ** 2
    counted = sum(
        (c * event_intensity(activity, e) for e, c in rail.event_f.items()),
        np.zeros(activity.duration_s.shape),
    )
    return np.where(counted > 0, square * counted, square * rail.rail_clock_hz(activity.at))
