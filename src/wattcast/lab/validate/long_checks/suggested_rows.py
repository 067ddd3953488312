"""Judge ``lab kernels --suggest`` inside the database: rows added as it says against rows added at
random.

Run: ``python -m wattcast.lab.validate.long_checks.suggested_rows`` (minutes; ``wattcast lab
validate`` then lists the rows).

One fold is held out. From the bursts of the others a few are drawn as measured; then rows are added
in the order of each way of choosing, the whole latency model is fitted again, and held-out bursts
are scored twice: all alike, as rows of the plan, and by the share of time that operators of real
models like them take (each operator spreads its share over held-out rows of its group, by
exp(-d²/2) with d in doublings). Candidates know their share likewise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import (
    KernelRows,
    assign_folds,
    on_random_data,
    select_kernels,
)
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.row_suggestions import (
    SUGGESTIONS,
    Index,
    distances_to_known,
    interval_widths,
    list_model_operators,
    pick_candidates,
)
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_ledger_row,
)
from wattcast.core.arrays import Array, Mask
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.lab.fit.kernel_fit import fit_idle_curve, fit_kernel_rows
from wattcast.lab.validate.long_checks.ablations import predict_with_fit
from wattcast.power.power_model import IdlePower
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle

STARTS = (50, 200)  # bursts measured to begin with
GROWS = (4.0,)  # to so many times as many
HELD = (3, 4)  # folds held out; the way of suggesting was settled on the others
DRAWS = 2
WEIGHTS = ("as rows of the plan", "as operators of real models")


@dataclass(frozen=True)
class Pool:
    """Bursts that may be measured, those held out, and what both are worth to real models."""

    rows: KernelRows  # of all kinds; names of kernels only on bursts
    gpu: Gpu
    idle: IdlePower
    bundle: Bundle
    bursts: Index  # places in rows of candidates
    test: Index
    other_kinds: Mask  # rows of other kinds in the training folds
    kernels: Kernels  # of the candidates
    share: Array  # of candidates
    test_share: Array


Order = Callable[[Pool, Index, int, np.random.Generator], Index]


def at_random(
    pool: Pool,
    start: Index,
    count: int,
    rng: np.random.Generator,
) -> Index:
    """Candidates in any order."""
    candidates = np.setdiff1d(np.arange(len(pool.bursts)), start)
    return np.asarray(rng.permutation(candidates)[:count])


def by_distance(
    pool: Pool,
    start: Index,
    count: int,
    rng: np.random.Generator,
) -> Index:
    """The farthest from anything measured of its kind next: uncertainty alone."""
    places = np.column_stack(
        [v for n, v in sorted(pool.kernels.work.features.items()) if n.startswith("log_")]
    )
    groups = np.array(pool.kernels.work.kernel_family)
    width = interval_widths(pool.kernels, pool.bundle)
    measured = np.isin(np.arange(len(groups)), start)
    away = np.minimum(
        distances_to_known(pool.kernels, select_kernels(pool.kernels, measured)), 20.0
    )
    order = []
    for _ in range(count):
        best = int(np.argmax(np.where(measured, -1.0, width * away)))
        order.append(best)
        measured[best] = True
        alike = groups == groups[best]
        away[alike] = np.minimum(away[alike], np.linalg.norm(places[alike] - places[best], axis=1))
    return np.array(order)


def by_newness(
    pool: Pool,
    start: Index,
    count: int,
    rng: np.random.Generator,
) -> Index:
    """Width x newness x share, newness 0.15 + 0.85·(1 - exp(-d²/2)): what ``--suggest`` did at
    first.
    """
    places = np.column_stack(
        [v for n, v in sorted(pool.kernels.work.features.items()) if n.startswith("log_")]
    )
    groups = np.array(pool.kernels.work.kernel_family)
    width = interval_widths(pool.kernels, pool.bundle)
    measured = np.isin(np.arange(len(groups)), start)
    away = distances_to_known(pool.kernels, select_kernels(pool.kernels, measured))
    even = np.full(len(groups), 1.0 / len(groups))
    order = []
    for i in range(count):
        worth = width * (
            even if (i + 1) % 10 in (3, 6, 9) else pool.share
        )  # three in ten for the plan
        best = int(
            np.argmax(np.where(measured, -1.0, worth * (1.0 - 0.85 * np.exp(-0.5 * away**2))))
        )
        order.append(best)
        measured[best] = True
        alike = groups == groups[best]
        away[alike] = np.minimum(away[alike], np.linalg.norm(places[alike] - places[best], axis=1))
    return np.array(order)


def suggested(
    pool: Pool,
    start: Index,
    count: int,
    rng: np.random.Generator,
) -> Index:
    """As ``lab kernels --suggest`` orders them: a share for real models, the rest for the plan."""
    everything = np.arange(len(pool.bursts))
    measured = np.isin(everything, start)
    before = select_kernels(pool.kernels, measured)
    from_plan = round(SUGGESTIONS.plan_share * count)
    first = [
        i
        for i, _ in pick_candidates(
            pool.kernels,
            before,
            pool.share,
            ~measured,
            count - from_plan,
        )
    ]
    picked = np.isin(everything, first)
    even = np.ones(len(everything))
    plan_rows = [
        i
        for i, _ in pick_candidates(
            pool.kernels,
            before,
            even,
            ~measured & ~picked,
            from_plan,
            picked,
        )
    ]
    # both kinds in proportion, so that any beginning of the list has its share of each
    place = [
        *(np.arange(len(first)) / len(first)),
        *((np.arange(len(plan_rows)) + 0.5) / max(len(plan_rows), 1)),
    ]
    return np.array([*first, *plan_rows])[np.argsort(place, kind="stable")]


WAYS: dict[str, Order] = {
    "random": at_random,
    "farthest first": by_distance,
    "newness": by_newness,
    "suggested": suggested,
}


def suggest_rows(gpu: str, tell: Tell) -> list[LedgerRow]:
    """Errors by way of choosing and number of rows, mean over folds and draws; the floor is random
    choice.
    """
    errors: dict[tuple[int, int, str], list[Array]] = {}
    with one_thread():
        for fold in HELD:
            pool = pool_of(gpu, fold)
            for start in STARTS:
                for draw in range(DRAWS):
                    tell(
                        f"suggest: fold {fold + 1} held out, from {start} rows, draw "
                        f"{draw + 1} of {DRAWS}"
                    )
                    for (total, way), error in trial(pool, start, draw).items():
                        errors.setdefault((start, total, way), []).append(error)
    return [
        _row(
            gpu,
            key,
            i,
            trial_errors,
            errors,
        )
        for i in range(len(WEIGHTS))
        for key, trial_errors in errors.items()
    ]


def trial(
    pool: Pool,
    start: int,
    seed: int,
) -> dict[tuple[int, str], Array]:
    """Errors, one for each weighting, from ``start`` rows and from those each way adds."""
    rng = np.random.default_rng([seed, start])
    begin = np.asarray(rng.permutation(len(pool.bursts))[:start])
    errors = {(start, "start"): scored(pool, begin)}
    for name, order in WAYS.items():
        more = order(pool, begin, round((max(GROWS) - 1.0) * start), rng)
        for times in GROWS:
            some = np.concatenate([begin, more[: round((times - 1.0) * start)]])
            errors[round(times * start), name] = scored(pool, some)
    return errors


def pool_of(gpu: str, fold: int) -> Pool:
    """Candidates and held-out rows of a fold."""
    chip = hardware.load_gpu(gpu)
    rows = kernel_rows.load_kernel_rows(gpu)
    bundle = bundle_for(chip)
    burst = rows.is_kind("burst")
    names = tuple(
        kernel_names if b else () for kernel_names, b in zip(rows.names, burst, strict=True)
    )
    rows = replace(
        rows, names=names
    )  # else kernels of bursts not chosen would be known from sustained rows
    usable = burst & rows.fit & (rows.repeat == 0) & on_random_data(rows)
    in_test_fold = assign_folds(rows) == fold
    bursts = np.flatnonzero(usable & ~in_test_fold)
    test = np.flatnonzero(usable & in_test_fold)
    of = [
        build_kernels(
            some.ops,
            some.conditions,
            chip,
            bundle.reference,
            (),
        )
        for some in map(rows.select_rows, _masks(rows, bursts, test))
    ]
    operators = list_model_operators(gpu, lambda _: None)
    asked_kernels = build_kernels(
        tuple(w.op for w in operators),
        [USUAL_CONDITION] * len(operators),
        chip,
        bundle.reference,
        (),
    )
    weight = np.array([w.share for w in operators])
    shares = [spread_over(asked_kernels, weight, kernels) for kernels in of]
    idle = fit_idle_curve(kernel_rows.load_idle_rows(gpu), chip)
    return Pool(
        rows,
        chip,
        idle,
        bundle,
        bursts,
        test,
        ~burst & ~in_test_fold,
        of[0],
        shares[0],
        shares[1],
    )


def _masks(rows: KernelRows, *places: Index) -> list[Mask]:
    return [np.isin(np.arange(len(rows)), some) for some in places]


def spread_over(
    asked_kernels: Kernels,
    weight: Array,
    kernels: Kernels,
) -> Array:
    """Each operator's weight, spread over kernels of its group by their distance; the shares add up
    to one.
    """
    names = sorted(
        n
        for n in kernels.work.features
        if n.startswith("log_") and n in asked_kernels.work.features
    )
    theirs, mine = (
        np.column_stack([k.work.features[n] for n in names]) for k in (asked_kernels, kernels)
    )
    group = np.array(asked_kernels.work.kernel_family)
    families = np.array(kernels.work.kernel_family)
    shares = np.zeros(len(families))
    for name in set(group.tolist()) & set(families.tolist()):
        here = np.flatnonzero(families == name)
        there = np.flatnonzero(group == name)
        apart = np.linalg.norm(theirs[there][:, None, :] - mine[here][None, :, :], axis=-1)
        near = np.exp(-0.5 * (apart**2 - apart.min(axis=1, keepdims=True) ** 2))
        shares[here] += weight[there] @ (near / near.sum(axis=1, keepdims=True))
    return np.asarray(shares / max(float(shares.sum()), 1e-30))


def scored(pool: Pool, chosen: npt.NDArray[np.int64]) -> Array:
    """Held-out latency error in percent of a fit on the chosen bursts, by each weighting."""
    train, test = _masks(pool.rows, pool.bursts[chosen], pool.test)
    fitted = fit_kernel_rows(pool.rows.select_rows(train | pool.other_kinds), pool.gpu, pool.idle)
    some = pool.rows.select_rows(test)
    error = 100.0 * np.abs(
        predict_with_fit(fitted, some, pool.gpu)[:, 0] / some.column("latency_s") - 1.0
    )
    return np.array([error.mean(), error @ pool.test_share])


def _row(
    gpu: str,
    key: tuple[int, int, str],
    i: int,
    trial_errors: list[Array],
    errors: dict[tuple[int, int, str], list[Array]],
) -> LedgerRow:
    start, total, way = key
    values = np.array(trial_errors)[:, i]
    chance = errors.get((start, total, "random"))
    floor = None if chance is None or way == "random" else float(np.array(chance)[:, i].mean())
    more: dict[str, Any] = {"draws": [round(v, 1) for v in values.tolist()]}
    return make_ledger_row(
        f"{gpu} suggest, latency weighted {WEIGHTS[i]}",
        f"{start} rows grown to {total}, {way}" if total > start else f"{start} rows",
        total,
        float(values.mean()),
        floor,
        **more,
    )


if __name__ == "__main__":
    from wattcast.lab.validate.long_checks.ledger_rows import run_study

    run_study("suggest", suggest_rows)
