"""The ledger of coverage: how many measured rows lie inside their 90 % intervals, and how wide
these are.

A set is a number of rows of one public file or of our own database. Where its GPU was never
measured by us, the ends come from the other GPUs alone (``learn_forecast_ends`` without the chip).
``narrowest`` is the width that the set's own residuals ask for, from their 5th to their 95th
percentile: no interval of one width holds 90 % with much less. Run: ``wattcast lab validate
--ablations`` in the repository (WATTCAST_REFERENCE names the measurements)."""

from __future__ import annotations

import json
import zlib
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.calibrate import whole_models
from wattcast.calibrate.calibration import MeasuredModel
from wattcast.calibrate.kernel_rows import parse_operators, shape_name
from wattcast.calibrate.row_prediction import analyse_rows, predict_with_bundle
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_ledger_row,
)
from wattcast.calibrate.table_fit import (
    describe_work,
    forecast_tables_s,
    predict_tables_s,
)
from wattcast.calibrate.table_rows import TableRows, read_tables
from wattcast.core.arrays import Array, Mask
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import (
    CHAINS_FILE,
    database_folder,
    read_table,
)
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.lab.fit.engine_records import COMPILED, load_engine_records
from wattcast.lab.validate.public_checks.other_gpu_checks import to_calibration_row
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_FILES,
    PUBLISHED_GPU,
    clean_runs,
    fp32_runs,
    read_other_gpus,
    read_published_runs,
)
from wattcast.lab.validate.public_checks.wide_format_intervals import (
    WideRows,
    find_ends_without_networks,
)
from wattcast.predictor.api import predict_many
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds
from wattcast.predictor.bundle.forecast import forecast_residuals
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    ForecastEnds,
    LearnedPair,
    OutsideReason,
)
from wattcast.predictor.prediction import Prediction, predict_graph
from wattcast.predictor.prediction_interval import (
    compute_interval,
    find_step_kind,
    govern_ends,
    kernel_log_ends,
    scale_capped_ends,
    widen_log_ends,
)
from wattcast.predictor.unmeasured_kernels import find_unmeasured
from wattcast.workload.graph import Block, Graph

UNCAPPED_W = 1e9  # a power limit that no card reaches
LEVEL = 0.9
WANTED = (82.0, 97.0)  # percent of a public set inside
WIDEST = 1.5  # times the narrowest width
LEAST_ROWS = 40  # of a public set, to be judged
TABLE_ROWS = 1_000_000  # of a table, a number format and a band of latency: all
CHIPS = {
    "a100-sxm-80gb": "A100",
    "b200": "B200",
    "l40s": "L40S",
    PUBLISHED_GPU: "A100",
    "a10": "A10",
}
HOST_BOUND = (
    0.05  # share of a step that the host waits for the GPU, below which the host holds the step up
)
_LEAST_OF_GROUP = 20  # rows of a kind of kernel on a chip, to learn from
_OTHER_KINDS = {
    "other": ForecastEnds((0.7, 1.4), 0, 0, (0.8, 1.25))
}  # where no whole models are known
_HALF_OTHER = 0.3  # half-width of logs that is scaled until whole models of other chips are inside


@dataclass(frozen=True)
class KernelSet:
    """Rows of one public table: logs of measured over predicted, and what decides their ends;
    ``(row,)`` each.
    """

    name: str
    chip: str
    group: tuple[str, ...]  # kinds of kernels
    log_ratio: Mapping[str, Array]  # latency, and power where it was measured
    inside: Mask  # of what was measured in kind and format
    half: Mask  # by a hash of the shape
    make_ends: Callable[[Bundle, Mapping[str, ForecastEnds]], Array]  # (row, 4) logs of ends
    bundle: Bundle


