"""Fit the kernels of an inference engine and add them to a bundle that was fitted to PyTorch's
kernels.

Corrections and learned factors of time come from bursts, learned factors of energy from sustained
rows. Energies of events, V(f), toggling and the clock law stay those of the bundle, so no other
prediction of it changes. Rows that the database holds out are never read here."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import msgspec
import numpy as np

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import KernelRows
from wattcast.calibrate.latency_fit import (
    ResidualSample,
    fit_corrections,
    fit_residuals,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_prediction import (
    conformal_ends,
    loaded_clock_hz,
    measured_ranges,
    predict_with_bundle,
)
from wattcast.core import files
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, unknown_name
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import (
    STEPS_FILE,
    database_folder,
    read_table,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, build_kernels
from wattcast.kernels.kernel_table import root_family
from wattcast.lab.fit import kernel_fit
from wattcast.lab.fit.held_out import compare_asked_power
from wattcast.power.module_power import as_module_power
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds
from wattcast.predictor.ideal_terms import compute_ideal_terms
from wattcast.predictor.kernel_phases import Correction, blend_corrections
from wattcast.predictor.learned_factors import LearnedFactor, LearnedFactors
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.predictor.prediction import predict_graph
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s
from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import (
    ModelOptions,
    SoftwareStack,
    WorkloadPhase,
)
from wattcast.workload.readers.from_huggingface import convert_config

_Value = TypeVar("_Value")
_PRODUCTS = ("engine_scaled", "engine_block", "engine_weight_only", "engine_experts")
_ATTENTION = ("engine_paged", "engine_latent")
# Families with few sustained rows learn energies from one another's.
_POOLS = {**dict.fromkeys(_PRODUCTS, _PRODUCTS), **dict.fromkeys(_ATTENTION, _ATTENTION)}


def is_engine_family(name: str) -> bool:
    """Tell whether a kernel family, or the name of a learned factor, is an engine's."""
    return root_family(name).startswith("engine_")


def extend_bundle(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
    tell: Callable[[str], None] = lambda _: None,
    steps: Sequence[MeasuredStep] = (),
    torch_rows: KernelRows | None = None,
) -> Bundle:
    """Return a bundle with engine kernels fitted to the rows that are not held out; those it had
    go.

    ``others``: rows that the bundle was fitted to, which tell cards apart.
    """
    if rows.held_out is None:
        raise BadInput(
            f"{rows.source}: no row is held out. Engine rows carry `held_out` in their detail."
        )
    training = rows.select_rows(~rows.held_out & kernel_rows.on_random_data(rows) & rows.fit)
    if not all(op.kind.startswith("engine_") for op in training.ops):
        raise BadInput(
            f"{rows.source}: rows of other operators than an engine's. Fit them with `lab "
            "fit kernels`."
        )
    base = without_engine(bundle)
    cards = [describe_bundle_cards(base, torch_rows, gpu)] if torch_rows else []
    ends = _interval_ends(
        base,
        training,
        gpu,
        cards,
        tell,
    )
    extended = _add_families(
        base,
        training,
        gpu,
        cards,
        steps,
    )
    bursts = int(training.is_kind("burst").sum())
    fitted = f"{bursts} bursts, {len(training) - bursts} sustained rows and {len(steps)} steps"
    note = f"engine kernels: {fitted} of {rows.source}"
    kernels = build_kernels(
        training.ops,
        training.conditions,
        gpu,
        base.reference,
        (),
    )
    return replace(
        extended,
        residuals={**base.residuals, **ends},
        seen={**base.seen, **measured_ranges(training, kernels)},
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
        step_energy=1.0,
        provenance=msgspec.structs.replace(
            bundle.provenance, note=bundle.provenance.note.partition("; engine kernels")[0]
        ),
    )


