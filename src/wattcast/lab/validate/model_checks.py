"""Ledger rows of whole models and of serving, test sets that nothing was fitted on.

GPU-bound rows of whole models were captured in CUDA graphs; rows launched by the host are counted
apart. Power has two further baselines: the cap for every row, and min(P, cap) with P our own power
at the top clock, which is what a model without a governor would say.

Serving is compared with measurements of vLLM: single steps, by ``predict``, and requests under
arrivals, by ``simulate``. Fitting models and held-out ones are reported apart, and so are held-out
loads: nothing of the simulator was fitted or chosen on what is marked ``held_out`` or
``held_out_load`` in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate import whole_models
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_absent_row,
    make_ledger_row,
    mean_percent_error,
    score_row,
)
from wattcast.calibrate.whole_models import ModelCase, fit_host_cost
from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import database_folder
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import (
    REQUESTS_FILE,
    EngineRecords,
    load_engine_records,
)
from wattcast.lab.validate.engine_commands import (
    ASKED_KINDS,
    ask_engine_row,
    is_held_out,
    select_judged_rows,
)
from wattcast.lab.validate.kernel_checks import five_number_floor
from wattcast.lab.validate.typed_commands import (
    JudgedRow,
    TypedCommand,
    answer_commands,
    judge_rows,
)
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import total_at_clock
from wattcast.serving.arrivals import Trace, make_trace
from wattcast.serving.cache_size import CacheSetting
from wattcast.serving.governed_steps import predict_steady_step
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs

_LATENCY_GOALS = {
    "TPOT p50": (6.0, 3.0),
    "TPOT p99": (12.0, 6.0),
    "TTFT p50": (12.0, 6.0),
    "TTFT p99": (25.0, 12.0),
}
GOALS: dict[str, dict[str, tuple[float, float]]] = {  # of rows of a kind: must, aim in percent
    "decode": {
        "latency": (3.5, 2.0),
        "power": (3.0, 2.0),
        "energy": (4.0, 2.5),
    },
    "prefill": {
        "latency": (6.0, 2.0),
        "power": (3.0, 2.0),
        "energy": (6.0, 2.5),
    },
    "mixed": {},
    "traffic": {
        **_LATENCY_GOALS,
        "throughput": (4.0, 2.0),
        "power": (4.0, 2.5),
        "energy per token": (5.0, 3.0),
    },
}


@dataclass(frozen=True)
class FurtherSteps:
    """Steps of vLLM that were measured after the others and are judged as sets of their own."""

    folder: str  # of the GPU's database
    sides: Mapping[bool, str]  # names of the sets: of fitting models, and of held-out ones (True)
    goals: Mapping[str, Mapping[str, tuple[float, float]]]


FURTHER_STEPS = (
    FurtherSteps(
        "narrow",
        {
            False: "vLLM int4 and fp4 steps, fitting models",
            True: "vLLM int4 and fp4 steps, held-out models",
        },
        {
            "decode": {"latency": (6.0, 3.5)},
            "prefill": {"latency": (6.0, 3.0)},
            "mixed": {},
        },
    ),
    FurtherSteps(
        "variants",
        {
            False: "vLLM int8, block fp8, scans and long contexts, fitting models",
            True: "vLLM int4, block fp8 and long latent contexts, held-out models",
        },
        {
            "decode": GOALS["decode"],
            "prefill": GOALS["prefill"],
            "mixed": {},
        },
    ),
)


@dataclass(frozen=True)
class ComparedModels:
    """Measured and predicted values, one entry per case."""

    cases: tuple[ModelCase, ...]
    latency_s: Array
    power_w: Array
    clock_hz: Array
    predicted_s: Array
    predicted_w: Array
    predicted_hz: Array
    top_w: Array  # our own power at the top clock, uncapped
    graph: Mask
    capped: Mask

    @property
    def energy_j(self) -> Array:
        """Measured joules of one iteration."""
        return self.power_w * self.latency_s


MODEL_PLACES = {
    "latency": "latency_s",
    "power": "power_w",
    "energy": "energy_j",
    "clock": "clock_hz",
}
BOUND = "whole models, GPU-bound"
LAUNCHED = "whole models, launched by the host"


def ask_model_row(case: ModelCase, gpu: str) -> JudgedRow:
    """Return a measured whole model with the command that predicts it; a captured one waits for no
    host.
    """
    row = case.row
    options: dict[str, Any] = {
        "gpu": gpu,
        "phase": row.phase,
        "batch": row.batch,
    }
    more = {
        "seq": row.seq,
        "dtype": row.dtype,
        "attention": row.attention,
        "head": row.head,
        "stack": row.stack,
    }
    options |= {name: value for name, value in more.items() if value}
    if row.graph:
        options["host_launch"] = "0us"
    energy_j = None if row.power_w is None or row.latency_s is None else row.power_w * row.latency_s
    measured = {
        "latency": row.latency_s,
        "power": row.power_w,
        "energy": energy_j,
        "clock": row.sm_clock_hz,
    }
    return JudgedRow(
        f"{gpu} {BOUND if row.graph else LAUNCHED}",
        row.id,
        TypedCommand("predict", row.model, options),
        {
            quantity: np.nan if value is None else float(value)
            for quantity, value in measured.items()
        },
        MODEL_PLACES,
    )


def compare_models(
    cases: list[ModelCase],
    gpu: Gpu,
    bundle: Bundle,
) -> ComparedModels:
    """Predict every case as it was run, by its command; captured ones without a host."""
    top_hz = float(np.mean(gpu.clocks.max_hz))
    without_host = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    predictions = answer_commands([ask_model_row(case, gpu.name).command for case in cases])
    top_w = []
    for case, prediction in zip(cases, predictions, strict=True):
        used = without_host if case.row.graph else bundle
        at_top = OperatingPoint(clock_hz=top_hz)
        top_w.append(float(total_at_clock(prediction.basis.timeline, at_top, used).power_w))
    return ComparedModels(
        tuple(cases),
        whole_models.measured_column(cases, attrgetter("latency_s")),
        whole_models.measured_column(cases, attrgetter("power_w")),
        whole_models.measured_column(cases, attrgetter("sm_clock_hz")),
        np.array([prediction.latency_s for prediction in predictions]),
        np.array([prediction.power_w for prediction in predictions]),
        np.array([prediction.clock_hz for prediction in predictions]),
        np.array(top_w),
        np.array([case.row.graph for case in cases]),
        np.array([whole_models.was_capped(case.row, top_hz) for case in cases]),
    )


def model_rows(
    gpu: str,
    database: str | Path | None = None,
    bundle: Bundle | None = None,
) -> list[LedgerRow]:
    """Return the rows of a GPU's whole models, or one that says what is missing."""
    where = f"{gpu} whole models"
    try:
        cases = whole_models.load_models(database or gpu)
    except BadInput as error:
        return [
            make_absent_row(
                f"{where}, GPU-bound",
                "latency",
                str(error),
                must=11.0,
                aim=7.0,
            ),
            make_absent_row(
                f"{where}, GPU-bound",
                "power",
                str(error),
                must=4.5,
                aim=3.0,
            ),
        ]
    chip = hardware.load_gpu(gpu)
    bundle = bundle or bundle_for(chip)
    compared = compare_models(cases, chip, bundle)
    return _bound_rows(compared, f"{gpu} {BOUND}", chip) + _launched_rows(
        compared, f"{gpu} {LAUNCHED}", chip, bundle
    )


