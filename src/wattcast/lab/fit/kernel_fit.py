"""Fit every stage of a bundle to the rows of a kernel database.

The stages, each on the rows given and nothing else: the effective-clock law, corrections and
learned residual of latency (burst rows), energies with relative V(f) and toggling (sustained and
duty rows, at measured latency and clock), learned residual of energy.

**Effective clock** from spin kernels that run next to the load: the ratio of effective to reported
clock against x = tensor activity · (f / f_top)², for random data, is a falling piecewise line by
non-negative least squares on its steps down. The square of the clock stands for voltage squared
times frequency relative to the clock itself: the slowing follows the load on the supply, and capped
kernels at 1450 MHz slow less than the same ones at 1980.

**Energies.** Measured latency and clock go in, so that errors of the latency model do not leak into
energies:

    P - P_idle(f) = V²(f)·Σ_m E_m·n_m·τ/t + Σ_d E_d·n_d·τ/t

is bilinear in (V², E). Alternate [Guerreiro2018]: non-negative energies by least squares on the
relative error of P at given V, then V² at a few clocks, never falling, at given energies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.calibrate.kernel_rows import (
    CARD,
    KernelRows,
    assign_folds,
    on_random_data,
    select_kernels,
    settled_figures,
)
from wattcast.calibrate.latency_fit import (
    LENGTH_ROWS,
    ResidualSample,
    fit_corrections,
    fit_residuals,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_prediction import (
    find_ends,
    loaded_clock_hz,
    measured_ranges,
    uses_tensor_cores,
)
from wattcast.core.arrays import Array, Mask
from wattcast.core.strict_files import (
    FitStatus,
    Provenance,
    read_shipped_yaml,
)
from wattcast.hardware import Gpu
from wattcast.hardware.gpu import DEFAULT_TEMPERATURE_C
from wattcast.kernels import (
    Kernels,
    ReferenceChip,
    RunCondition,
    build_kernels,
    reference_chip,
)
from wattcast.lab.fit.choice_fit import count_k_parts, fit_kernel_choice
from wattcast.power.activity import known_events
from wattcast.power.module_power import (
    OWN_RAIL,
    STEADY,
    ModulePower,
)
from wattcast.power.power_model import IdlePower, VoltageCurve
from wattcast.predictor.bundle.bundle_file import (
    FAMILIES,
    Bundle,
    CorrectionFile,
    LaunchFile,
    ResidualEnds,
)
from wattcast.predictor.ideal_terms import (
    RATE_FEATURES,
    busy_rates,
    compute_ideal_terms,
)
from wattcast.predictor.kernel_phases import (
    Correction,
    blend_corrections,
    count_events,
)
from wattcast.predictor.learned_factors import LearnedFactor, LearnedFactors
from wattcast.predictor.pipeline import BUSY_EVENT
from wattcast.predictor.timeline import (
    ClockLaw,
    count_active_sms,
    count_waves,
)

ACTIVITY_KNOTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
CLOCK_POWER = (
    2.0  # of the clock that stands for voltage squared times frequency relative to the clock
)


def fit_clock_law(
    activity: Array,
    clock_hz: Array,
    effective_hz: Array,
    tensor: Mask,
    top_hz: float,
) -> ClockLaw:
    """Fit the law to rows with both clocks; ``tensor`` marks rows that issue tensor
    instructions.
    """
    from scipy.optimize import nnls

    ratio = np.clip(effective_hz / clock_hz, 0.5, 1.0)
    load = np.clip(activity[tensor] * (clock_hz[tensor] / top_hz) ** CLOCK_POWER, 0.0, 1.0)
    hats = _hat_functions(load, ACTIVITY_KNOTS)
    # ratio = start - Σ_{j<=i} step_j: one column for the start, the others for the steps down
    steps = -np.stack([hats[:, j:].sum(axis=1) for j in range(1, len(ACTIVITY_KNOTS))], axis=-1)
    drops, _ = nnls(np.column_stack([hats.sum(axis=1), steps]), ratio[tensor])
    line = np.minimum(drops[0] - np.concatenate([[0.0], np.cumsum(drops[1:])]), 1.0)
    without = float(np.median(ratio[~tensor])) if not tensor.all() else 1.0
    line = np.maximum(line, 0.3)
    return ClockLaw(
        without,
        ACTIVITY_KNOTS.copy(),
        line,
        clock_power=CLOCK_POWER,
        top_hz=top_hz,
    )


def _hat_functions(at: Array, knots: Array) -> Array:
    """Return the share that each knot has in a linear interpolation, ``(row, knot)``."""
    return np.stack([np.interp(at, knots, unit) for unit in np.eye(len(knots))], axis=-1)


VOLTAGE_KNOTS_HZ = np.array([1.35e9, 1.5e9, 1.65e9, 1.8e9, 1.98e9])
_ROUNDS = 8


@dataclass(frozen=True)
class PowerRows:
    """Rows as the power fit reads them, ``(row,)`` or ``(row, event)``."""

    rate: Array  # (row, event) events per second
    events: tuple[str, ...]
    modules: tuple[str, ...]  # of each event
    clock_hz: Array
    power_w: Array
    data: Sequence[str]
    card: Array  # number of the card
    sustained: Mask  # without pauses


def fit_module_power(
    rows: PowerRows,
    idle: IdlePower,
    temperature_c: float,
    weight: Array | None = None,
) -> tuple[ModulePower, dict[str, float]]:
    """Fit the power model on random data, and the dynamic energy of other data relative to it."""
    assert "random" in rows.data, "rows on random data"
    idle_w = idle.power_at(rows.clock_hz, temperature_c)
    volts = np.ones(len(VOLTAGE_KNOTS_HZ))
    toggling = {"random": 1.0}
    on_own_rail, steady = (
        np.array([m in group for m in rows.modules]) for group in (OWN_RAIL, STEADY)
    )
    for _ in range(_ROUNDS):
        square = np.interp(rows.clock_hz, VOLTAGE_KNOTS_HZ, volts)[:, None] ** 2
        factor = np.array([toggling.get(d, 1.0) for d in rows.data])[:, None]
        moved = rows.rate * np.where(on_own_rail, 1.0, square) * np.where(steady, 1.0, factor)
        energy = _fit_energies(rows, idle_w, moved, weight)
        core = (rows.rate * energy * np.where(steady, 1.0, factor))[:, ~on_own_rail].sum(axis=1)
        apart = (rows.rate * energy * factor)[:, on_own_rail].sum(axis=1)
        volts = _fit_voltage(rows, idle_w, core, apart)
        square = np.interp(rows.clock_hz, VOLTAGE_KNOTS_HZ, volts)[:, None] ** 2
        toggling = _fit_toggling(
            rows, idle_w, rows.rate * energy * np.where(on_own_rail, 1.0, square), steady
        )
    energies = {name: float(e) for name, e in zip(rows.events, energy, strict=True)}
    return ModulePower(energies, idle, VoltageCurve(VOLTAGE_KNOTS_HZ, volts)), toggling


def _fit_energies(
    rows: PowerRows,
    idle_w: Array,
    scaled: Array,
    weight: Array | None,
) -> Array:
    from scipy.optimize import nnls

    over = 1.0 / rows.power_w if weight is None else weight / rows.power_w
    matrix = scaled * over[:, None]
    target = (rows.power_w - idle_w) * over
    size = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    # a whisper of ridge: events that always come together share what they cost
    ridge = 1e-3 * np.sqrt(len(target)) * np.eye(matrix.shape[1])
    energies, _ = nnls(
        np.vstack([matrix / size, ridge]), np.concatenate([target, np.zeros(matrix.shape[1])])
    )
    return np.asarray(energies / size)


def _fit_voltage(
    rows: PowerRows,
    idle_w: Array,
    core: Array,
    apart: Array,
) -> Array:
    """Fit V at the knots: never falling, one at the top clock."""
    from scipy.optimize import lsq_linear

    hats = _hat_functions(rows.clock_hz, VOLTAGE_KNOTS_HZ)
    steps = np.tril(
        np.ones((len(VOLTAGE_KNOTS_HZ), len(VOLTAGE_KNOTS_HZ)))
    )  # squared = steps @ rises
    matrix = (hats @ steps) * (core / rows.power_w)[:, None]
    target = (rows.power_w - idle_w - apart) / rows.power_w
    top = 1e3 * steps[-1]
    limits = (
        np.r_[0.2, np.zeros(4)],
        np.inf,
    )  # few unknowns: an exact method, which no degenerate set of rows upsets
    done = lsq_linear(
        np.vstack([matrix, top]), np.append(target, 1e3), bounds=limits, method="bvls"
    )
    return np.asarray(np.minimum(np.sqrt(steps @ done.x), 1.0))


def _fit_toggling(
    rows: PowerRows,
    idle_w: Array,
    moving: Array,
    steady: Mask,
) -> dict[str, float]:
    """Fit the dynamic energy of each kind of data relative to random data, by least squares on
    relative error.
    """
    factors = {"random": 1.0}
    data = np.array(rows.data)
    for name in dict.fromkeys(d for d in rows.data if d != "random"):
        at = data == name
        part = moving[at][:, ~steady].sum(axis=1) / rows.power_w[at]
        moving_share = (
            rows.power_w[at] - idle_w[at] - moving[at][:, steady].sum(axis=1)
        ) / rows.power_w[at]
        factors[name] = float(np.clip((part @ moving_share) / max(part @ part, 1e-30), 0.05, 1.2))
    return factors


# A card at rest draws this share of what it draws at the top clock: 83 W at 345 MHz against 130 W
# at 1980 MHz on an H200 (driver 580). The campaign's own idle rows are all at the top clock.
_REST_SHARE = 83.0 / 130.0
_REST_HZ = 345e6
# Families with some forty sustained rows learn from one another's; passes over data learn from
# those over rows as well, which do better among themselves.
_ROWS = ("softmax", "layernorm", "rmsnorm")
_CONVOLUTIONS = ("conv2d", "depthwise")
_POOLS = {
    **dict.fromkeys(_ROWS, _ROWS),
    **dict.fromkeys(_CONVOLUTIONS, _CONVOLUTIONS),
    "elementwise": (*_ROWS, "elementwise"),
}
_LEAST_SURE = 0.05  # of a kernel that draws little more than the card at rest
# a lowered clock at less than this share of the limit is a clock still climbing back, not a cap
_LOW_POWER = 0.92


@dataclass(frozen=True)
class KernelFit:
    """Everything that is fitted to one set of rows."""

    corrections: dict[str, Correction]
    law: ClockLaw
    power: ModulePower
    toggling: dict[str, float]
    learned: LearnedFactors


def fit_kernel_rows(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
) -> KernelFit:
    """Fit all stages to ``rows``."""
    plain = reference_chip(gpu)
    reference = replace(plain, choice=fit_kernel_choice(rows, plain))
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        reference,
        (),
    )
    law = _fit_law(rows, kernels, gpu)
    at = rows.is_kind("burst") & on_random_data(rows) & rows.fit
    burst = rows.select_rows(at)
    some = select_kernels(kernels, at)
    latency_s = burst.column("latency_s")
    effective_hz = loaded_clock_hz(
        law,
        some,
        latency_s,
        reference.top_hz,
        reference.sm_count,
    )
    ran = build_kernels(
        burst.ops,
        conditions_as_ran(burst),
        gpu,
        reference,
        (),
    )
    corrections = fit_corrections(
        compute_ideal_terms(ran, reference), ran.work.kernel_family, latency_s, effective_hz
    )
    kernel_keys = {
        **starting_rule().read_corrections(),
        **corrections,
    }  # a family without bursts may have sustained rows
    time = fit_residuals(
        _collect_samples(
            burst,
            ran,
            rows,
            gpu,
            plain,
            kernel_keys,
            effective_hz,
        )
    )
    power, toggling, energy = _fit_power(
        rows,
        kernels,
        gpu,
        idle,
        kernel_keys,
        reference,
    )
    return KernelFit(
        corrections,
        law,
        power,
        toggling,
        LearnedFactors(reference, time, energy),
    )


def _collect_samples(
    burst: KernelRows,
    ran: Kernels,
    rows: KernelRows,
    gpu: Gpu,
    plain: ReferenceChip,
    corrections: dict[str, Correction],
    clock_hz: Array,
) -> list[ResidualSample]:
    """Return the samples that the learned factor of time is fitted to.

    Every row is lowered with a kernel choice that never saw its shape, as in a prediction: choices
    are fitted without each of a few inner folds in turn. Every product whose kernel is known comes
    once more, as it ran."""
    latency_s = burst.column("latency_s")

    def sample(
        kernels: Kernels,
        at: Mask,
        again: bool = False,
    ) -> ResidualSample:
        logs = np.log(blend_corrections(kernels.work, corrections))
        return ResidualSample(
            kernels,
            latency_s[at] / compute_ideal_terms(kernels, plain).seconds(logs, clock_hz[at]),
            again=again,
        )

    inner = dict(zip(rows.ops, assign_folds(rows, _INNER, seed=1), strict=True))
    fold_of = np.array([inner[op] for op in burst.ops])
    all_folds = np.array([inner[op] for op in rows.ops])
    samples = []
    for k in range(_INNER):
        at = fold_of == k
        if at.any():
            some = burst.select_rows(at)
            unseen = replace(
                plain, choice=fit_kernel_choice(rows.select_rows(all_folds != k), plain)
            )
            samples.append(
                sample(
                    build_kernels(
                        some.ops,
                        some.conditions,
                        gpu,
                        unseen,
                        (),
                    ),
                    at,
                )
            )
    named = np.isin(ran.work.root_family, ("gemm", "conv2d")) & np.array(
        [bool(names) for names in burst.names]
    )
    return (
        [*samples, sample(select_kernels(ran, named), named, again=True)]
        if named.any()
        else samples
    )


_INNER = 4


class StartingRule(msgspec.Struct, forbid_unknown_fields=True):
    """What a fit takes where its rows are silent (``starting_rule.yaml``); it leans on nothing that
    is fitted.
    """

    launch: LaunchFile
    corrections: dict[str, CorrectionFile]  # of every family
    residual: ResidualEnds

    def read_corrections(self) -> dict[str, Correction]:
        """Return the corrections by family, their times in seconds."""
        return {
            name: c.to_correction(f"starting_rule.yaml: {name}")
            for name, c in self.corrections.items()
        }


@cache
def starting_rule() -> StartingRule:
    """Return the rule that ships with Wattcast."""
    return read_shipped_yaml(StartingRule, "wattcast.lab.fit", "starting_rule.yaml")


def build_bundle(
    fit: KernelFit,
    rows: KernelRows,
    gpu: Gpu,
    residuals: Mapping[str, ResidualEnds],
    note: str,
) -> Bundle:
    """Build a bundle from a fit; families without rows take the starting rule, and its assumptions
    say so.
    """
    rule = starting_rule()
    unmeasured = {
        name: c for name, c in rule.read_corrections().items() if name not in fit.corrections
    }
    return Bundle(
        gpu=gpu.name,
        status=FitStatus.MEASURED,
        provenance=Provenance(
            f"wattcast lab fit kernels {rows.source}", device=rows.card, note=note
        ),
        corrections={**fit.corrections, **unmeasured},
        launch=rule.launch.to_costs("starting_rule.yaml: launch"),
        power=fit.power,
        clock_law=fit.law,
        residuals={**dict.fromkeys(FAMILIES, rule.residual), **residuals},
        toggling=fit.toggling,
        reference=fit.learned.reference,
        learned=fit.learned,
        seen=measured_ranges(
            rows,
            build_kernels(
                rows.ops,
                rows.conditions,
                gpu,
                fit.learned.reference,
                (),
            ),
        ),
        governor_share=fit_governor_share(rows, gpu),
        power_limit_w=find_ends(rows.number.get("power_limit_w", np.empty(0)), 1.0),
        temperature_c=find_ends(rows.number.get("temperature_c", np.empty(0)), 1.0),
        assumptions=tuple(
            f"no {family} was measured; its corrections are set by hand"
            for family in unmeasured
            if family != "collective"
        ),
    )


def fit_governor_share(rows: KernelRows, gpu: Gpu) -> float:
    """Fit the share of the limit at which the governor holds the board, from capped rows that
    settled.
    """
    power_w = rows.column("settled_power_w")
    top_hz = float(np.mean(gpu.clocks.max_hz))
    capped = np.isfinite(power_w) & (rows.column("settled_clock_hz") < TOP_CLOCK_SHARE * top_hz)
    share = power_w[capped & on_random_data(rows) & rows.fit] / float(np.mean(gpu.power.limit_w))
    share = share[share > _LOW_POWER]
    return float(np.clip(np.median(share), _LOW_POWER, 1.0)) if share.size else 1.0


def conditions_as_ran(rows: KernelRows) -> tuple[RunCondition, ...]:
    """Return the conditions of rows with the names of the kernels that ran, where they are
    known.
    """
    ran = zip(rows.conditions, rows.names, count_k_parts(rows), strict=True)
    return tuple(replace(c, kernels=names, parts=parts) for c, names, parts in ran)


def fit_idle_curve(rows: list[tuple[float, float, float]], gpu: Gpu) -> IdlePower:
    """Fit idle power by clock to idle rows at the top clock; it grows with temperature as those
    rows do.
    """
    top = float(np.mean(gpu.clocks.max_hz))
    power = np.array([p for _, p, _ in rows])
    degrees = np.array([t for _, _, t in rows])
    slope, at_zero = (
        np.polyfit(degrees, power, 1) if np.ptp(degrees) > 3.0 else (0.0, float(power.mean()))
    )
    at_reference = max(float(at_zero + slope * DEFAULT_TEMPERATURE_C), 1.0)
    return IdlePower(
        np.array([_REST_HZ, top]),
        np.array([_REST_SHARE * at_reference, at_reference]),
        reference_c=DEFAULT_TEMPERATURE_C,
        per_c=max(float(slope) / at_reference, 0.0),
    )


def _fit_law(
    rows: KernelRows,
    kernels: Kernels,
    gpu: Gpu,
) -> ClockLaw:
    clock, effective, latency_s = (
        rows.column(name) for name in ("sm_clock_hz", "effective_clock_hz", "latency_s")
    )
    top_hz = float(np.mean(gpu.clocks.max_hz))
    usable = (
        np.isfinite(clock)
        & np.isfinite(effective)
        & np.isfinite(latency_s)
        & rows.fit
        & on_random_data(rows)
    )
    usable &= effective < 1.02 * clock  # beyond: the clock moved between the two readings
    busy = kernels.flop / (np.asarray(kernels.pipe_per_cycle) * float(np.mean(gpu.sm_count)))
    activity = np.clip(busy[usable] / (latency_s * effective)[usable], 0.0, 1.0)
    return fit_clock_law(
        activity,
        clock[usable],
        effective[usable],
        uses_tensor_cores(kernels)[usable],
        top_hz,
    )


def _fit_power(
    rows: KernelRows,
    kernels: Kernels,
    gpu: Gpu,
    idle: IdlePower,
    corrections: Mapping[str, Correction],
    reference: ReferenceChip,
) -> tuple[ModulePower, dict[str, float], dict[str, LearnedFactor]]:
    """Fit energies, toggling and the learned energy factor of each family."""
    top_hz = float(np.mean(gpu.clocks.max_hz))
    priced, sampled = price_rows(
        rows,
        kernels,
        gpu,
        idle,
        corrections,
        reference,
    )
    # an error in the energy of a capped row becomes an error of its clock: they count half as much
    # again
    weight = np.where(priced.clock_hz < TOP_CLOCK_SHARE * top_hz, 1.5, 1.0)
    power, toggling = fit_module_power(priced, idle, DEFAULT_TEMPERATURE_C, weight)
    measured_w = priced.power_w
    for _ in range(_LEVELLED):
        cards = describe_cards(replace(priced, power_w=measured_w), sampled, power, toggling)
        priced = replace(priced, power_w=measured_w / cards.compute_level(find_card_levels(cards)))
        power, toggling = fit_module_power(priced, idle, DEFAULT_TEMPERATURE_C, weight)
    sample = replace(sampled, ratio=energy_ratio(priced, power, toggling))
    energy = fit_residuals(
        [sample],
        pools=_POOLS,
        leaves=8,
        hold_in=False,
        loss="squared_error",
        length_rows=2 * LENGTH_ROWS,
    )
    return power, toggling, energy


def price_rows(
    rows: KernelRows,
    kernels: Kernels,
    gpu: Gpu,
    idle: IdlePower,
    corrections: Mapping[str, Correction],
    reference: ReferenceChip,
    modelled_hz: Array | None = None,
) -> tuple[PowerRows, ResidualSample]:
    """Return the settled rows as the power fit reads them, and as a sample whose ratios are still
    to be set.

    ``modelled_hz`` stands for the settled clocks, where rows are to be priced at the clocks that a
    model gives them."""
    power_w, settled_hz, latency_s = settled_figures(rows)
    clock_hz = settled_hz if modelled_hz is None else modelled_hz
    usable = _select_priced_rows(rows, gpu, power_w, clock_hz)
    at = rows.select_rows(usable)
    some = select_kernels(kernels, usable)
    power_w = power_w[usable]
    clock_hz = clock_hz[usable]
    latency_s = latency_s[usable]
    effective = at.column("effective_clock_hz") * clock_hz / settled_hz[usable]
    effective_hz = np.where(np.isfinite(effective), effective, 0.92 * clock_hz)

    fixed_s = blend_corrections(some.work, corrections)[:, 2] * some.work.launches
    own_s = np.maximum(latency_s - fixed_s, 0.0)
    events, counted = _count_used_events(some, own_s, effective_hz, gpu)
    priced = PowerRows(
        counted / latency_s[:, None],
        events,
        tuple(known_events()[event].module for event in events),
        clock_hz,
        power_w,
        at.data,
        at.number.get(CARD, np.zeros(len(at))),
        at.is_kind("sustained"),
    )
    at_top_s = latency_s * clock_hz / reference.top_hz
    rates = busy_rates(some, reference, at_top_s, fixed_s)
    # a percent of power is the more percent of dynamic power, the smaller that is
    idle_w = idle.power_at(clock_hz, DEFAULT_TEMPERATURE_C)
    sure = np.clip(1.0 - idle_w / power_w, _LEAST_SURE, 1.0)
    sample = ResidualSample(
        some,
        np.ones(len(power_w)),
        dict(zip(RATE_FEATURES, rates, strict=True)),
        sure=sure,
    )
    return priced, sample


def _count_used_events(
    kernels: Kernels,
    busy_s: Array,
    clock_hz: Array,
    gpu: Gpu,
) -> tuple[tuple[str, ...], Array]:
    """Return the events of kernels and the cycles of their busy SMs, as far as any of them occur;
    kernels are busy for ``busy_s`` at ``clock_hz``.
    """
    names, counted = count_events(kernels)
    active_sms = count_active_sms(kernels, count_waves(kernels, float(np.mean(gpu.sm_count))))
    value = np.column_stack([counted, active_sms * busy_s * clock_hz])
    events = np.array([*names, BUSY_EVENT])
    is_used = value.any(axis=0) & (events != "link_byte")
    return tuple(events[is_used].tolist()), value[:, is_used]


def _select_priced_rows(
    rows: KernelRows,
    gpu: Gpu,
    power_w: Array,
    clock_hz: Array,
) -> Mask:
    """Mark the rows with settled power and clock; none whose clock still climbs at low power."""
    usable = rows.is_kind("sustained", "duty") & rows.fit
    usable &= np.isfinite(power_w) & np.isfinite(clock_hz)
    below_top = clock_hz < TOP_CLOCK_SHARE * float(np.mean(gpu.clocks.max_hz))
    climbing = below_top & (power_w < _LOW_POWER * float(np.mean(gpu.power.limit_w)))
    return np.asarray(usable & ~climbing)


def energy_ratio(
    rows: PowerRows,
    power: ModulePower,
    toggling: Mapping[str, float],
) -> Array:
    """Return measured over modelled dynamic power."""
    idle_w = power.idle.power_at(rows.clock_hz, DEFAULT_TEMPERATURE_C)
    modelled_w = np.maximum(_event_watts(rows, power, toggling).sum(axis=1), 1.0)
    return np.asarray(np.clip((rows.power_w - idle_w) / modelled_w, 0.25, 4.0))


def _event_watts(
    rows: PowerRows,
    power: ModulePower,
    toggling: Mapping[str, float],
) -> Array:
    """Return the modelled dynamic power, ``(row, event)``."""
    on_own_rail = np.array([module in OWN_RAIL for module in rows.modules])
    is_steady = np.array([module in STEADY for module in rows.modules])
    energy_j = np.array([power.energy_j[name] for name in rows.events])
    voltage_squared = power.voltage.level_at(rows.clock_hz)[:, None] ** 2
    toggling_factor = np.array([toggling[data] for data in rows.data])[:, None]
    of_voltage = np.where(on_own_rail, 1.0, voltage_squared)
    of_data = np.where(is_steady, 1.0, toggling_factor)
    return np.asarray(rows.rate * energy_j * of_voltage * of_data)


_LEVELLED = 2  # rounds
# Spreads of logs of power: of kernel families and their kernels about the model, of cards in all
# they draw and in what their memory draws (two makes of it differ by a fifth), and of repeats.
_FAMILY = 0.15
_KERNEL = 0.07
_CARD = 0.03
_CARD_MEMORY = 0.12
_REPEAT = 0.015
_FREE = 1e3  # of what is not random


@dataclass(frozen=True)
class CardRows:
    """What rows tell of the cards they ran on, ``(row,)`` each."""

    card: Array
    memory: Array  # share of memory in the modelled power
    log_ratio: Array  # of measured over modelled power
    families: tuple[str, ...]
    kernels: tuple[str, ...]
    comparable: Mask  # on random data, without pauses

    def compute_level(self, levels: Mapping[float, tuple[float, float]]) -> Array:
        """Compute what the card of each row draws over what the mean card would draw."""
        card_level = np.array([levels.get(card, (0.0, 0.0)) for card in self.card])
        return np.asarray(np.exp(card_level[:, 0] + card_level[:, 1] * self.memory))


def describe_cards(
    rows: PowerRows,
    sample: ResidualSample,
    power: ModulePower,
    toggling: Mapping[str, float],
) -> CardRows:
    """Compare rows with the modelled power of their kernels."""
    event_w = _event_watts(rows, power, toggling)
    dynamic_w = np.maximum(event_w.sum(axis=1), 1.0)
    total_w = power.idle.power_at(rows.clock_hz, DEFAULT_TEMPERATURE_C) + dynamic_w
    on_memory = [module in OWN_RAIL for module in rows.modules]
    is_random = np.array([data == "random" for data in rows.data])
    return CardRows(
        card=rows.card,
        memory=event_w[:, on_memory].sum(axis=1) / total_w,
        log_ratio=np.log(rows.power_w / total_w),
        families=tuple(sample.kernels.work.kernel_family),
        kernels=tuple(str(op) for op in sample.kernels.ops),
        comparable=is_random & rows.sustained,
    )


def find_card_levels(*parts: CardRows) -> dict[float, tuple[float, float]]:
    """Find what each card draws more than the mean card, so that every card has one vote and not
    every row.

    Cards differ, and most in what their memory draws. With s the share of memory in the modelled
    power, log(P / P_model) = a + b·s + c_family + d_kernel + u_card + v_card·s + e is a mixed model
    [Searle1992]: all but a and b are random with spreads of their own, and found by ridge
    regression. Kernels that several cards ran tell these apart best; what a card with few rows
    shows is drawn towards the mean card. Returns u and v by card."""
    joined = _join_comparable(parts)
    of_card = _mark_labels(joined.card)
    memory = joined.memory
    fixed = _FREE * np.column_stack([np.ones(len(memory)), memory])
    design = np.column_stack(
        [
            of_card * _CARD,
            of_card * memory[:, None] * _CARD_MEMORY,
            fixed,
            _mark_labels(np.array(joined.families)) * _FAMILY,
            _mark_labels(np.array(joined.kernels)) * _KERNEL,
        ]
    )
    precise = design.T @ design + _REPEAT**2 * np.eye(design.shape[1])
    solution = np.linalg.solve(precise, design.T @ joined.log_ratio)
    cards = np.unique(joined.card).tolist()
    level = (_CARD * solution[: len(cards)]).tolist()
    memory_level = (_CARD_MEMORY * solution[len(cards) : 2 * len(cards)]).tolist()
    return dict(zip(cards, zip(level, memory_level, strict=True), strict=True))


def _join_comparable(parts: Sequence[CardRows]) -> CardRows:
    """Join the rows of several parts that can be compared."""
    families: list[str] = []
    kernels: list[str] = []
    for part in parts:
        places = np.flatnonzero(part.comparable).tolist()
        families += [part.families[place] for place in places]
        kernels += [part.kernels[place] for place in places]
    return CardRows(
        card=np.concatenate([part.card[part.comparable] for part in parts]),
        memory=np.concatenate([part.memory[part.comparable] for part in parts]),
        log_ratio=np.concatenate([part.log_ratio[part.comparable] for part in parts]),
        families=tuple(families),
        kernels=tuple(kernels),
        comparable=np.ones(len(families), dtype=bool),
    )


def _mark_labels(labels: npt.NDArray[Any]) -> Array:
    """Return 1 where a row has a label and 0 elsewhere, ``(row, label)``."""
    return np.asarray(labels[:, None] == np.unique(labels), dtype=np.float64)