def replace_family(
    bundle: Bundle,
    fitted: Bundle,
    family: str,
) -> Bundle:
    """Return a bundle in which one engine family is that of another fit, and all else stays.

    Energies of families are learned from one another's rows, so that a new law of one would move
    the others by a few parts in a thousand.
    """
    assert bundle.learned is not None
    assert fitted.learned is not None

    def merge(table: Mapping[str, _Value], fresh: Mapping[str, _Value]) -> dict[str, _Value]:
        return {**table, **{k: fresh[k] for k in fresh if root_family(k) == family}}

    if family not in fitted.learned.time or family not in fitted.residuals:
        raise unknown_name("engine family", family, filter(is_engine_family, fitted.residuals))
    factors = LearnedFactors(
        bundle.learned.reference,
        merge(bundle.learned.time, fitted.learned.time),
        merge(bundle.learned.energy, fitted.learned.energy),
    )
    return replace(
        bundle,
        corrections=merge(bundle.corrections, fitted.corrections),
        residuals=merge(bundle.residuals, fitted.residuals),
        seen=merge(bundle.seen, fitted.seen),
        learned=factors,
    )


def describe_bundle_cards(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
) -> kernel_fit.CardRows:
    """Return what rows of a bundle's own kernels, not an engine's, tell of their cards."""
    power = as_module_power(bundle.power)
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle.reference,
        (),
    )
    priced, sample = kernel_fit.price_rows(
        rows,
        kernels,
        gpu,
        power.idle,
        bundle.corrections,
        bundle.reference,
    )
    return kernel_fit.describe_cards(priced, sample, power, bundle.toggling)


def _add_families(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
    cards: Sequence[kernel_fit.CardRows],
    steps: Sequence[MeasuredStep] = (),
) -> Bundle:
    """Fit corrections, time and energy of the rows' families into a bundle, and what ``steps`` draw
    of it.
    """
    learned = bundle.learned
    assert learned is not None, "engine kernels are added to a bundle that was fitted to kernels"
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle.reference,
        (),
    )
    corrections, time = _fit_time(bundle, rows, kernels)
    power = as_module_power(bundle.power)
    timed = replace(
        bundle, corrections=corrections, learned=LearnedFactors(learned.reference, time, {})
    )
    modelled_hz = _find_modelled_hz(timed, rows, kernels, gpu)
    priced, sample = kernel_fit.price_rows(
        rows,
        kernels,
        gpu,
        power.idle,
        corrections,
        bundle.reference,
        modelled_hz,
    )
    engine_cards = kernel_fit.describe_cards(priced, sample, power, bundle.toggling)
    levels = kernel_fit.find_card_levels(*cards, engine_cards)
    priced = replace(priced, power_w=priced.power_w / engine_cards.compute_level(levels))
    sample = replace(sample, ratio=kernel_fit.energy_ratio(priced, power, bundle.toggling))
    energy = fit_residuals(
        [sample],
        pools=_POOLS,
        trees=0,
        hold_in=False,
    )
    factors = LearnedFactors(
        learned.reference, {**learned.time, **time}, {**learned.energy, **energy}
    )
    extended = replace(bundle, corrections=corrections, learned=factors)
    if not steps:
        return extended
    return replace(extended, step_energy=find_step_energy(extended, steps, levels, gpu))


def _fit_time(
    bundle: Bundle,
    rows: KernelRows,
    kernels: Kernels,
) -> tuple[dict[str, Correction], dict[str, LearnedFactor]]:
    """Return the bundle's corrections with those of the rows' families, and factors of time."""
    reference = bundle.reference
    law = bundle.clock_law
    assert law is not None, "engine kernels are added to a bundle with a clock law"
    burst = rows.is_kind("burst")
    some = kernel_rows.select_kernels(kernels, burst)
    latency_s = rows.column("latency_s")[burst]
    clock_hz = loaded_clock_hz(
        law,
        some,
        latency_s,
        reference.top_hz,
        reference.sm_count,
    )
    terms = compute_ideal_terms(some, reference)
    fitted = fit_corrections(terms, some.work.kernel_family, latency_s, clock_hz)
    corrections = {**bundle.corrections, **fitted}
    scaffold_s = terms.seconds(np.log(blend_corrections(some.work, corrections)), clock_hz)
    return corrections, fit_residuals([ResidualSample(some, latency_s / scaffold_s)], trees=0)


