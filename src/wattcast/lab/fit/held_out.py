"""Predict held-out rows and derive prediction intervals from their errors.

**Folds.** Every stage of the fit runs inside the training folds. All rows of a shape (burst,
sustained, duty, clock, pattern, every format of it) share a fold.

**Interval ends** by split conformal prediction [Lei2018]: order statistics of measured over
predicted. Families of few rows are taken together after each log-ratio was divided by the spread of
its own family (the same paper, section 5.2, with one spread per family); the spread of a family is
drawn to that of all of them by as many rows as ``PRIOR_ROWS``. Log-ratios are divided by the scale
of their distance from other rows: ends are those of a row at a typical distance.

**Nearness.** The nearness of a held-out row is exp(-r) of the nearest row in the coordinates of the
learned factor of time, or of energy (``predictor.learned_factors``). The 90th percentile of
|log(measured / predicted)|, over the median of its family, is taken as t·(1 + c·(1 - near)) by
quantile regression [Koenker1978]: the c of the least pinball loss, each with its best t. Then a +
b·(1 - near) with b/a = c is scaled so that the middle held-out row has 1. The nearest twentieth of
the held-out rows count as equally near: nothing closer to a measured row was held out, so nothing
narrower was seen to hold.

**Things never measured** need wider intervals. Functions, kinds of kernels, formats and sizes are
left out of fits in turn: each round leaves some of them out, a few of every family, fits the rest
and predicts what was left out. The code that judges predictions (``find_unmeasured``) gives the
reason why a row is outside, so a half-width is learned for the sentence it goes with: for each row,
how far the ends of its family at its distance would have to move out, in quadrature, to hold it;
for all rows of a reason, the 90th percentile. Each thing left out counts alike, since the next
thing not measured is another thing and not another row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.calibrate.kernel_rows import (
    FOLDS,
    KernelRows,
    assign_folds,
    on_random_data,
    run_each,
    settled_figures,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_prediction import (
    INTERVAL_LEVEL,
    analyse_rows,
    conformal_ends,
    predict_bursts_s,
    predict_with_bundle,
    row_nearness,
)
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu
from wattcast.kernels import (
    Kernels,
    build_kernels,
    reference_chip,
)
from wattcast.lab.fit.choice_fit import choose_labels, find_labels_run
from wattcast.lab.fit.kernel_fit import (
    build_bundle,
    conditions_as_ran,
    fit_kernel_rows,
)
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle import support_widening
from wattcast.predictor.bundle.bundle_file import ResidualEnds
from wattcast.predictor.bundle.support_widening import (
    UNSCALED,
    NearnessLine,
    OutsideReason,
    Widening,
)
from wattcast.predictor.prediction_interval import kernel_log_ends
from wattcast.predictor.unmeasured_kernels import find_unmeasured


@dataclass(frozen=True)
class HeldOutRows:
    """Measured and predicted figures, one entry per held-out row; NaN where a row has no such
    figure.
    """

    kind: tuple[str, ...]
    family: tuple[str, ...]
    group: tuple[str, ...]
    work: tuple[str, ...]  # the operator in words
    data: tuple[str, ...]
    fold: npt.NDArray[np.int64]
    latency_s: Array
    power_w: Array
    clock_hz: Array
    predicted_latency_s: Array
    predicted_power_w: Array
    predicted_clock_hz: Array
    roofline_s: Array
    ran: tuple[str, ...]  # kernel of a product, from the names; empty: none known
    chosen: tuple[str, ...]  # kernel the choice took without having seen the shape
    oracle_latency_s: Array  # predicted with the kernel that ran; bursts of products alone
    near: (
        Array  # nearness, 1 to 0, to the rows that were not held out, by the learned factor of time
    )
    near_power: Array  # nearness by the learned factor of energy

    def is_random(self, kind: str) -> Mask:
        """Return which rows are of a kind, burst or sustained, and ran on random data."""
        return np.asarray((np.array(self.kind) == kind) & (np.array(self.data) == "random"))

    def ratio(self, quantity: str) -> tuple[Array, Mask]:
        """Return measured over predicted latency or power, and its rows: bursts or sustained ones,
        on random data.
        """
        if quantity == "latency":
            kind = "burst"
            ratio = self.latency_s / self.predicted_latency_s
        else:
            kind = "sustained"
            ratio = self.power_w / self.predicted_power_w
        return ratio, self.is_random(kind) & np.isfinite(ratio)


def compare_asked_power(
    power_w: Array,
    clock_hz: Array,
    predicted: Array,
) -> Array:
    """Return measured power over that predicted at the top clock; NaN where the limit held both,
    which says nothing.

    ``predicted`` ends in the columns power, clock and power at the top clock.
    """
    held_w, held_hz, asked_w = predicted.T[-3:]
    capped = (clock_hz < TOP_CLOCK_SHARE * np.nanmax(held_hz)) & (held_w < asked_w)
    return np.where(capped, np.nan, power_w / asked_w)


def predict_held_out(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
    folds: int = FOLDS,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> HeldOutRows:
    """Predict every burst and sustained row from a fit that never saw its shape."""
    fold = assign_folds(rows, folds, seed)
    judged = rows.to_judge()
    figures = np.full((len(rows), 7), np.nan)
    chosen = np.full(len(rows), "", dtype=object)
    tests = [judged & (fold == k) for k in range(folds)]
    work = (
        (rows.select_rows(fold != k), rows.select_rows(test), gpu, idle)
        for k, test in enumerate(tests)
    )
    for k, (test, prediction) in enumerate(
        zip(tests, run_each(_predict_fold, work, len(rows)), strict=True)
    ):
        figures[test], chosen[test] = prediction
        tell(f"fold {k + 1} of {folds}")
    return collect_held_out(
        rows,
        judged,
        fold,
        figures,
        chosen,
        gpu,
    )


def _predict_fold(
    training: KernelRows,
    test: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
) -> tuple[Array, list[str]]:
    """Return the figures that ``collect_held_out`` takes, and chosen kernels, of rows that a fit
    never saw.
    """
    fit = fit_kernel_rows(training, gpu, idle)
    bundle = build_bundle(
        fit,
        test,
        gpu,
        {},
        "",
    )
    labels = [str(label or "") for label in choose_labels(test, fit.learned.reference)]
    named = np.array([bool(names) for names in test.names]) & np.isin(
        test.family, ("gemm", "conv2d")
    )
    products = named & test.is_kind("burst") & on_random_data(test)
    as_ran_s = np.full(len(test), np.nan)
    if products.any():
        some = test.select_rows(products)
        kernels = build_kernels(
            some.ops,
            conditions_as_ran(some),
            gpu,
            bundle.reference,
            (),
        )
        as_ran_s[products] = predict_bursts_s(kernels, gpu, bundle)
    near = row_nearness(bundle, test, gpu).T
    return np.column_stack([predict_with_bundle(bundle, test, gpu), near, as_ran_s]), labels


def collect_held_out(
    rows: KernelRows,
    judged: Mask,
    fold: npt.NDArray[np.int64],
    figures: Array,
    chosen: npt.NDArray[np.object_],
    gpu: Gpu,
) -> HeldOutRows:
    """Collect measured and predicted figures of the wanted rows.

    Columns of ``figures`` are those of ``predict_with_bundle``, nearness by time and by energy, and
    latency with the kernel that ran."""
    predicted_s, predicted_w, predicted_hz, _, near, near_power, as_ran_s = figures[judged].T
    some = rows.select_rows(judged)
    power_w, clock_hz, latency_s = settled_figures(some)
    reference = reference_chip(gpu)
    kernels = build_kernels(
        some.ops,
        some.conditions,
        gpu,
        reference,
        (),
    )
    rate = np.asarray(kernels.pipe_per_cycle) * reference.sm_count * reference.top_hz
    byte = np.array([op.read_byte + op.write_byte for op in some.ops])
    burst = some.is_kind("burst")
    return HeldOutRows(
        kind=some.kind,
        family=some.family,
        group=tuple(kernels.work.kernel_family),
        work=tuple(str(op) for op in some.ops),
        data=some.data,
        fold=fold[judged],
        latency_s=latency_s,
        power_w=np.where(burst, np.nan, power_w),
        clock_hz=np.where(burst, np.nan, clock_hz),
        predicted_latency_s=predicted_s,
        predicted_power_w=predicted_w,
        predicted_clock_hz=predicted_hz,
        roofline_s=np.maximum(kernels.flop / rate, byte / float(np.mean(gpu.memory.byte_per_s))),
        ran=tuple(str(label or "") for label in find_labels_run(some)),
        chosen=tuple(chosen[judged]),
        oracle_latency_s=as_ran_s,
        near=near,
        near_power=near_power,
    )


POOLED_FAMILIES = (
    "softmax",
    "layernorm",
    "rmsnorm",
)  # whose kernels are alike: power is pooled where rows are few
FEW_ROWS = 40  # twice those below which no row lies in a tail of 5 %
PRIOR_ROWS = 4.0


def fit_interval_ends(
    held_rows: HeldOutRows, near: tuple[NearnessLine, NearnessLine] = (UNSCALED, UNSCALED)
) -> dict[str, ResidualEnds]:
    """Fit the interval ends of each family: latency to its bursts, power to sustained rows of its
    pool.

    ``near`` is the result of ``fit_nearness`` on the same rows.
    """
    families = np.array(held_rows.family)
    (latency, timed), (power, powered) = held_rows.ratio("latency"), held_rows.ratio("power")
    latency = scale_ratios(latency, held_rows.near, near[0])
    power = scale_ratios(power, held_rows.near_power, near[1])
    ends_of_family = {}
    for family in dict.fromkeys(held_rows.family):
        time = latency[(families == family) & timed]
        ends = power_ends(power[powered], families[powered], family)
        ends_of_family[family] = ResidualEnds(conformal_ends(time), ends, len(time))
    return ends_of_family


def scale_ratios(
    ratio: Array,
    near: Array,
    line: NearnessLine,
) -> Array:
    """Scale ratios to those of a row at a typical distance: divide logarithms by the scale of the
    distance.
    """
    return np.asarray(ratio ** (1.0 / support_widening.nearness_scale(near, line)))


def power_ends(
    ratio: Array,
    family: npt.NDArray[np.str_],
    name: str,
) -> tuple[float, float]:
    """Return the ends of one family's measured over predicted power."""
    if name not in POOLED_FAMILIES or (family == name).sum() >= FEW_ROWS:
        return conformal_ends(ratio[family == name])
    inside = np.isin(family, POOLED_FAMILIES)
    logs = np.log(ratio[inside])
    of = family[inside]
    if logs.size == 0:
        return conformal_ends(ratio[inside])
    # mean size of a family's residuals, drawn to that of all
    size = np.abs(logs)
    spread = {}
    for pooled in POOLED_FAMILIES:
        mean = (size[of == pooled].sum() + PRIOR_ROWS * size.mean()) / (
            (of == pooled).sum() + PRIOR_ROWS
        )
        spread[pooled] = float(max(mean, 1e-6))
    low, high = conformal_ends(np.exp(logs / np.array([spread[str(pooled)] for pooled in of])))
    return float(low ** spread[name]), float(high ** spread[name])


