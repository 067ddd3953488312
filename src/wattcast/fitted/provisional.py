"""The provisional rule: a bundle for a GPU nobody has fitted, from its catalogue entry alone."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
import numpy as np

from wattcast import units
from wattcast.arrays import per_sweep
from wattcast.files import from_yaml
from wattcast.fitted.bundle import FAMILIES, Bundle, Residual
from wattcast.hardware import Gpu
from wattcast.kernels.lower import CUDA_EVENT, TENSOR_EVENT, reference_of
from wattcast.power.module import ModulePower
from wattcast.power.static import IdlePower, VoltageCurve
from wattcast.provenance import Provenance, Status
from wattcast.timeline.clock import ClockLaw
from wattcast.timeline.phases import Correction, Launch


class _Correction(msgspec.Struct, forbid_unknown_fields=True):
    compute: float
    memory: float
    fixed: str


class _Voltage(msgspec.Struct, forbid_unknown_fields=True):
    clock_share: list[float]
    relative: list[float]


class _Power(msgspec.Struct, forbid_unknown_fields=True):
    full_rate_share: dict[str, float]
    idle_share_at_top_clock: float
    idle_share_at_lowest_clock: float
    idle_per_c: float
    idle_reference_c: float
    voltage: _Voltage
    toggling: dict[str, float]


class _Law(msgspec.Struct, forbid_unknown_fields=True):
    without: float
    activity: list[float]
    ratio: list[float]


class _Residual(msgspec.Struct, forbid_unknown_fields=True):
    latency: tuple[float, float]
    power: tuple[float, float]
    rows: int


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    date: str
    launch: dict[str, str]
    corrections: dict[str, _Correction]
    power: _Power
    effective_clock: dict[str, _Law]
    residual: _Residual


def provisional(gpu: Gpu) -> Bundle:
    """The provisional bundle of ``gpu``; everything it guesses is in its assumptions."""
    rule = _rule()
    law = rule.effective_clock.get(gpu.architecture)
    idle, idle_note = _idle(gpu, rule.power)
    voltage, voltage_note = _voltage(gpu, rule.power)
    return Bundle(
        gpu=gpu.name,
        status=Status.PROVISIONAL,
        provenance=Provenance(rule.source, rule.date),
        corrections={
            name: Correction(c.compute, c.memory, units.parse(c.fixed, "s", f"corrections.{name}"))
            for name, c in rule.corrections.items()
        },
        launch=Launch(
            units.parse(rule.launch["host_per_operator"], "s"), units.parse(rule.launch["link_per_message"], "s")
        ),
        power=ModulePower(_energies(gpu, idle, rule.power), idle, voltage),
        clock_law=ClockLaw(law.without, np.array(law.activity), np.array(law.ratio)) if law else None,
        residuals={
            name: Residual(rule.residual.latency, rule.residual.power, rule.residual.rows) for name in FAMILIES
        },
        toggling=rule.power.toggling,
        reference=reference_of(gpu),
        assumptions=tuple(
            note
            for note in (
                "provisional coefficients: set by hand, not fitted to measurements; expect errors of tens of percent",
                idle_note,
                voltage_note,
            )
            if note
        ),
    )


@cache
def _rule() -> _Rule:
    data = files("wattcast.fitted").joinpath("provisional.yaml").read_bytes()
    return from_yaml(data, _Rule, "provisional.yaml")


def _idle(gpu: Gpu, rule: _Power) -> tuple[IdlePower, str]:
    warming = {"reference_c": rule.idle_reference_c, "per_c": rule.idle_per_c}
    if gpu.power.idle_w is not None:
        return IdlePower(gpu.power.idle_w.clock_hz, gpu.power.idle_w.value, **warming), ""
    limit_w, low_hz, top_hz = _ends(gpu)
    shares = np.array([rule.idle_share_at_lowest_clock, rule.idle_share_at_top_clock])
    low, top = shares * limit_w
    note = (
        f"no idle power of {gpu.name} is published: taken as {top:.0f} W at the top clock, {low:.0f} W at the lowest"
    )
    return IdlePower(np.array([low_hz, top_hz]), shares * limit_w, **warming), note


def _voltage(gpu: Gpu, rule: _Power) -> tuple[VoltageCurve, str]:
    published = gpu.power.voltage_v
    if published is not None:
        return VoltageCurve(published.clock_hz, np.maximum.accumulate(published.value) / published.value.max()), ""
    _, _, top_hz = _ends(gpu)
    curve = VoltageCurve(np.array(rule.voltage.clock_share) * top_hz, np.array(rule.voltage.relative))
    return curve, f"no V(f) of {gpu.name} is published: the shape of the A100-PCIE's table, over its own top clock"


def _energies(gpu: Gpu, idle: IdlePower, rule: _Power) -> dict[str, float]:
    """Joules per event: the module's share of the power headroom, over its full rate at the top clock."""
    limit_w, _, top_hz = _ends(gpu)
    headroom_w = max(limit_w - float(idle.at(top_hz, idle.reference_c)), 0.3 * limit_w)
    chip_hz = _one(gpu.sm_count) * top_hz
    pipes = gpu.pipes
    rate = {TENSOR_EVENT[d]: ("tensor", _one(r) * chip_hz) for d, r in pipes.tensor_flop_per_cycle.items()}
    rate |= {CUDA_EVENT[d]: ("cuda", _one(r) * chip_hz) for d, r in pipes.cuda_flop_per_cycle.items()}
    if pipes.sfu_op_per_cycle is not None:
        rate["sfu_op"] = ("sfu", _one(pipes.sfu_op_per_cycle) * chip_hz)
    dram = _one(gpu.memory.byte_per_s)
    # Where the L2's rate is not published, twice the DRAM's stands for it, as on an H200.
    l2 = _one(gpu.l2.byte_per_cycle) * top_hz if gpu.l2.byte_per_cycle is not None else 2.0 * dram
    rate |= {"l2_byte": ("l2", l2), "dram_read_byte": ("dram", dram), "dram_write_byte": ("dram", dram)}
    if gpu.links.nvlink_byte_per_s is not None:
        rate["link_byte"] = ("link", _one(gpu.links.nvlink_byte_per_s))
    return {event: rule.full_rate_share[module] * headroom_w / full for event, (module, full) in rate.items()}


def _ends(gpu: Gpu) -> tuple[float, float, float]:
    top_hz = _one(gpu.clocks.max_hz)
    low_hz = _one(gpu.clocks.min_hz) if gpu.clocks.min_hz is not None else 0.3 * top_hz
    return _one(gpu.power.limit_w), min(low_hz, 0.99 * top_hz), top_hz


def _one(value: object) -> float:
    """The number of a field; a swept GPU has none, since energies belong to one real chip."""
    return float(per_sweep(value))  # type: ignore[arg-type]