@dataclass(frozen=True)
class ModelSet:
    """Whole models or layers: predictions and what was measured of each."""

    name: str
    chip: str
    predictions: tuple[Prediction, ...]
    measured: Mapping[str, Array]  # latency, and power where it was measured

    def select_rows(self, rows: Sequence[int]) -> ModelSet:
        """Return some of the models."""
        measured = {quantity: values[list(rows)] for quantity, values in self.measured.items()}
        return replace(
            self, predictions=tuple(self.predictions[i] for i in rows), measured=measured
        )

    def log_ratio(self, quantity: str) -> Array:
        """Return logs of measured over predicted."""
        predicted = [p.latency_s if quantity == "latency" else p.power_w for p in self.predictions]
        return np.asarray(np.log(self.measured[quantity] / np.array(predicted)))

    def ends(
        self,
        quantity: str,
        ends: Mapping[str, ResidualEnds] | None = None,
        steps: LearnedPair | None = None,
    ) -> Array:
        """Return logs of the interval's ends over the prediction, ``(row, 2)``; other ends of
        families or steps.
        """
        log_ends = []
        for p in self.predictions:
            interval = (
                p.interval
                if ends is None and steps is None
                else compute_interval(p.basis, p.support.distances, ends, steps)
            )
            value, middle = (
                (interval.latency_s, p.latency_s)
                if quantity == "latency"
                else (interval.power_w, p.power_w)
            )
            log_ends.append(np.log(value / middle))
        return np.array(log_ends)


def coverage_rows(
    reference: Path | None,
    tell: Tell,
    gpu: str = "h200",
) -> list[LedgerRow]:
    """Return share inside, mean width and narrowest width of every set that can be found; takes
    minutes.
    """
    rows = []
    tell(f"coverage: layers and whole models of the {gpu}")
    unseen = (load_step_set(gpu, held_out=True), load_told_set(gpu))
    for model_set in (
        load_layer_set(gpu),
        *load_model_sets(gpu),
        load_step_set(gpu, held_out=False),
        *unseen,
    ):
        for quantity in model_set.measured:
            goal = (85.0, 95.0)
            ends = (
                _ends_of_left_out_engines(model_set, quantity)
                if model_set in unseen
                else model_set.ends(quantity)
            )
            rows.append(
                _judge(
                    f"coverage, {model_set.name}",
                    quantity,
                    model_set.log_ratio(quantity),
                    ends,
                    goal,
                )
            )
    if reference is None:
        return rows
    tell("coverage: public sets")
    for quantity, name, log_ratio, ends in judge_public_sets(reference):
        rows.append(
            _judge(
                f"coverage, {name}",
                quantity,
                log_ratio,
                ends,
                WANTED,
            )
        )
    return rows


def _judge(
    where: str,
    quantity: str,
    log_ratio: Array,
    ends: Array,
    goal: tuple[float, float],
) -> LedgerRow:
    measured = np.isfinite(log_ratio)
    log_ratio = log_ratio[measured]
    ends = ends[measured]
    inside = (log_ratio >= ends[:, 0]) & (log_ratio <= ends[:, 1])
    low, high = np.quantile(np.exp(log_ratio), [0.05, 0.95])
    width = float(np.mean(np.exp(ends[:, 1]) - np.exp(ends[:, 0])))
    share = 100.0 * float(inside.mean())
    more: dict[str, Any] = {
        "coverage": round(share, 1),
        "width": round(100.0 * width, 1),
        "narrowest": round(100.0 * float(high - low), 1),
        "wanted": list(goal),
        "held": bool(goal[0] <= share <= goal[1] and width <= WIDEST * (high - low)),
    }
    return make_ledger_row(
        where,
        quantity,
        len(log_ratio),
        None,
        **more,
    )