LEAST_NEARNESS_ROWS = 300  # with a nearness, to learn from
NEAREST_SHARE = (
    0.95  # of the held-out rows are not nearer than what counts as beside a measured one
)
_SLOPES = np.concatenate([[0.0], np.geomspace(0.25, 40.0, 45)])

Names = npt.NDArray[np.str_]


def fit_nearness_line(
    log_ratio: Array,
    family: Names,
    near: Array,
) -> NearnessLine:
    """Fit a, b and c of ``nearness_scale``; too few rows give ``UNSCALED``."""
    usable = np.isfinite(near) & np.isfinite(log_ratio)
    if usable.sum() < LEAST_NEARNESS_ROWS:
        return UNSCALED
    nearest = float(np.quantile(near[usable], NEAREST_SHARE))
    size = np.abs(log_ratio[usable])
    away = 1.0 - np.minimum(near[usable], nearest)
    of = family[usable]
    for name in np.unique(of):
        size[of == name] /= max(float(np.median(size[of == name])), 1e-6)

    def pinball_loss(slope: float) -> float:
        spread = 1.0 + slope * away
        over = size - spread * weighted_quantile(
            size / spread, spread, INTERVAL_LEVEL
        )  # the best t
        return float(np.mean(np.maximum(INTERVAL_LEVEL * over, (INTERVAL_LEVEL - 1.0) * over)))

    slope = min(_SLOPES, key=pinball_loss)
    middle = float(np.median(1.0 + slope * away))
    return round(1.0 / middle, 6), round(float(slope) / middle, 6), round(nearest, 6)