def _bound_rows(
    compared: ComparedModels,
    where: str,
    gpu: Gpu,
) -> list[LedgerRow]:
    """Return the errors of runs that the GPU bounds: by quantity, kind of run and clock."""
    bound = _BoundModels(compared, where, gpu)
    every = bound.is_bound
    capped = every & compared.capped
    free = every & ~compared.capped
    with_clock = every & np.isfinite(compared.clock_hz)
    rows = [bound.score_latency("latency", every, must=11.0, aim=7.0)]
    for name, mask in _list_kinds(compared).items():
        if mask.any():
            rows.append(bound.score_latency(f"latency, {name}", every & mask))
    rows += [
        bound.score_latency("latency, not capped", free),
        bound.score_latency("latency, capped", capped),
        bound.score_power("power", every, must=4.5, aim=3.0),
        bound.score_power("power, not capped", free),
        bound.score_power("power, capped", capped),
        bound.score_energy("energy", every),
        bound.score_clock("clock", with_clock),
    ]
    return rows


def _list_kinds(compared: ComparedModels) -> dict[str, Mask]:
    """Return the runs of each phase, each way of attention and each model."""
    rows = [case.row for case in compared.cases]
    kinds = {}
    for phase in dict.fromkeys(row.phase for row in rows):
        kinds[phase] = np.array([row.phase == phase for row in rows])
    for way in ("eager", "flash"):
        kinds[f"{way} attention"] = np.array([row.attention == way for row in rows])
    for model in dict.fromkeys(row.model for row in rows):
        kinds[model] = np.array([row.model == model for row in rows])
    return kinds


