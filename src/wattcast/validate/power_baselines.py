"""Simpler power models on the same held-out rows: rate-based, alpha-C, and ours, all at measured time and clock.

With time and clock given, only the power model differs. Rate-based [Stokke2016, Eq. 1] has one cost an event
and a base power, whatever the voltage. Alpha-C [Stokke2016, Eq. 3] has one activity factor a rail: the
busiest unit's share of its peak on the core rail, DRAM's share of its bandwidth on the memory rail,
times V²·f. Ours is module power without its learned factor: energies of events times V², an idle curve.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.activity import events as known_events
from wattcast.activity.predicted import BUSY
from wattcast.arrays import Array
from wattcast.fit.energies import PowerRows, fit_power
from wattcast.fit.kernels import random, settled
from wattcast.fit.kernels_data import Rows
from wattcast.fit.kernels_split import folds_of
from wattcast.fitted import bundle_for
from wattcast.hardware import Gpu
from wattcast.hardware.operating_point import DEFAULT_TEMPERATURE_C
from wattcast.kernels import kernels_of
from wattcast.power.module import ModulePower
from wattcast.power.static import IdlePower, VoltageCurve
from wattcast.timeline.phases import counts
from wattcast.timeline.waves import active_share
from wattcast.validate.rows import Row, percent, row

_FIXED_S = 2e-6  # of a launch, in which no SM works


def power_rows(rows: Rows, gpu: Gpu, idle: IdlePower) -> list[Row]:
    """Held-out error of each power model on sustained rows of random data."""
    power_w, clock_hz, latency_s = settled(rows)
    at = rows.is_kind("sustained", "duty") & rows.fit & random(rows) & np.isfinite(power_w) & np.isfinite(clock_hz)
    some, fold = rows.where(at), folds_of(rows)[at]
    tested = some.is_kind("sustained") & (some.repeat == 0)
    priced, alpha = _rates(some, gpu, power_w[at], clock_hz[at], latency_s[at])
    found = {name: np.full(len(priced.power_w), np.nan) for name in ("module", "rate", "alpha")}
    for k in np.unique(fold):
        train, test = fold != k, fold == k
        model, _ = fit_power(priced.where(train), idle, DEFAULT_TEMPERATURE_C)
        assert isinstance(model, ModulePower)
        found["module"][test] = _module(model, priced.where(test))
        found["rate"][test] = _linear(_rate_terms(priced), priced.power_w, train, test)
        terms = _alpha_terms(alpha, priced.clock_hz, model.voltage)
        found["alpha"][test] = _linear(terms, priced.power_w, train, test)
    priced, found = priced.where(tested), {name: values[tested] for name, values in found.items()}
    capped = priced.clock_hz < 0.995 * float(np.mean(gpu.clocks.max_hz))
    where = f"{gpu.name} ablations, power at measured time and clock"
    said = {"module": "module power (ours, no learned factor)", "alpha": "alpha-C power", "rate": "rate-based power"}
    return [
        row(
            where,
            label,
            len(capped),
            percent(found[name], priced.power_w),
            capped=_rounded(percent(found[name][capped], priced.power_w[capped])),
            not_capped=_rounded(percent(found[name][~capped], priced.power_w[~capped])),
        )
        for name, label in said.items()
    ]


def _rates(rows: Rows, gpu: Gpu, power_w: Array, clock_hz: Array, latency_s: Array) -> tuple[PowerRows, Array]:
    """Events a second of every row, and its two activity factors ``(row, 2)``."""
    reference = bundle_for(gpu).reference
    kernels = kernels_of(rows.ops, rows.conditions, gpu, reference, ())
    names, counted = counts(kernels)
    sms = float(np.mean(gpu.sm_count))
    effective = rows.of("effective_clock_hz")
    effective_hz = np.where(np.isfinite(effective), effective, clock_hz)
    fixed_s = np.minimum(_FIXED_S * kernels.work.launches, latency_s)
    busy = active_share(kernels, sms) * sms * (latency_s - fixed_s) * effective_hz
    value, events = np.column_stack([counted, busy]), (*names, BUSY)
    used = [i for i, name in enumerate(events) if value[:, i].any() and name != "link_byte"]
    priced = PowerRows(
        value[:, used] / latency_s[:, None],
        tuple(events[i] for i in used),
        tuple(known_events()[events[i]].module for i in used),
        clock_hz,
        power_w,
        rows.data,
    )
    cycles = latency_s * effective_hz
    pipe = kernels.flop / (np.asarray(kernels.pipe_per_cycle) * sms * cycles)
    l2 = (kernels.work.l2_byte + kernels.work.between_byte) / (reference.l2_byte_per_cycle * cycles)
    moved = kernels.work.dram_read_byte + kernels.work.dram_write_byte + kernels.work.between_dram_byte
    dram = moved / (float(np.mean(gpu.memory.byte_per_s)) * latency_s)
    return priced, np.column_stack([np.clip(np.maximum(pipe, l2), 0.0, 1.0), np.clip(dram, 0.0, 1.0)])


def _module(model: ModulePower, rows: PowerRows) -> Array:
    from wattcast.power.module import OWN_RAIL

    own = np.array([module in OWN_RAIL for module in rows.modules])
    squared = model.voltage.at(rows.clock_hz)[:, None] ** 2
    energy = np.array([model.energy_j[name] for name in rows.events])
    dynamic = (rows.rate * energy * np.where(own, 1.0, squared)).sum(axis=1)
    return np.asarray(model.idle.at(rows.clock_hz, DEFAULT_TEMPERATURE_C) + dynamic)


def _rate_terms(rows: PowerRows) -> Array:
    return np.column_stack([np.ones(len(rows.power_w)), rows.rate])


def _alpha_terms(alpha: Array, clock_hz: Array, voltage: VoltageCurve) -> Array:
    switched = voltage.at(clock_hz) ** 2 * clock_hz
    return np.column_stack(
        [np.ones(len(clock_hz)), voltage.at(clock_hz), switched, alpha[:, 0] * switched, alpha[:, 1]]
    )


def _linear(terms: Array, power_w: Array, train: npt.NDArray[np.bool_], test: npt.NDArray[np.bool_]) -> Array:
    """Non-negative least squares on relative error."""
    from scipy.optimize import nnls

    size = np.maximum(np.abs(terms[train]).max(axis=0), 1e-300)
    found, _ = nnls(terms[train] / size / power_w[train, None], np.ones(int(train.sum())))
    return np.asarray(terms[test] / size @ found)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