def judge_public_sets(reference: Path) -> Iterable[tuple[str, str, Array, Array]]:
    """Return quantity, name, log-ratios and log-ends of every public set; a forecast's chip is left
    out.
    """
    kernels = load_table_sets(reference)
    models = load_published_models(reference)
    chips = {s.chip for s in kernels} | {s.chip for s in models}
    without = {chip: learn_forecast_ends(kernels, models, chip) for chip in sorted(chips)}
    for kernel_set in kernels:
        bundle = kernel_set.bundle
        if bundle.status is FitStatus.FORECAST:
            learned = without[kernel_set.chip]
            bundle = replace(bundle, residuals=forecast_residuals(bundle.residuals, learned))
            ends = kernel_set.make_ends(bundle, {})
        else:  # of the card itself: what was learned from the other half of the shapes
            half_ends = [
                kernel_set.make_ends(bundle, learn_engine_ends(kernels, half))
                for half in (False, True)
            ]
            ends = np.where(kernel_set.half[:, np.newaxis], *half_ends)
        for quantity, log_ratio in kernel_set.log_ratio.items():
            if np.isfinite(log_ratio).sum() >= LEAST_ROWS:
                yield (
                    quantity,
                    kernel_set.name,
                    log_ratio,
                    ends[:, :2] if quantity == "latency" else ends[:, 2:],
                )
    for some in models:
        residuals = forecast_residuals(
            some.predictions[0].basis.bundle.residuals, without[some.chip]
        )
        for quantity in some.measured:
            is_wide = quantity == "latency" and some.name.endswith(_FP32)
            ends = _ends_of_left_out_networks(some) if is_wide else some.ends(quantity, residuals)
            yield quantity, some.name, some.log_ratio(quantity), ends


@cache
def load_table_sets(reference: Path) -> tuple[KernelSet, ...]:
    """Load the tables of kernels: forecasts of three GPUs, and the H200's with its own bundle."""
    sets = []
    for name in ("a100-sxm-80gb", "b200", "l40s", "h200"):
        gpu = hardware.load_gpu(name)
        bundle = bundle_for(gpu) if name == "h200" else forecast_bundle(gpu)
        table = read_tables([reference / "aiconfigurator"], gpu, TABLE_ROWS)
        # fp8 products by block are launched one by one: the host's time, not the kernel's
        judged = table.rows.fit & np.array(
            [op.kind != "engine_block_mm" or op.dtype != "fp8" for op in table.rows.ops]
        )
        table = table.select_rows(judged)
        names = [
            f"{name} {engine} "
            f"{_table_of(describe_work(op))}{'' if kind == 'burst' else ', sustained'}"
            for engine, op, kind in zip(table.engine, table.rows.ops, table.rows.kind, strict=True)
        ]
        for label in dict.fromkeys(names):
            some = np.array([row_label == label for row_label in names])
            if label.endswith("sustained"):
                some &= np.isfinite(table.rows.column("power_w"))
            if some.sum() >= LEAST_ROWS:
                sets.append(_kernel_set(label, table.select_rows(some), gpu, bundle))
    return tuple(sets)


def _table_of(work: str) -> str:
    """Name the public table of what a row timed."""
    if work.startswith("attention"):
        return "context attention" if "prefill" in work else "generation attention"
    return "products" if work.startswith("products") else "experts"


def _kernel_set(
    name: str,
    table: TableRows,
    gpu: Gpu,
    bundle: Bundle,
) -> KernelSet:
    timeline = analyse_rows(bundle, table.rows, gpu)
    reasons = find_unmeasured(timeline, bundle)
    if bundle.status is FitStatus.FORECAST:
        predicted_s = forecast_tables_s(table, gpu, bundle)
    else:
        predicted_s = predict_tables_s(table, gpu, bundle)
    ratio = {"latency": np.log(table.rows.column("latency_s") / predicted_s)}
    predicted = predict_with_bundle(bundle, table.rows, gpu) if name.endswith("sustained") else None
    if predicted is not None:
        ratio["power"] = np.log(table.rows.column("power_w") / predicted[:, 1])

    def make_ends(with_ends: Bundle, engines: Mapping[str, ForecastEnds]) -> Array:
        spread = NORMAL_P90 * np.array([with_ends.cards.latency, with_ends.cards.power])
        ends = kernel_log_ends(timeline, with_ends, reasons, engines)
        time, power = (
            widen_log_ends(ends[:, at : at + 2], by) for at, by in zip((0, 2), spread, strict=True)
        )
        if predicted is not None:
            limit_w = float(np.mean(gpu.power.limit_w))
            time = time * scale_capped_ends(with_ends, predicted[:, 3:], limit_w)
            power = np.log(
                govern_ends(predicted[:, 1:2], predicted[:, 3:], np.exp(power), limit_w)
                / predicted[:, 1:2]
            )
        return np.hstack([time, power])

    strange = (OutsideReason.KIND, OutsideReason.DTYPE)
    plain = np.array(
        [i not in reasons or reasons[i].reason not in strange for i in range(len(timeline.calls))]
    )
    group = timeline.kernels.work.kernel_family
    half = np.array([zlib.crc32(shape_name(op).encode()) % 2 == 0 for op in table.rows.ops])
    return KernelSet(
        name,
        CHIPS.get(gpu.name, ""),
        tuple(group),
        ratio,
        plain,
        half,
        make_ends,
        bundle,
    )


