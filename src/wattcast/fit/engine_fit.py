"""Fit the kernels of an inference engine and add them to a bundle that was fitted to PyTorch's kernels.

Corrections and learned factors of time come from bursts, learned factors of energy from sustained rows. Energies of
events, V(f), toggling and the clock law stay those of the bundle, so no other prediction of it changes. Rows that the
database holds out are never read here but to be predicted (``judge_engine_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput
from wattcast.fit.held_out import compare_asked_power, conformal_ends, predict_with_bundle
from wattcast.fit.kernel_fit import energy_ratio, loaded_clock_hz, measured_ranges, price_rows
from wattcast.fit.kernel_rows import FOLDS, KernelRows, assign_folds, on_random_data, select_kernels, settled_figures
from wattcast.fit.latency_fit import ResidualSample, fit_corrections, fit_residuals
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import root_family
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds
from wattcast.predictor.kernel_phases import blend_corrections
from wattcast.predictor.learned_factors import LearnedFactors, compute_ideal_terms
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s

_Value = TypeVar("_Value")
_PRODUCTS = ("engine_scaled", "engine_block", "engine_weight_only", "engine_experts")
_ATTENTION = ("engine_paged", "engine_latent")
# Families with few sustained rows learn energies from one another's.
_POOLS = {
    **dict.fromkeys(_PRODUCTS, _PRODUCTS),
    **dict.fromkeys(_ATTENTION, _ATTENTION),
}


def is_engine_family(name: str) -> bool:
    """Tell whether a kernel family, or the name of a learned factor, is an engine's."""
    return root_family(name).startswith("engine_")


def extend_bundle(bundle: Bundle, rows: KernelRows, gpu: Gpu, tell: Callable[[str], None] = lambda _: None) -> Bundle:
    """Return a bundle with engine kernels fitted to the rows that are not held out; those it had go."""
    known = _to_fit(rows)
    base = without_engine(bundle)
    ends = _interval_ends(base, known, gpu, tell)
    found = _add_families(base, known, gpu)
    bursts = int(known.is_kind("burst").sum())
    note = f"engine kernels: {bursts} bursts and {len(known) - bursts} sustained rows of {rows.source}"
    kernels = build_kernels(known.ops, known.conditions, gpu, base.reference, ())
    return replace(
        found,
        residuals={**base.residuals, **ends},
        seen={**base.seen, **measured_ranges(known, kernels)},
        provenance=msgspec.structs.replace(base.provenance, note=f"{base.provenance.note}; {note}"),
    )


def without_engine(bundle: Bundle) -> Bundle:
    """Return a bundle without engine kernels."""

    def rest(table: Mapping[str, _Value]) -> dict[str, _Value]:
        return {name: value for name, value in table.items() if not is_engine_family(name)}

    learned = bundle.learned
    if learned is not None:
        learned = LearnedFactors(learned.reference, rest(learned.time), rest(learned.energy))
    return replace(
        bundle,
        corrections=rest(bundle.corrections),
        residuals=rest(bundle.residuals),
        seen=rest(bundle.seen),
        learned=learned,
        provenance=msgspec.structs.replace(
            bundle.provenance, note=bundle.provenance.note.partition("; engine kernels")[0]
        ),
    )


def _to_fit(rows: KernelRows) -> KernelRows:
    if rows.held_out is None:
        raise BadInput(f"{rows.source}: no row is held out. Engine rows carry `held_out` in their detail.")
    known = rows.select_rows(~rows.held_out & on_random_data(rows) & rows.fit)
    if not all(op.kind.startswith("engine_") for op in known.ops):
        raise BadInput(f"{rows.source}: rows of other operators than an engine's. Fit them with `lab fit kernels`.")
    return known