def weighted_quantile(
    values: Array,
    weight: Array,
    level: float,
) -> float:
    """Return the least value that a share ``level`` of the weight does not exceed.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), 0.75)
    2.0
    """
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    at = int(np.searchsorted(below, level * below[-1] * (1.0 - 1e-12)))
    return float(values[order][min(at, values.size - 1)])


def fit_nearness(held_rows: HeldOutRows) -> tuple[NearnessLine, NearnessLine]:
    """Fit the nearness lines of latency to held-out bursts and of power to sustained ones, on
    random data.
    """
    family, (latency, timed), (power, powered) = (
        np.array(held_rows.family),
        held_rows.ratio("latency"),
        held_rows.ratio("power"),
    )
    return (
        fit_nearness_line(np.log(latency[timed]), family[timed], held_rows.near[timed]),
        fit_nearness_line(np.log(power[powered]), family[powered], held_rows.near_power[powered]),
    )


ROUNDS = {
    "form": 4,
    "kind": 4,
    "dtype": 3,
    "size": 4,
}  # fits of what is left, by what is left out
LEAST_THING_ROWS = 3  # bursts of a thing, to be left out
MOST = 1 / 3  # of its family's bursts: without more than that there is little left of a family
CUT = 0.08  # of a family's rows beyond a size left out
LEAST_KINDS = 3  # of a reason, to learn from; fewer: the usual half-width