@cache
def load_published_models(reference: Path) -> tuple[ModelSet, ...]:
    """Load the published whole models on A100 and A10, forecast at the clock that really ran."""
    runs = {
        (PUBLISHED_GPU, "A100 whole models, 900 MHz"): clean_runs(
            read_published_runs(reference, "900")
        ),
        (PUBLISHED_GPU, "A100 whole models, other clocks"): clean_runs(
            read_published_runs(reference, "clocks")
        ),
        **{
            (name, f"{name} whole models"): some
            for name, some in read_other_gpus(reference).items()
        },
        (PUBLISHED_GPU, f"A100 whole models, {_FP32}"): [
            run
            for which in PUBLISHED_FILES
            for run in fp32_runs(read_published_runs(reference, which))
        ],
    }
    for name, some in read_other_gpus(reference, fp32_runs).items():
        if some:
            runs[name, f"{name} whole models, {_FP32}"] = some
    sets = []
    for (name, label), some in runs.items():
        gpu = hardware.load_gpu(name)
        rows = [to_calibration_row(r, gpu) for r in some]
        sets.append(
            _model_set(
                label,
                CHIPS.get(name, name),
                rows,
                gpu,
                forecast_bundle(gpu),
            )
        )
    return tuple(sets)


def _model_set(
    name: str,
    chip: str,
    rows: Sequence[MeasuredModel],
    gpu: Gpu,
    bundle: Bundle,
) -> ModelSet:
    predictions = tuple(
        predict_graph(m.graph, gpu, OperatingPoint(m.clock_hz, UNCAPPED_W, m.temperature_c), bundle)
        for m in rows
    )
    columns = {
        q: np.array([getattr(m, n) for m in rows], float)
        for q, n in (("latency", "latency_s"), ("power", "power_w"))
    }
    return ModelSet(name, chip, predictions, columns)


def load_model_sets(gpu: str) -> list[ModelSet]:
    """Load our own whole models: captured in CUDA graphs, and launched by the host."""
    chip = hardware.load_gpu(gpu)
    bundle = bundle_for(chip)
    sets = []
    for label, captured in (
        ("whole models, GPU-bound", True),
        ("whole models, launched by the host", False),
    ):
        cases = [case for case in whole_models.load_models(gpu) if case.row.graph == captured]
        here = (
            replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
            if captured
            else bundle
        )
        predictions = tuple(
            predict_graph(case.graph, chip, OperatingPoint(), here) for case in cases
        )
        latency = whole_models.measured_column(cases, lambda r: r.latency_s)
        power = whole_models.measured_column(cases, lambda r: r.power_w)
        sets.append(
            ModelSet(f"{gpu} {label}", "", predictions, {"latency": latency, "power": power})
        )
    return sets


