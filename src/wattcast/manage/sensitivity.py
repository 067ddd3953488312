"""Sensitivities while a program runs: predicted from counters, or measured by stepping a knob; then binned.

Equations are those of paper 004. Fitting is in ``fit/sensitivity.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from importlib.resources import files

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import MissingEvents, nearest
from wattcast.fit.sensitivity import DERIVED, RAW, SensitivityModel, aggregated, compute_to_memory, measured, parse
from wattcast.manage.knobs import Role
from wattcast.manage.plant import Tables

LOW_EDGE, HIGH_EDGE = 0.30, 0.70  # section 5.2: "<30%, 30%-70%, and >70%"


class Bin(IntEnum):
    """How much a knob matters."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


def binned(sensitivity: float) -> Bin:
    """The bin of a sensitivity; the edges belong to the middle.

    >>> [binned(s).name for s in (0.29, 0.3, 0.7, 0.71)]
    ['LOW', 'MEDIUM', 'MEDIUM', 'HIGH']
    """
    return Bin.LOW if sensitivity < LOW_EDGE else Bin.HIGH if sensitivity > HIGH_EDGE else Bin.MEDIUM


def peak_byte_per_s(memory_hz: float, bus_bit: float, channels: float, transfer_rate: float) -> float:
    """Equation 2: peak bandwidth = memory clock × bus width × channels × transfers per clock.

    >>> peak_byte_per_s(1.375e9, 64, 6, 4)
    264000000000.0
    """
    return memory_hz * bus_bit / 8.0 * channels * transfer_rate


def ic_activity(read_write_byte_per_s: float, peak: float) -> float:
    """Equation 1: off-chip interconnect activity, of 1."""
    return read_write_byte_per_s / peak


def memory_w(card_w: float, gpu_w: float, other_w: float) -> float:
    """Equation 4: memory power is what is left of the card's."""
    return card_w - gpu_w - other_w


def with_derived(counters: Mapping[str, float]) -> Mapping[str, float]:
    """The counters, with compute-to-memory intensity worked out where its parts are there."""
    if DERIVED in counters or "VALUBusy" not in counters or "MemUnitBusy" not in counters:
        return counters
    active = counters["VALUBusy"] * counters.get("VALUUtilization", 100.0) / 100.0
    return {**counters, DERIVED: min(100.0 * active / max(counters["MemUnitBusy"], 1e-9), 100.0)}


def predicted(model: SensitivityModel, counters: Mapping[str, float]) -> tuple[float, float]:
    """Compute and bandwidth sensitivity of a run from its counters."""
    full = with_derived(counters)
    try:
        return model.compute.predict(full), model.bandwidth.predict(full)
    except KeyError:
        raise _missing(model, full) from None


def _missing(model: SensitivityModel, counters: Mapping[str, float]) -> MissingEvents:
    needed = {**model.compute.coefficients, **model.bandwidth.coefficients}
    missing = [name for name in needed if name not in counters]
    hint = nearest(missing[0], counters)
    return MissingEvents(
        f"sensitivity model {model.name!r} needs {', '.join(missing)}"
        f"{f' (closest: {hint[0]})' if hint else ''}, absent from these counters: {', '.join(counters)}. "
        "Collect the missing counters, or fit a model to those you have (wattcast fit sensitivity)."
    )


@cache
def preset(name: str = "hd7970_table3") -> SensitivityModel:
    """A model shipped with Wattcast."""
    file = f"{name}.yaml"
    return parse(files("wattcast.manage").joinpath("data", file).read_bytes(), file)


def of_tables(tables: Tables) -> dict[str, Array]:
    """Sensitivities of every phase by finite differences over the whole range of each knob, others at their top.

    ``(phase,)`` arrays by role, and ``compute`` and ``bandwidth`` as the controller uses them
    (section 4.1: "CU frequency and memory bandwidth are set to their maximum possible values").
    """
    lattice = tables.lattice
    top = lattice.flat(lattice.top)
    found: dict[str, Array] = {}
    for i, knob in enumerate(lattice.knobs):
        levels = [lattice.flat((*lattice.top[:i], level, *lattice.top[i + 1 :])) for level in range(len(knob.levels))]
        values = np.asarray(knob.levels)
        each = measured(tables.time_s[:, levels[:-1]], tables.time_s[:, [top]], values[:-1], np.asarray(values[-1]))
        found[knob.role] = each.mean(axis=-1)
    units, clock = found.get(Role.COMPUTE_UNITS), found.get(Role.CORE_CLOCK)
    both = [s for s in (units, clock) if s is not None]
    found["compute"] = aggregated(both[0], both[-1])
    found["bandwidth"] = found.get(Role.MEMORY_CLOCK, np.zeros(len(tables.kernels)))
    return found


def mean_counters(tables: Tables) -> dict[str, Array]:
    """Counters of each phase averaged over all settings (section 4.2), with the derived one."""
    full = dict(tables.counters)
    if set(RAW) <= set(full):
        full[DERIVED] = compute_to_memory(*(full[name] for name in RAW))
    return {name: table.mean(axis=-1) for name, table in full.items()}