@dataclass(frozen=True)
class MeasuredStep:
    """A decode step of an engine that ran at the top clock, below the power limit."""

    graph: Graph
    model: str
    card: float  # as in the rows of kernels
    power_w: float
    latency_s: float


def load_fitting_steps(database: str, top_hz: float) -> list[MeasuredStep]:
    """Read the decode steps of fitting models; none where a database has no engine's steps.

    Steps on dummy weights are left out where the same engine was measured with weights that tell
    tokens apart."""
    path = database_folder(database) / STEPS_FILE
    rows = read_table(path) if path.exists() else []
    fitting_rows = [
        row
        for row in rows
        if row["kind"] == "decode" and not row["held_out"] and not row.get("error")
    ]
    apart = {row["model"] for row in fitting_rows if row.get("normal_weights")}
    steps = []
    for row in fitting_rows:
        settled = (
            row["sm_clock_hz"] > TOP_CLOCK_SHARE * top_hz
            and row["host_s"] < _HIDDEN_SHARE * row["latency_s"]
        )
        if settled and (row["model"] not in apart or row["normal_weights"]):
            sizes = {"batch": int(row["batch"]), "seq": round(row["context_mean"])}
            options = replace(read_engine_options(row), phase=WorkloadPhase.DECODE, **sizes)
            graph = build_graph(load_measured_model(row["model"]), options)
            card = kernel_rows.number_card(row["card_uuid"])
            steps.append(
                MeasuredStep(
                    graph,
                    row["model"],
                    card,
                    row["power_w"],
                    row["latency_s"],
                )
            )
    return steps


def read_engine_options(row: Plain) -> ModelOptions:
    """Return the number formats that an engine was started with."""
    formats = {
        name: row[name] if row[name] == "fp8" else None for name in ("quantization", "kv_dtype")
    }
    return ModelOptions.from_names(stack=SoftwareStack.ENGINE, **formats)


@cache
def load_measured_model(name: str) -> ModelSpec:
    """Return the model of a measured engine from the configuration it was started with."""
    lines = read_lines(files("wattcast.lab.campaigns").joinpath("engine_models.jsonl"))
    configs = {line["name"]: line["config"] for line in lines}
    if name not in configs:
        raise unknown_name("measured engine model", name, configs)
    return convert_config(configs[name], f"engine_models.jsonl: {name}", name)


_HIDDEN_SHARE = 0.9  # of a step's time, up to which the host's work is hidden
# Spreads of logs of dynamic power: of steps on one card, of cards that ran kernels about their
# levels, and of others about the mean card (of all that they draw a third goes to memory; see
# ``find_card_levels``).
_STEP = 0.02
_KNOWN_CARD = 0.02
_OTHER_CARD = 0.06