def load_step_set(
    gpu: str,
    held_out: bool,
    board: str = "",
) -> ModelSet:
    """Load decode and prefill steps of the engine that was measured, of models that its laws were
    fitted to or not.

    Steps that the host holds up are left out: it never waits for the GPU in them. So are prompts
    longer than a step. With a ``board``, only steps of cards on which it was read are loaded, and
    predicted for it."""
    records = load_engine_records(gpu)
    engines = {row["model"]: row for row in records.select_kind("engine")}
    told_apart = {row["model"] for row in records.rows if row.get("normal_weights")}
    questions = []
    rows = []
    for row in records.select_kind("decode", "prefill"):
        engine = engines[row["model"]]
        is_dummy = row["model"] in told_apart and not row["normal_weights"]
        elsewhere = board and row["card_board"] != hardware.load_gpu(board).board
        if is_dummy or elsewhere or bool(row["held_out"]) != held_out:
            continue
        if _is_longer_than_step(row, engine) or _is_host_bound(row):
            continue
        questions.append((load_measured_model(row["model"]), _step_options(row, engine)))
        rows.append(row)
    measured = {
        "latency": np.array([row["latency_s"] for row in rows]),
        "power": np.array([row["power_w"] for row in rows]),
    }
    side = "held-out" if held_out else "fitting"
    predictions = tuple(predict_many(questions, board or gpu, force=True))
    return ModelSet(f"{gpu} engine steps, {side} models", "", predictions, measured)


def _is_longer_than_step(row: Plain, engine: Plain) -> bool:
    prompt_tokens = int(row["prompts"] or 0) * int(row["prompt_tokens"] or 0)
    return prompt_tokens > int(engine["max_batched_tokens"])


def _is_host_bound(row: Plain) -> bool:
    never_waits = bool(row["wait_s"] < HOST_BOUND * row["latency_s"])
    return never_waits or COMPILED in (row["flags"] or "")


def _step_options(row: Plain, engine: Plain) -> dict[str, Any]:
    """Return the options of the prediction of a measured step."""
    prompts = int(row["prompts"] or 0)
    options = {
        "stack": "engine",
        "phase": row["kind"],
        "batch": prompts or int(row["batch"]),
        "seq": int(row["prompt_tokens"] or 0) if prompts else round(row["context_mean"]),
    }
    for name in ("quantization", "kv_dtype"):
        if engine[name] == "fp8":
            options[name] = "fp8"
    return options


def load_told_set(gpu: str) -> ModelSet:
    """Load the power of held-out models' steps on cards whose board was read, each predicted for
    its board.
    """
    board_sets = [load_step_set(gpu, held_out=True, board=board) for board in list_boards(gpu)]
    predictions = tuple(p for some in board_sets for p in some.predictions)
    power_w = np.concatenate([some.measured["power"] for some in board_sets])
    return ModelSet(f"{board_sets[0].name}, board told", "", predictions, {"power": power_w})


def list_step_kinds(some: ModelSet) -> list[str]:
    """List the kinds of steps in a set."""
    return sorted({find_step_kind(p.basis) for p in some.predictions})


def learn_step_spread(
    some: ModelSet,
    kind: str,
    without: str = "",
) -> LearnedPair:
    """Learn the least half-widths at which 90 % of further steps lie inside, ``without`` the steps
    of one engine.

    ``kind`` is theirs by ``find_step_kind``. Of n steps (n + 1)·0.9 must be inside for that: split
    conformal prediction [Lei2018], since steps are few.
    """
    is_learned = np.array(
        [_engine_of(p) != without and find_step_kind(p.basis) == kind for p in some.predictions]
    )
    half_width = {"latency": 0.0, "power": 0.0}
    count = int(is_learned.sum())
    for quantity in some.measured:
        ratio = some.log_ratio(quantity)
        least = 0.0
        most = 0.5
        while most - least > 1e-3:
            half = 0.5 * (least + most)
            low, high = some.ends(quantity, steps=LearnedPair(half, half, count, "")).T
            enough = np.sum(((low <= ratio) & (ratio <= high))[is_learned]) >= LEVEL * (count + 1)
            least, most = (least, half) if enough else (half, most)
        half_width[quantity] = round(most, 4)
    engines = len(
        {_engine_of(p) for p, learned in zip(some.predictions, is_learned, strict=True) if learned}
    )
    return LearnedPair(
        **half_width,
        rows=count,
        source=f"steps of {engines} engines that no law was fitted to",
    )