class _BoundModels:
    """Runs that the GPU bounds, with what five numbers of a data sheet would say of them."""

    def __init__(
        self,
        compared: ComparedModels,
        where: str,
        gpu: Gpu,
    ) -> None:
        count = len(compared.cases)
        self.compared = compared
        self.where = where
        self.limit_w = np.full(count, float(np.mean(gpu.power.limit_w)))
        self.top_hz = np.full(count, float(np.mean(gpu.clocks.max_hz)))
        self.is_bound = compared.graph & np.isfinite(compared.power_w)
        bound_cases = [compared.cases[place] for place in np.flatnonzero(self.is_bound)]
        self.floor_s = np.full(count, np.nan)
        self.floor_w = np.full(count, np.nan)
        floor_s, floor_w = five_number_floor(bound_cases, gpu)
        self.floor_s[self.is_bound] = floor_s
        self.floor_w[self.is_bound] = floor_w

    def score_latency(
        self,
        quantity: str,
        mask: Mask,
        **more: Any,
    ) -> LedgerRow:
        """Score the latency, with the median of predicted over measured."""
        predicted_s = self.compared.predicted_s
        measured_s = self.compared.latency_s
        if mask.any():
            median = float(np.median((predicted_s / measured_s)[mask]))
            more["median_ratio"] = round(median, 3)
        return self._score(
            quantity,
            mask,
            predicted_s,
            measured_s,
            self.floor_s,
            **more,
        )

    def score_power(
        self,
        quantity: str,
        mask: Mask,
        **more: Any,
    ) -> LedgerRow:
        """Score the power, with the errors of the power limit and of it as a cap."""
        measured_w = self.compared.power_w
        simple_models_w = {
            "min_of_P_and_cap": np.minimum(self.compared.top_w, self.limit_w),
            "the_cap": self.limit_w,
        }
        for name, simple_w in simple_models_w.items():
            error = mean_percent_error(simple_w[mask], measured_w[mask])
            more[name] = None if error is None else round(error, 2)
        predicted_w = self.compared.predicted_w
        return self._score(
            quantity,
            mask,
            predicted_w,
            measured_w,
            self.floor_w,
            **more,
        )

    def score_energy(
        self,
        quantity: str,
        mask: Mask,
    ) -> LedgerRow:
        """Score the energy."""
        predicted_j = self.compared.predicted_s * self.compared.predicted_w
        floor_j = self.floor_s * self.floor_w
        return self._score(
            quantity,
            mask,
            predicted_j,
            self.compared.energy_j,
            floor_j,
        )

    def score_clock(
        self,
        quantity: str,
        mask: Mask,
    ) -> LedgerRow:
        """Score the clock, against the top clock as the simple model."""
        predicted_hz = self.compared.predicted_hz
        return self._score(
            quantity,
            mask,
            predicted_hz,
            self.compared.clock_hz,
            self.top_hz,
        )

    def _score(
        self,
        quantity: str,
        mask: Mask,
        predicted: Array,
        measured: Array,
        floor: Array,
        **more: Any,
    ) -> LedgerRow:
        """Score the runs of a mask."""
        return score_row(
            self.where,
            quantity,
            predicted[mask],
            measured[mask],
            floor[mask],
            **more,
        )