def find_step_energy(
    bundle: Bundle,
    steps: Sequence[MeasuredStep],
    levels: Mapping[float, tuple[float, float]],
    gpu: Gpu,
) -> float:
    """Find the dynamic energy of kernels in an engine's steps over that of the same kernels alone.

    A ``bundle`` fitted to kernels alone gives a step the power P_alone over the time it took. On a
    card of the levels u and v (``find_card_levels``) it draws P = P_idle + c·(P_alone·exp(u + v·s)
    - P_idle), s the share of memory. The log of c is the mean over cards, each by how well it is
    known: a card that ran no kernel may have any level."""
    top_hz = float(np.mean(gpu.clocks.max_hz))
    at = OperatingPoint(
        power_limit_w=10.0 * float(np.mean(gpu.power.limit_w))
    )  # as if none held the steps back
    idle_w = float(np.ravel(bundle.power.idle_power_w(top_hz))[0])
    logs: dict[float, list[float]] = {}
    for step in steps:
        alone = predict_graph(step.graph, gpu, at, bundle)
        watts = {module.name: float(module.power_w) for module in alone.modules}
        level, memory_level = levels.get(step.card, (0.0, 0.0))
        alone_w = (
            idle_w + (float(alone.energy_j) - idle_w * float(alone.latency_s)) / step.latency_s
        )
        card_w = alone_w * np.exp(level + memory_level * watts["dram"] / sum(watts.values()))
        logs.setdefault(step.card, []).append(
            float(np.log((step.power_w - idle_w) / (card_w - idle_w)))
        )
    spread = [
        np.hypot(_STEP / np.sqrt(len(card_logs)), _KNOWN_CARD if card in levels else _OTHER_CARD)
        for card, card_logs in logs.items()
    ]
    return float(
        np.exp(
            np.average(
                [np.mean(card_logs) for card_logs in logs.values()],
                weights=np.array(spread) ** -2.0,
            )
        )
    )


def _find_modelled_hz(
    bundle: Bundle,
    rows: KernelRows,
    kernels: Kernels,
    gpu: Gpu,
) -> Array:
    """Return the clocks at which rows are priced: capped ones between the reported clock and the
    one of their time.

    A dense product under the limit runs faster than at the clock it reports. Priced at the clock at
    which the bundle gives it the time that was measured, the governor would find both its time and
    its power, but work at the top clock came out 4 to 8 % low in whole steps; priced at the
    reported clock, capped work came out 2 % slow. The geometric mean of both clocks was best on
    steps and traffic of fitting models."""
    _, clock_hz, latency_s = kernel_rows.settled_figures(rows)
    top_hz = float(np.mean(gpu.clocks.max_hz))
    grid_hz = np.linspace(0.3, 1.0, 141)[:, None] * top_hz
    timeline = analyse_kernels(kernels, gpu, bundle)
    seconds = compute_kernel_s(
        timeline.phases, compute_effective_hz(timeline, grid_hz, bundle.clock_law)
    )
    nearest = np.abs(np.log(seconds / latency_s)).argmin(axis=0)
    return np.where(
        clock_hz < TOP_CLOCK_SHARE * top_hz, np.sqrt(grid_hz[nearest, 0] * clock_hz), clock_hz
    )


def _interval_ends(
    bundle: Bundle,
    rows: KernelRows,
    gpu: Gpu,
    cards: Sequence[kernel_fit.CardRows],
    tell: Callable[[str], None],
) -> dict[str, ResidualEnds]:
    """Return the ends of measured over predicted by family, each row predicted without its
    shape.
    """
    fold = kernel_rows.assign_folds(rows)
    predicted = np.full((len(rows), 4), np.nan)
    for k in range(kernel_rows.FOLDS):
        test = fold == k
        predicted[test] = predict_with_bundle(
            _add_families(bundle, rows.select_rows(~test), gpu, cards), rows.select_rows(test), gpu
        )
        tell(f"fold {k + 1} of {kernel_rows.FOLDS}")
    families = np.array(
        build_kernels(
            rows.ops,
            rows.conditions,
            gpu,
            bundle.reference,
            (),
        ).work.root_family
    )
    power_w, clock_hz, latency_s = kernel_rows.settled_figures(rows)
    power = compare_asked_power(power_w, clock_hz, predicted)
    burst = rows.is_kind("burst")
    ends_of_family = {}
    for name in dict.fromkeys(families.tolist()):
        of_family = families == name
        alike = np.isin(families, _POOLS.get(name, (name,))) & ~burst
        ends_of_family[name] = ResidualEnds(
            conformal_ends((latency_s / predicted[:, 0])[of_family & burst]),
            conformal_ends(power[alike & np.isfinite(power)]),
            int((of_family & burst).sum()),
        )
    return ends_of_family