def _ends_of_left_out_engines(some: ModelSet, quantity: str) -> Array:
    """Return log-ends of the steps of each engine, learned from those of the other engines."""
    engines = np.array([_engine_of(p) for p in some.predictions])
    kinds = {_engine_of(p): find_step_kind(p.basis) for p in some.predictions}
    log_ends = np.empty((len(engines), 2))
    for name, kind in kinds.items():
        log_ends[engines == name] = some.ends(quantity, steps=learn_step_spread(some, kind, name))[
            engines == name
        ]
    return log_ends


def _ends_of_left_out_networks(some: ModelSet) -> Array:
    """Return log-ends of the latency of models in fp32, each learned from the others on its GPU."""
    networks = np.array([_engine_of(p) for p in some.predictions])
    rows = WideRows(networks, some.predictions, some.measured["latency"])
    latency_s = np.array([p.latency_s for p in some.predictions])
    return np.asarray(np.log(find_ends_without_networks(rows) / latency_s[:, np.newaxis]))


def _engine_of(p: Prediction) -> str:
    return p.name.split()[0]


def load_layer_set(gpu: str) -> ModelSet:
    """Load our own layers of operators that hand on results: bursts at the top clock, no power."""
    chip = hardware.load_gpu(gpu)
    bundle = bundle_for(chip)
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    at = OperatingPoint(float(np.mean(chip.clocks.max_hz)), UNCAPPED_W)
    chains = read_table(database_folder(gpu) / CHAINS_FILE)
    whole = [
        r
        for r in chains
        if r.get("handed_on") and r.get("latency_s") and not (r.get("error") or r.get("flags"))
    ]
    predictions = []
    for row in whole:
        ops = parse_operators([json.loads(text) for text in row["operators"]])
        # a layer follows another like it
        predictions.append(
            predict_graph(Graph(str(row["name"]), (Block(tuple(ops), 2),)), chip, at, bundle)
        )
    latency = 2.0 * np.array([float(row["latency_s"]) for row in whole])
    return ModelSet(f"{gpu} layers", "", tuple(predictions), {"latency": latency})


def learn_forecast_ends(
    kernels: Sequence[KernelSet],
    models: Sequence[ModelSet],
    without: str = "",
) -> dict[str, ForecastEnds]:
    """Learn the ends of a forecast from measured over forecast on other GPUs, ``without`` one chip.

    A chip errs as a whole, and nobody knows in which direction the next one will: ends are as far
    below the forecast as above it, in logs. A kind of kernel takes what holds 90 % of its rows,
    averaged over n chips and stretched by 1 + k/n, since these are few (``learn_stretch``). Other
    kinds share one pair of ends, as wide as it takes to hold 90 % of the published whole models,
    given those of the first; so does power. These need no stretch: whole models of a chip left out
    are 91 % inside on average without."""
    stretch = learn_stretch(kernels, without)
    ends_of_group = _group_ends([k for k in kernels if k.chip not in ("", without)], stretch)
    other_models = [m for m in models if m.chip != without]
    # models in fp32 are judged by these ends, and have no part in learning them
    judged = [m for m in other_models if not m.name.endswith(_FP32)]
    if not judged:
        return ends_of_group | _OTHER_KINDS
    weight = np.concatenate([np.full(len(m.predictions), 1.0 / len(m.predictions)) for m in judged])
    ratios = {q: np.concatenate([m.log_ratio(q) for m in judged]) for q in ("latency", "power")}
    rows = len(weight)
    gpus = len({m.chip for m in judged})

    def share_inside(quantity: str, ends: ForecastEnds) -> float:
        parts = [
            m.ends(
                quantity,
                forecast_residuals(
                    m.predictions[0].basis.bundle.residuals, ends_of_group | {"other": ends}
                ),
            )
            for m in judged
        ]
        at = np.concatenate(parts)
        ratio = ratios[quantity]
        return float(weight @ ((ratio >= at[:, 0]) & (ratio <= at[:, 1])) / weight.sum())

    def make(latency: float, power: float) -> ForecastEnds:
        return ForecastEnds(_pair(latency * _HALF_OTHER), rows, gpus, _pair(power * _HALF_OTHER))

    latency = _least_scale(lambda scale: share_inside("latency", make(scale, 1.0)))
    power = _least_scale(lambda scale: share_inside("power", make(latency, scale)))
    ends_of_group["other"] = make(latency, power)
    ends = _learn_convolution_ends(other_models, ends_of_group)
    return ends_of_group if ends is None else ends_of_group | {"conv2d": ends}