@dataclass(frozen=True)
class LeftOutRows:
    """Rows predicted by a fit that left out something of theirs; each ``(row,)``."""

    row: npt.NDArray[np.int64]  # place in the database
    thing: tuple[str, ...]  # what was left out
    why: tuple[str, ...]  # as a prediction would say; empty: it would not
    latency: Array  # log of measured over predicted of a burst; NaN of others
    power: Array  # the same of a sustained row
    ends: Array  # (row, 4) logs of the ends as of rows inside

    def needed(self, quantity: str) -> Array:
        """Return how far the ends must move out to hold each row; NaN where it has no such
        figure.
        """
        log_ratio = getattr(self, quantity)
        low, high = self.ends[:, :2].T if quantity == "latency" else self.ends[:, 2:].T
        middle = np.clip(0.0, low, high)
        inner = np.where(log_ratio > middle, high, low) - middle
        return np.asarray(np.sqrt(np.maximum((log_ratio - middle) ** 2 - inner**2, 0.0)))


def fit_widening(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
    tell: Callable[[str], None] = lambda _: None,
) -> Widening:
    """Fit what distance and unmeasured things add to the intervals of a fit on ``rows``."""
    left_out = predict_left_out(
        rows,
        gpu,
        idle,
        residuals,
        near,
        tell,
    )
    apart = fit_reason_widening(left_out)
    source = (
        f"{rows.source}: {len(set(left_out.thing))} functions, kinds, formats and "
        "sizes left out of fits in turn"
    )
    every = {
        why: apart.get(why, support_widening.default_widening().apart[why]) for why in OutsideReason
    }
    return Widening(near[0], every, source, near[1])


def fit_reason_widening(
    left_out: LeftOutRows, without: str = ""
) -> dict[OutsideReason, support_widening.ReasonWidening]:
    """Fit the half-width of each reason with enough things left out, ``without`` one of them."""
    widening = {}
    things = np.array(left_out.thing)
    whys = np.array(left_out.why)
    for why in OutsideReason:
        at = (whys == str(why)) & (things != without)
        kinds = len(set(things[at].tolist()))
        if kinds >= LEAST_KINDS:
            default = support_widening.default_widening().apart[why]
            time = _half_width(left_out.needed("latency")[at], things[at], default.latency)
            power = _half_width(left_out.needed("power")[at], things[at], default.power)
            widening[why] = support_widening.ReasonWidening(time, power, int(at.sum()), kinds)
    return widening


def _half_width(
    needed: Array,
    things: Names,
    usual: float,
) -> float:
    usable = np.isfinite(needed)
    names = things[usable].tolist()
    if len(count := Counter(names)) < LEAST_KINDS:
        return usual
    weight = np.array([1.0 / count[name] for name in names])
    return round(weighted_quantile(needed[usable], weight, INTERVAL_LEVEL), 4)


def predict_left_out(
    rows: KernelRows,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
    tell: Callable[[str], None] = lambda _: None,
) -> LeftOutRows:
    """Predict every row that some round left out from the fit of that round."""
    plan = plan_rounds(rows, gpu)
    work = ((rows, thing, gpu, idle, residuals, near) for thing in plan)
    rounds = []
    for i, one in enumerate(run_each(_predict_round, work, len(rows))):
        rounds.append(one)
        tell(f"left out {i + 1} of {len(plan)}")
    return LeftOutRows(
        np.concatenate([one.row for one in rounds]),
        tuple(name for one in rounds for name in one.thing),
        tuple(why for one in rounds for why in one.why),
        *(
            np.concatenate([getattr(one, name) for one in rounds])
            for name in ("latency", "power", "ends")
        ),
    )