def _add_families(bundle: Bundle, rows: KernelRows, gpu: Gpu) -> Bundle:
    """Fit corrections, time and energy of the rows' families into a bundle."""
    reference, law = bundle.reference, bundle.clock_law
    learned = bundle.learned
    assert learned is not None, "engine kernels are added to a bundle that was fitted to kernels"
    assert law is not None, "engine kernels are added to a bundle with a clock law"
    kernels = build_kernels(rows.ops, rows.conditions, gpu, reference, ())
    burst = rows.is_kind("burst")
    some, latency_s = select_kernels(kernels, burst), rows.column("latency_s")[burst]
    clock_hz = loaded_clock_hz(law, some, latency_s, reference.top_hz, reference.sm_count)
    terms = compute_ideal_terms(some, reference)
    corrections = {**bundle.corrections, **fit_corrections(terms, some.work.kernel_family, latency_s, clock_hz)}
    scaffold_s = terms.seconds(np.log(blend_corrections(some.work, corrections)), clock_hz)
    time = fit_residuals([ResidualSample(some, latency_s / scaffold_s)], trees=0)
    power = bundle.power.as_module_power()
    timed = replace(bundle, corrections=corrections, learned=LearnedFactors(learned.reference, time, {}))
    modelled_hz = _find_modelled_hz(timed, rows, kernels, gpu)
    priced, sample = price_rows(rows, kernels, gpu, power.idle, corrections, reference, modelled_hz)
    sample = replace(sample, ratio=energy_ratio(priced, power, bundle.toggling))
    energy = fit_residuals([sample], pools=_POOLS, trees=0, hold_in=False)
    return replace(
        bundle,
        corrections=corrections,
        learned=LearnedFactors(learned.reference, {**learned.time, **time}, {**learned.energy, **energy}),
    )


def _find_modelled_hz(bundle: Bundle, rows: KernelRows, kernels: Kernels, gpu: Gpu) -> Array:
    """Return the clocks at which rows are priced: capped ones between the reported clock and the one of their time.

    A dense product under the limit runs faster than at the clock it reports. Priced at the clock at which the bundle
    gives it the time that was measured, the governor would find both its time and its power, but work at the top
    clock came out 4 to 8 % low in whole steps; priced at the reported clock, capped work came out 2 % slow. The
    geometric mean of both clocks was best on steps and traffic of fitting models.
    """
    _, clock_hz, latency_s = settled_figures(rows)
    top_hz = float(np.mean(gpu.clocks.max_hz))
    grid_hz = np.linspace(0.3, 1.0, 141)[:, None] * top_hz
    timeline = analyse_kernels(kernels, gpu, bundle)
    seconds = compute_kernel_s(timeline.phases, compute_effective_hz(timeline, grid_hz, bundle.clock_law))
    nearest = np.abs(np.log(seconds / latency_s)).argmin(axis=0)
    return np.where(clock_hz < 0.995 * top_hz, np.sqrt(grid_hz[nearest, 0] * clock_hz), clock_hz)


@dataclass(frozen=True)
class JudgedRows:
    """Measured and predicted figures of engine rows, ``(row,)`` each; NaN where a row has no such figure."""

    kind: tuple[str, ...]
    operator: tuple[str, ...]  # the kind of operator, such as ``engine_experts``
    format: tuple[str, ...]
    latency_s: Array
    power_w: Array
    predicted_latency_s: Array
    predicted_power_w: Array


def judge_engine_rows(bundle: Bundle, rows: KernelRows, gpu: Gpu) -> JudgedRows:
    """Predict rows by a bundle: bursts at the top clock, sustained rows under the governor."""
    power_w, _, latency_s = settled_figures(rows)
    found = predict_with_bundle(bundle, rows, gpu)
    return JudgedRows(
        rows.kind,
        tuple(op.kind for op in rows.ops),
        tuple(str(op.math_dtype) for op in rows.ops),
        latency_s,
        np.where(rows.is_kind("burst"), np.nan, power_w),
        found[:, 0],
        found[:, 1],
    )


def _interval_ends(
    bundle: Bundle, rows: KernelRows, gpu: Gpu, tell: Callable[[str], None]
) -> dict[str, ResidualEnds]:
    """Return the ends of measured over predicted by family, each row predicted without its shape."""
    fold = assign_folds(rows)
    predicted = np.full((len(rows), 4), np.nan)
    for k in range(FOLDS):
        test = fold == k
        predicted[test] = predict_with_bundle(
            _add_families(bundle, rows.select_rows(~test), gpu), rows.select_rows(test), gpu
        )
        tell(f"fold {k + 1} of {FOLDS}")
    families = np.array(build_kernels(rows.ops, rows.conditions, gpu, bundle.reference, ()).work.root_family)
    power_w, clock_hz, latency_s = settled_figures(rows)
    power = compare_asked_power(power_w, clock_hz, predicted)
    burst = rows.is_kind("burst")
    found = {}
    for name in dict.fromkeys(families.tolist()):
        own = families == name
        alike = np.isin(families, _POOLS.get(name, (name,))) & ~burst
        found[name] = ResidualEnds(
            conformal_ends((latency_s / predicted[:, 0])[own & burst]),
            conformal_ends(_finite(power[alike])),
            int((own & burst).sum()),
        )
    return found


def _finite(values: Array) -> npt.NDArray[np.float64]:
    return values[np.isfinite(values)]