def _learn_convolution_ends(
    models: Sequence[ModelSet], ends: Mapping[str, ForecastEnds]
) -> ForecastEnds | None:
    """Learn the ends of convolutions from models that spend most of their time in them.

    Their forecast stands on one kind of kernel, where transformers have many whose errors cancel.
    Models that wait for the host say nothing of it. None where no such model was measured.
    """
    of_nets = [m.select_rows(_find_convolution_nets(m)) for m in models]
    of_nets = [m for m in of_nets if m.predictions]
    if not of_nets:
        return None
    ratio = np.concatenate([m.log_ratio("latency") for m in of_nets])
    power = ends["other"].power

    def share_inside(scale: float) -> float:
        convolution_ends = ForecastEnds(_pair(scale * _HALF_OTHER), 0, 0, power)
        parts = []
        for m in of_nets:
            parent = m.predictions[0].basis.bundle.residuals
            parts.append(
                m.ends("latency", forecast_residuals(parent, {**ends, "conv2d": convolution_ends}))
            )
        low, high = np.concatenate(parts).T
        return float(np.mean((low <= ratio) & (ratio <= high)))

    half = _least_scale(share_inside) * _HALF_OTHER
    return ForecastEnds(_pair(half), len(ratio), len({m.chip for m in of_nets}), power)


def _find_convolution_nets(models: ModelSet) -> list[int]:
    """Find the models that spend most of their time in convolutions and wait for no host."""
    nets = []
    for i, p in enumerate(models.predictions):
        timeline = p.basis.timeline
        seconds = timeline.calls * p.basis.detail.kernel_s
        mine = np.array([name == "conv2d" for name in timeline.kernels.family])
        busy_s = float(seconds.sum())
        if seconds[mine].sum() > 0.5 * busy_s and busy_s > _BUSY * float(p.latency_s):
            nets.append(i)
    return nets


_FP32 = "fp32"
_BUSY = 0.95  # of the latency: the host is ahead of the GPU


def learn_stretch(kernels: Sequence[KernelSet], without: str = "") -> float:
    """Learn the least k at which sets of a chip left out are 90 % inside on average.

    Ends of a kind of which n other chips have rows are stretched by 1 + k/n: a mean over more chips
    says more about the next one. ``without``: a chip whose sets are judged by the factor, and have
    no part in learning it."""
    judged = [k for k in kernels if k.chip not in ("", without)]
    if len({k.chip for k in judged}) < 2:
        return 0.0

    def mean_inside(stretch: float) -> float:
        shares = []
        for chip in sorted({k.chip for k in judged}):
            ends = _group_ends([k for k in judged if k.chip != chip], stretch) | _OTHER_KINDS
            for some in (k for k in judged if k.chip == chip):
                residuals = forecast_residuals(some.bundle.residuals, ends)
                low, high = some.make_ends(replace(some.bundle, residuals=residuals), {})[:, :2].T
                shares.append(
                    np.mean(
                        (low <= some.log_ratio["latency"]) & (some.log_ratio["latency"] <= high)
                    )
                )
        return float(np.mean(shares))

    return round(_least_scale(mean_inside, 0.01, 4.0), 2)


