"""``wattcast fit kernels``: the kernel database -> a bundle.

Stages, each on the rows given and nothing else: the effective-clock law, corrections and learned
residual of latency (burst rows), energies with relative V(f) and toggling (sustained and duty rows, at
measured latency and clock), learned residual of energy. Residual quantiles come from rows held out
(:mod:`wattcast.fit.kernels_split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.activity import events as known_events
from wattcast.activity.predicted import BUSY
from wattcast.arrays import Array
from wattcast.fit.clock import fit_clock_law
from wattcast.fit.energies import PowerRows, fit_power
from wattcast.fit.kernels_choice import fit_choice, parts_of
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_folds import folds_of
from wattcast.fit.kernels_latency import Sample, fit_corrections, fit_residuals
from wattcast.fitted.bundle import FAMILIES, Bundle, Residual, Seen
from wattcast.fitted.forms import form_of
from wattcast.fitted.provisional import provisional
from wattcast.hardware import Gpu
from wattcast.hardware.operating_point import DEFAULT_TEMPERATURE_C
from wattcast.kernels import Condition, Kernels, Reference, kernels_of, reference_of
from wattcast.power.module import OWN_RAIL, STEADY, ModulePower
from wattcast.power.static import IdlePower
from wattcast.provenance import Provenance, Status
from wattcast.timeline.clock import ClockLaw
from wattcast.timeline.ideal import RATES, ideal, rates
from wattcast.timeline.phases import Correction, blended_corrections, counts
from wattcast.timeline.residual import Learned, Residuals
from wattcast.timeline.waves import active_share

# A card at rest draws this share of what it draws at the top clock: 83 W at 345 MHz against 130 W at 1980 MHz on an
# H200 (driver 580). The campaign's own idle rows are all at the top clock.
_REST_SHARE, _REST_HZ = 83.0 / 130.0, 345e6
# Families with some forty sustained rows learn from one another's; passes over data learn from those over rows as
# well, which do better among themselves.
_ROWS, _CONVOLUTIONS = ("softmax", "layernorm", "rmsnorm"), ("conv2d", "depthwise")
_POOLS = {
    **dict.fromkeys(_ROWS, _ROWS),
    **dict.fromkeys(_CONVOLUTIONS, _CONVOLUTIONS),
    "elementwise": (*_ROWS, "elementwise"),
}
_LEAST_SURE = 0.05  # of a kernel that draws little more than the card at rest
_LOW_POWER = 0.92  # a lowered clock at less than this share of the limit is a clock still climbing back, not a cap


@dataclass(frozen=True)
class Fitted:
    """Everything one set of rows gives."""

    corrections: dict[str, Correction]
    law: ClockLaw
    power: ModulePower
    toggling: dict[str, float]
    learned: Residuals


def fit_rows(rows: Rows, gpu: Gpu, idle: IdlePower) -> Fitted:
    """All stages on ``rows``."""
    plain = reference_of(gpu)
    reference = replace(plain, choice=fit_choice(rows, plain))
    kernels = kernels_of(rows.ops, rows.conditions, gpu, reference, ())
    law = _law(rows, kernels, gpu)
    at = rows.is_kind("burst") & random(rows) & rows.fit
    burst, some = rows.where(at), take(kernels, at)
    latency_s = burst.of("latency_s")
    effective_hz = law_hz(law, some, latency_s, reference.top_hz, reference.sm_count)
    ran = kernels_of(burst.ops, as_ran(burst), gpu, reference, ())
    corrections = fit_corrections(ideal(ran, reference), ran.work.group, latency_s, effective_hz)
    known = {**provisional(gpu).corrections, **corrections}  # a family without bursts may have sustained rows
    time = fit_residuals(_samples(burst, ran, rows, gpu, plain, known, effective_hz))
    power, toggling, energy = _power(rows, kernels, gpu, idle, known, reference)
    return Fitted(corrections, law, power, toggling, Residuals(reference, time, energy))


def _samples(
    burst: Rows,
    ran: Kernels,
    rows: Rows,
    gpu: Gpu,
    plain: Reference,
    corrections: dict[str, Correction],
    clock_hz: Array,
) -> list[Sample]:
    """What the learned factor of time is fitted on.

    Every row as the choice would have it that never saw its shape, since that is what a prediction gets: choices are
    fitted without each of a few inner folds in turn. And every product that has a name once more, as it ran.
    """
    latency_s = burst.of("latency_s")

    def sample(kernels: Kernels, at: Mask, again: bool = False) -> Sample:
        logs = np.log(blended_corrections(kernels.work, corrections))
        return Sample(kernels, latency_s[at] / ideal(kernels, plain).seconds(logs, clock_hz[at]), again=again)

    inner = dict(zip(rows.ops, folds_of(rows, _INNER, seed=1), strict=True))
    fold_of = np.array([inner[op] for op in burst.ops])
    all_folds = np.array([inner[op] for op in rows.ops])
    found = []
    for k in range(_INNER):
        at = fold_of == k
        if at.any():
            some = burst.where(at)
            unseen = replace(plain, choice=fit_choice(rows.where(all_folds != k), plain))
            found.append(sample(kernels_of(some.ops, some.conditions, gpu, unseen, ()), at))
    named = np.isin(ran.work.learner, ("gemm", "conv2d")) & np.array([bool(names) for names in burst.names])
    return [*found, sample(take(ran, named), named, again=True)] if named.any() else found


_INNER = 4


def bundle_of(found: Fitted, rows: Rows, gpu: Gpu, residuals: Mapping[str, Residual], note: str) -> Bundle:
    """A bundle from what was fitted; what the rows cannot say is taken from the provisional rule, and says so."""
    rule = provisional(gpu)
    missing = [family for family in FAMILIES if family not in residuals]
    unmeasured = {name: rule.corrections[name] for name in FAMILIES if name not in found.corrections}
    return Bundle(
        gpu=gpu.name,
        status=Status.FITTED,
        provenance=Provenance(f"wattcast fit kernels {rows.source}", device=rows.card, note=note),
        corrections={**found.corrections, **unmeasured},
        launch=rule.launch,
        power=found.power,
        clock_law=found.law,
        residuals={**{f: rule.residuals[f] for f in missing}, **residuals},
        toggling=found.toggling,
        reference=found.learned.reference,
        learned=found.learned,
        seen=seen(rows, kernels_of(rows.ops, rows.conditions, gpu, found.learned.reference, ())),
        settles=settles(rows, gpu),
        assumptions=tuple(f"no {family} was measured: provisional corrections" for family in unmeasured),
    )


def settles(rows: Rows, gpu: Gpu) -> float:
    """Share of its limit at which the governor holds the board, from capped rows that were measured settled."""
    capped = np.isfinite(rows.of("settled_power_w")) & (
        rows.of("settled_clock_hz") < 0.995 * float(np.mean(gpu.clocks.max_hz))
    )
    share = rows.of("settled_power_w")[capped & random(rows) & rows.fit] / float(np.mean(gpu.power.limit_w))
    share = share[share > _LOW_POWER]
    return float(np.clip(np.median(share), _LOW_POWER, 1.0)) if share.size else 1.0


def as_ran(rows: Rows) -> tuple[Condition, ...]:
    """Conditions with the names of the kernels that ran, where they are known: the tile oracle."""
    ran = zip(rows.conditions, rows.names, parts_of(rows), strict=True)
    return tuple(replace(c, kernels=names, parts=parts) for c, names, parts in ran)


def idle_curve(rows: list[tuple[float, float, float]], gpu: Gpu) -> IdlePower:
    """Idle power by clock from idle rows at the top clock; grows with temperature as those rows do."""
    top = float(np.mean(gpu.clocks.max_hz))
    power, degrees = np.array([p for _, p, _ in rows]), np.array([t for _, _, t in rows])
    slope, at_zero = np.polyfit(degrees, power, 1) if np.ptp(degrees) > 3.0 else (0.0, float(power.mean()))
    at_reference = max(float(at_zero + slope * DEFAULT_TEMPERATURE_C), 1.0)
    return IdlePower(
        np.array([_REST_HZ, top]),
        np.array([_REST_SHARE * at_reference, at_reference]),
        reference_c=DEFAULT_TEMPERATURE_C,
        per_c=max(float(slope) / at_reference, 0.0),
    )


def random(rows: Rows) -> Mask:
    """Rows on random data."""
    return np.array([d == "random" for d in rows.data], dtype=bool)


def take(kernels: Kernels, mask: Mask) -> Kernels:
    """The kernels of a mask, without any issue order."""
    at = np.flatnonzero(mask)
    work = kernels.work
    columns = {k: v[at] for k, v in vars(work).items() if isinstance(v, np.ndarray)}
    features = {name: values[at] for name, values in work.features.items()}
    return replace(
        kernels,
        ops=tuple(kernels.ops[i] for i in at),
        family=tuple(kernels.family[i] for i in at),
        conditions=tuple(kernels.conditions[i] for i in at),
        pipe_event=tuple(kernels.pipe_event[i] for i in at),
        pipe_per_cycle=np.asarray(kernels.pipe_per_cycle)[..., at],
        flop=kernels.flop[at],
        sfu_op=kernels.sfu_op[at],
        link_byte=kernels.link_byte[at],
        link_hops=kernels.link_hops[at],
        work=replace(work, group=tuple(work.group[i] for i in at), features=features, **columns),
    )


def tensor(kernels: Kernels) -> npt.NDArray[np.bool_]:
    """Kernels that issue tensor instructions."""
    return np.array([event.startswith("tensor") for event in kernels.pipe_event])


def law_hz(law: ClockLaw, kernels: Kernels, latency_s: Array, set_hz: float, sm_count: float) -> Array:
    """Effective clock of kernels whose latency is known, at one set clock."""
    busy_s = kernels.flop / (np.asarray(kernels.pipe_per_cycle) * sm_count)
    # activity in cycles of the effective clock; one step from the ratio without load: further ones run away from
    # what spin kernels see under the densest products
    activity = np.clip(busy_s / (latency_s * set_hz * law.ratio[0]), 0.0, 1.0)
    loaded = np.interp(activity * law.load(np.asarray(set_hz)), law.activity, law.ratio)
    return np.asarray(set_hz * np.where(tensor(kernels), loaded, law.without))


def _law(rows: Rows, kernels: Kernels, gpu: Gpu) -> ClockLaw:
    clock, effective, latency_s = (rows.of(name) for name in ("sm_clock_hz", "effective_clock_hz", "latency_s"))
    top_hz = float(np.mean(gpu.clocks.max_hz))
    known = np.isfinite(clock) & np.isfinite(effective) & np.isfinite(latency_s) & rows.fit & random(rows)
    known &= effective < 1.02 * clock  # beyond: the clock moved between the two readings
    busy = kernels.flop / (np.asarray(kernels.pipe_per_cycle) * float(np.mean(gpu.sm_count)))
    activity = np.clip(busy[known] / (latency_s * effective)[known], 0.0, 1.0)
    return fit_clock_law(activity, clock[known], effective[known], tensor(kernels)[known], top_hz)


def _power(
    rows: Rows,
    kernels: Kernels,
    gpu: Gpu,
    idle: IdlePower,
    corrections: Mapping[str, Correction],
    reference: Reference,
) -> tuple[ModulePower, dict[str, float], dict[str, Learned]]:
    """Energies, toggling and the learned energy factor of each family."""
    power_w, clock_hz, latency_s = settled(rows)
    limit_w = float(np.mean(gpu.power.limit_w))
    known = rows.is_kind("sustained", "duty") & rows.fit & np.isfinite(power_w) & np.isfinite(clock_hz)
    climbing = (clock_hz < 0.995 * float(np.mean(gpu.clocks.max_hz))) & (power_w < _LOW_POWER * limit_w)
    known &= ~climbing
    at, some = rows.where(known), take(kernels, known)
    power_w, clock_hz, latency_s = power_w[known], clock_hz[known], latency_s[known]
    effective = at.of("effective_clock_hz")
    effective_hz = np.where(np.isfinite(effective), effective, 0.92 * clock_hz)
    names, counted = counts(some)
    fixed_s = blended_corrections(some.work, corrections)[:, 2] * some.work.launches
    active = active_share(some, float(np.mean(gpu.sm_count))) * float(np.mean(gpu.sm_count))
    busy = active * np.maximum(latency_s - fixed_s, 0.0) * effective_hz
    value = np.column_stack([counted, busy])
    events = (*names, BUSY)
    used = [i for i, name in enumerate(events) if value[:, i].any() and name != "link_byte"]
    priced = PowerRows(
        value[:, used] / latency_s[:, None],
        tuple(events[i] for i in used),
        tuple(known_events()[events[i]].module for i in used),
        clock_hz,
        power_w,
        at.data,
    )
    top_hz = float(np.mean(gpu.clocks.max_hz))
    # an error in the energy of a capped row becomes an error of its clock: they count half as much again
    weight = np.where(clock_hz < 0.995 * top_hz, 1.5, 1.0)
    power, toggling = fit_power(priced, idle, DEFAULT_TEMPERATURE_C, weight)
    ratio = _energy_ratio(priced, power, toggling)
    at_top_s = latency_s * clock_hz / reference.top_hz
    more = dict(zip(RATES, rates(some, reference, at_top_s, fixed_s), strict=True))
    # a percent of power is the more percent of dynamic power, the smaller that is
    sure = np.clip(1.0 - idle.at(clock_hz, DEFAULT_TEMPERATURE_C) / power_w, _LEAST_SURE, 1.0)
    sample = Sample(some, ratio, more, sure=sure)
    return power, toggling, fit_residuals([sample], pools=_POOLS, leaves=8, hold_in=False)


def _energy_ratio(rows: PowerRows, power: ModulePower, toggling: Mapping[str, float]) -> Array:
    """Measured over modelled dynamic power."""
    own, steady = (np.array([m in group for m in rows.modules]) for group in (OWN_RAIL, STEADY))
    energy = np.array([power.energy_j[name] for name in rows.events])
    squared = power.voltage.at(rows.clock_hz)[:, None] ** 2
    factor = np.array([toggling[d] for d in rows.data])[:, None]
    parts = rows.rate * energy * np.where(own, 1.0, squared) * np.where(steady, 1.0, factor)
    idle_w = power.idle.at(rows.clock_hz, DEFAULT_TEMPERATURE_C)
    return np.asarray(np.clip((rows.power_w - idle_w) / np.maximum(parts.sum(axis=1), 1.0), 0.25, 4.0))


def settled(rows: Rows) -> tuple[Array, Array, Array]:
    """Power, reported clock and latency of each row: settled figures where a capped row has them.

    A capped row's first second runs above the limit; its latency is carried to the settled clock by
    the ratio of the clocks, as for a kernel bound on chip.
    """
    duty = rows.is_kind("duty")
    has = np.isfinite(rows.of("settled_power_w")) & np.isfinite(rows.of("settled_clock_hz")) & ~duty
    power_w = np.where(duty, rows.of("on_power_w"), np.where(has, rows.of("settled_power_w"), rows.of("power_w")))
    clock_hz = np.where(has, rows.of("settled_clock_hz"), rows.of("sm_clock_hz"))
    latency_s = rows.of("latency_s") * np.where(has, rows.of("sm_clock_hz") / clock_hz, 1.0)
    return power_w, clock_hz, latency_s


def seen(rows: Rows, kernels: Kernels) -> dict[str, Seen]:
    """Formats, kinds of kernels, sizes and forms that were measured, by what learns from one another."""
    found = {}
    forms: dict[str, dict[str, set[str]]] = {}
    for op, learner, group in zip(rows.ops, kernels.work.learner, kernels.work.group, strict=True):
        forms.setdefault(learner, {}).setdefault(group, set()).add(form_of(op))
    learners = np.array(kernels.work.learner)
    for family in dict.fromkeys(kernels.work.learner):
        at = np.flatnonzero(learners == family)
        sizes = [n for n in kernels.work.features if n.startswith("log_") and kernels.work.features[n][at].any()]
        found[family] = Seen(
            dtypes=tuple(sorted({str(rows.ops[i].dtype) for i in at})),
            groups=tuple(
                sorted(
                    {
                        n.removeprefix("is ")
                        for n in kernels.work.features
                        if n[:3] == "is " and kernels.work.features[n][at].any()
                    }
                )
            ),
            sizes={
                n: (
                    round(float(kernels.work.features[n][at].min()), 4),
                    round(float(kernels.work.features[n][at].max()), 4),
                )
                for n in sizes
            },
            forms={group: tuple(sorted(names)) for group, names in sorted(forms[family].items())},
        )
    return found