def _launched_rows(
    compared: ComparedModels,
    where: str,
    gpu: Gpu,
    bundle: Bundle,
) -> list[LedgerRow]:
    """Return rows of host launches, with the default launch cost and with one fitted on the other
    models.
    """
    at = ~compared.graph
    cases = [compared.cases[i] for i in np.flatnonzero(at)]
    if not cases:
        return [make_absent_row(where, "latency", "no row was launched by the host")]
    host = fit_host_cost(cases, gpu, bundle)
    measured = np.array([r.latency_s for r in host.rows])
    left_out = np.array([r.left_out_s for r in host.rows])
    default = compared.predicted_s[at]
    host_us = [f"{r.host_s * 1e6:.1f}" for r in host.rows if r.host_s is not None]
    more: dict[str, Any] = {
        "host_us_per_operator": round(host.host_s * 1e6, 2),
        "rows_ask_for": " ".join(host_us),
    }
    return [
        score_row(
            where,
            "latency, launch cost from the other models",
            left_out,
            measured,
            default,
            **more,
        ),
        score_row(where, "latency, default launch cost", default, measured),
        score_row(
            where, "power, default launch cost", compared.predicted_w[at], compared.power_w[at]
        ),
    ]


@dataclass(frozen=True)
class ServingComparison:
    """One measured row beside its prediction: quantity -> (measured, predicted)."""

    id: str
    model: str
    kind: str
    held_out: bool
    values: dict[str, tuple[float, float]] = field(default_factory=dict)

    def error_percent(self, quantity: str) -> float:
        """Return how far the prediction is above the measurement."""
        measured, predicted = self.values[quantity]
        return 100.0 * (predicted / measured - 1.0)


def compare_serving(
    records: EngineRecords,
    gpu: Gpu,
    models: Sequence[str] | None = None,
    held_out: bool | None = None,
) -> list[ServingComparison]:
    """Predict every measured step and traffic run of some models; ``held_out`` keeps one side of
    the split.

    Steps and traffic are predicted by the commands of ``engine_commands``. Steps that decode and
    compute prompts at once have no command; the simulator's table of steps predicts them."""
    engines = {row["model"]: row for row in records.select_kind("engine")}
    rows = [row for row in select_judged_rows(records, *GOALS) if row["model"] in engines]
    rows = [row for row in rows if models is None or row["model"] in models]
    rows = [row for row in rows if held_out is None or is_held_out(row) == held_out]
    asked_rows = [row for row in rows if row["kind"] in ASKED_KINDS]
    judged = [
        ask_engine_row(
            row,
            engines[row["model"]],
            records,
            gpu.name,
            "",
        )
        for row in asked_rows
    ]
    comparisons = []
    for row, one, predicted in zip(asked_rows, judged, judge_rows(judged), strict=True):
        values = {
            quantity: (one.measured[quantity], value) for quantity, value in predicted.items()
        }
        comparisons.append(
            ServingComparison(
                row["id"],
                row["model"],
                row["kind"],
                is_held_out(row),
                values,
            )
        )
    costs: dict[str, StepCosts] = {}  # a table takes a second
    for row in (row for row in rows if row["kind"] not in ASKED_KINDS):
        engine = engines[row["model"]]
        if row["model"] not in costs:
            costs[row["model"]] = tabulate_engine(engine, gpu)
        settings = EngineSettings(int(engine["max_batched_tokens"]), int(engine["max_seqs"]))
        values = _compare_step(row, costs[row["model"]], settings)
        comparisons.append(
            ServingComparison(
                row["id"],
                row["model"],
                row["kind"],
                is_held_out(row),
                values,
            )
        )
    return comparisons


def tabulate_engine(
    engine: Plain,
    gpu: Gpu,
    served: Sequence[Trace] = (),
) -> StepCosts:
    """Tabulate the engine as it was started, for contexts all alike or uneven as in the traffic it
    ``served``.
    """
    context_spread = 0.0
    if served:
        context_spread = float(np.mean([trace.context_spread for trace in served]))
    steps = StepRange(
        max_tokens=int(engine["max_batched_tokens"]),
        max_seqs=int(engine["max_seqs"]),
        longest_context=int(engine["max_model_len"]),
        context_spread=context_spread,
    )
    return tabulate_step_costs(
        load_measured_model(engine["model"]),
        gpu,
        read_engine_options(engine),
        steps,
        cache_setting=CacheSetting(prefix_caching=bool(engine.get("prefix_caching"))),
    )