def learn_engine_ends(
    kernels: Sequence[KernelSet], half: bool | None = None
) -> dict[str, ForecastEnds]:
    """Learn the ends of an engine's kernels on a card that was measured from public tables of other
    versions.

    ``half`` takes the shapes whose hash says so; None takes all.
    """
    own_tables = [
        k
        for k in kernels
        if k.bundle.status is FitStatus.MEASURED and not k.name.endswith("sustained")
    ]
    columns = [
        (group, float(ratio))
        for k in own_tables
        for group, ratio, at in zip(k.group, k.log_ratio["latency"], k.half, strict=True)
        if ".engine." in group and (half is None or at == half)
    ]
    ends_of_kind = {}
    for name in sorted({group for group, _ in columns}):
        ratio = np.array([value for group, value in columns if group == name])
        if ratio.size >= _LEAST_OF_GROUP:
            low, high = np.quantile(ratio, [0.05, 0.95])
            pair = round(float(np.exp(min(low, 0.0))), 3), round(float(np.exp(max(high, 0.0))), 3)
            ends_of_kind[name] = ForecastEnds(pair, int(ratio.size), 1)
    return ends_of_kind


def _least_scale(
    share: Callable[[float], float],
    low: float = 0.1,
    high: float = 6.0,
) -> float:
    """Find the least scale between two at which 90 % lie inside."""
    for _ in range(12):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if share(middle) >= LEVEL else (middle, high)
    return high


def _group_ends(kernels: Sequence[KernelSet], stretch: float) -> dict[str, ForecastEnds]:
    """Return the ends of products, and of each kind of an engine's kernels, from rows of chips that
    count alike.

    All products of engines have ends together, and so has their attention: for kinds that no chip
    has rows of. A kind that only one of several chips has takes the mean of its own and of these.
    """
    groups, chips, ratio = _collect_group_rows(kernels)
    half = _half_widths_of_groups(groups, chips, ratio)
    ends = {}
    for name in sorted(half):
        of_kind, rows, gpus = half[name]
        of_all, _, most = half.get(".".join(name.split(".")[:2]), half[name])
        shrunk = 0.5 * (of_kind + of_all) if gpus < 2 <= most else of_kind
        ends[name] = ForecastEnds(_pair((1.0 + stretch / gpus) * shrunk), rows, gpus)
    return ends


def _collect_group_rows(
    kernels: Sequence[KernelSet],
) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_], Array]:
    """Return group, chip and log-ratio of every row that the ends are learned from."""
    groups: list[str] = []
    chips: list[str] = []
    ratios: list[float] = []
    for kernel_set in kernels:
        log_ratio = kernel_set.log_ratio["latency"]
        for group, ratio, inside in zip(
            kernel_set.group, log_ratio, kernel_set.inside, strict=True
        ):
            if inside or ".engine." in group:
                groups.append(group)
                chips.append(kernel_set.chip)
                ratios.append(float(ratio))
    return np.array(groups), np.array(chips), np.array(ratios)


def _half_widths_of_groups(
    groups: npt.NDArray[np.str_],
    chips: npt.NDArray[np.str_],
    ratio: Array,
) -> dict[str, tuple[float, int, int]]:
    """Return half-width, rows and chips of each group with enough rows, every chip counting
    alike.
    """
    kinds = set(groups.tolist())
    members: dict[str, set[str]] = {}
    for group in kinds:
        for name in _names_of(group):
            members.setdefault(name, set()).add(group)
    half = {}
    for name, groups_of_name in members.items():
        meant = {name} if name in kinds else groups_of_name
        at = np.isin(groups, list(meant))
        widths = []
        rows = 0
        for chip in np.unique(chips):
            chip_errors = np.abs(ratio[at & (chips == chip)])
            if chip_errors.size >= _LEAST_OF_GROUP:
                widths.append(np.quantile(chip_errors, LEVEL))
                rows += chip_errors.size
        if widths:
            half[name] = float(np.mean(widths)), rows, len(widths)
    return half


@cache
def _names_of(group: str) -> tuple[str, ...]:
    """Return the names under which ``find_ends_name`` looks for a kind of kernel."""
    parts = group.split(".")
    if "engine" not in parts:
        return (parts[0],)
    return tuple(".".join(parts[:count]) for count in range(len(parts), 1, -1))


def _pair(half: float) -> tuple[float, float]:
    """Return low and high end of a half-width in logs."""
    return round(float(np.exp(-half)), 3), round(float(np.exp(half)), 3)