def _predict_round(
    rows: KernelRows,
    thing: Names,
    gpu: Gpu,
    idle: IdlePower,
    residuals: Mapping[str, ResidualEnds],
    near: tuple[NearnessLine, NearnessLine],
) -> LeftOutRows:
    """Fit without the rows that have a thing's name, and predict those rows."""
    gone = thing != ""
    training = rows.select_rows(~gone)
    bundle = build_bundle(
        fit_kernel_rows(training, gpu, idle),
        training,
        gpu,
        residuals,
        "",
    )
    bundle = replace(bundle, widening=support_widening.default_widening().with_nearness(near))
    at = np.flatnonzero(gone & rows.is_kind("burst", "sustained") & rows.fit & on_random_data(rows))
    test = rows.select_rows(np.isin(np.arange(len(rows)), at))
    predicted = predict_with_bundle(bundle, test, gpu)
    timeline = analyse_rows(bundle, test, gpu)
    outside = find_unmeasured(timeline, bundle)
    burst = test.is_kind("burst")
    power_w, clock_hz, latency_s = settled_figures(test)
    return LeftOutRows(
        at,
        tuple(thing[at].tolist()),
        tuple(str(outside[i].reason) if i in outside else "" for i in range(len(test))),
        np.where(burst, np.log(latency_s / predicted[:, 0]), np.nan),
        np.where(burst, np.nan, np.log(compare_asked_power(power_w, clock_hz, predicted))),
        kernel_log_ends(timeline, bundle, {}),
    )


def plan_rounds(rows: KernelRows, gpu: Gpu) -> list[Names]:
    """Plan the rounds: for each, the thing of every row that is left out; empty where a row
    stays.
    """
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        reference_chip(gpu),
        (),
    )
    learner = kernels.work.root_family
    counted = rows.is_kind("burst") & rows.fit & on_random_data(rows)
    named = {
        "form": [op.form for op in rows.ops],
        "kind": list(kernels.work.kernel_family),
        "dtype": [str(op.dtype) for op in rows.ops],
    }
    rounds = []
    of_family = Counter(np.array(learner)[counted].tolist())
    for what, names in named.items():
        thing = np.array([f"{owner}: {name}" for owner, name in zip(learner, names, strict=True)])
        of_thing = Counter(thing[counted].tolist())
        usable = [
            t
            for t, n in of_thing.items()
            if LEAST_THING_ROWS <= n <= MOST * of_family[t.partition(":")[0]]
        ]
        order = sorted(usable, key=lambda t: (t.partition(":")[0], -of_thing[t], t))
        dealt = [
            order[k :: ROUNDS[what]] for k in range(ROUNDS[what])
        ]  # what a family has goes round
        rounds += [np.where(np.isin(thing, gone), thing, "") for gone in dealt if gone]
    return rounds + _size_rounds(kernels, counted)


def _size_rounds(kernels: Kernels, counted: Mask) -> list[Names]:
    """Plan rounds without the largest or the smallest of one size of every family."""
    learner = np.array(kernels.work.root_family)
    features = kernels.work.features
    rounds = [np.full(len(learner), "", dtype="<U64") for _ in range(ROUNDS["size"])]
    for family in dict.fromkeys(learner.tolist()):
        of_family = learner == family
        cuts = []
        for name, values in features.items():
            here = values[of_family & counted]
            if name.startswith("log_") and here.size and np.ptp(here) > 0.0:
                low, high = np.quantile(here, [CUT, 1.0 - CUT])
                cuts += [
                    (f"small {name}", of_family & (values < low)),
                    (f"large {name}", of_family & (values > high)),
                ]
        cuts = [(label, gone) for label, gone in cuts if (gone & counted).sum() >= LEAST_THING_ROWS]
        step = max(len(cuts) // len(rounds), 1)
        for k, names in enumerate(rounds):
            at = k * step + k % 2  # now at the small end, now at the large
            if at < len(cuts):
                label, gone = cuts[at]
                names[gone] = f"{family}: {label}"
    return [names for names in rounds if (names != "").any()]