def _compare_step(
    row: Plain,
    costs: StepCosts,
    settings: EngineSettings,
) -> dict[str, tuple[float, float]]:
    """Predict a repeated step of prompts and sequences that decode; a longer prompt is the mean
    over its chunks.
    """
    batch = int(row["batch"])
    context = float(row["context_mean"])
    prompts = int(row["prompts"] or 0)
    tokens = int(row["prompt_tokens"] or 0)
    room = settings.max_batched_tokens - batch
    if prompts and prompts * tokens > room:
        parts = [[(min(room, tokens - before), before)] for before in range(0, tokens, room)]
    else:
        parts = [[(tokens, 0)] * prompts]
    steps = [
        predict_steady_step(
            costs,
            batch,
            context,
            chunks,
            prompts / len(parts),
        )
        for chunks in parts
    ]
    latency_s, energy_j = (float(np.mean([step[place] for step in steps])) for place in (0, 1))
    return {
        "latency": (row["latency_s"], latency_s),
        "power": (row["power_w"], energy_j / latency_s),
        "energy": (row["energy_j"], energy_j),
    }


def trace_of(row: Plain, records: EngineRecords) -> Trace:
    """Return the requests of a traffic run as they were sent."""
    requests = records.requests_of(row["id"])
    arrival_s, prompt, output = (
        [request[name] for request in requests]
        for name in ("arrival_s", "prompt_tokens", "output_tokens")
    )
    return make_trace(arrival_s, prompt, output, name=row["id"])


def serving_rows(gpu: str, database: str | Path | None = None) -> list[LedgerRow]:
    """Return ledger rows of single steps and of traffic, fitting models and held-out ones apart."""
    try:
        records = load_engine_records(database or gpu)
    except WattcastError as error:  # no such database, or one without engines
        return [make_absent_row(f"{gpu} engine", "all", f"{REQUESTS_FILE}: {error}")]
    comparisons = compare_serving(records, hardware.load_gpu(gpu))
    rows = make_serving_rows(
        gpu, comparisons, {False: "fitting models", True: "held-out models and loads"}
    )
    rows += make_serving_rows(
        gpu, compare_known_boards(records, gpu), {True: "held-out models, board told"}
    )
    return rows + make_further_rows(gpu, database)


def make_further_rows(gpu: str, database: str | Path | None = None) -> list[LedgerRow]:
    """Return ledger rows of steps that were measured later, each asked of its card's board."""
    rows: list[LedgerRow] = []
    if database is not None:
        return rows
    for steps in FURTHER_STEPS:
        compared = compare_known_boards(load_further_records(gpu, steps), gpu, held_out=None)
        rows += make_serving_rows(gpu, compared, steps.sides, steps.goals)
    return rows


def load_further_records(gpu: str, steps: FurtherSteps) -> EngineRecords:
    """Read the rows of steps that were measured later."""
    return load_engine_records(database_folder(gpu) / steps.folder)


def compare_known_boards(
    records: EngineRecords,
    gpu: str,
    held_out: bool | None = True,
) -> list[ServingComparison]:
    """Predict steps on cards whose board was read, each with its board as the GPU.

    Without ``held_out`` both sides of the split are predicted.
    """
    comparisons = []
    for name, part_number in list_boards(gpu).items():
        board_rows = [
            row
            for row in records.rows
            if row["kind"] != "traffic" and row.get("card_board") == part_number
        ]
        comparisons += compare_serving(
            replace(records, rows=tuple(board_rows)), hardware.load_gpu(name), held_out=held_out
        )
    return comparisons


def make_serving_rows(
    gpu: str,
    comparisons: Sequence[ServingComparison],
    labels: Mapping[bool, str],
    goals_by_kind: Mapping[str, Mapping[str, tuple[float, float]]] = GOALS,
) -> list[LedgerRow]:
    """Return the mean absolute error of each quantity by kind of row and side of the split, which
    has a label.
    """
    rows: list[LedgerRow] = []
    for side, label in labels.items():
        for kind, goals in goals_by_kind.items():
            same = [one for one in comparisons if one.kind == kind and one.held_out == side]
            for quantity in same[0].values if same else ():
                mape = float(np.mean([abs(one.error_percent(quantity)) for one in same]))
                must, aim = goals.get(quantity, (None, None)) if side else (None, None)
                where = f"{gpu} engine {kind}, {label}"
                rows.append(
                    make_ledger_row(
                        where,
                        quantity,
                        len(same),
                        mape,
                        must=must,
                        aim=aim,
                    )
                )
    return rows
