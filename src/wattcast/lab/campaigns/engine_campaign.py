"""Run ``measure engine``: plan models, steps and traffic, and measure each model in a process of
its own.

The split was written before anything was measured: a model with ``held_out`` is used neither for
fitting nor for choosing between models of the engine, only for judging. At least half of the models
are held out, one of every class (dense, experts, fp8, fp8 cache, latent attention, sliding window).
Loads in ``HELD_OUT_LOADS`` are held out for all.

A process per model (``engine_session``) frees its GPU memory at its end, and a failed start costs
only itself. The process of the next model loads its libraries while the current one starts, then
waits for its turn.

Files in the output folder: ``rows.jsonl`` (an engine, idle, step or traffic row a line),
``kernels.jsonl`` (names of the kernels of
a step), ``requests.jsonl`` (a request a line), ``steps.jsonl`` and ``power.jsonl`` (a serving run a
line, as columns), ``runs.jsonl`` (card and libraries) and ``engine.log`` (the engine's own
output)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import (
    asdict,
    dataclass,
    field,
    replace,
)
from pathlib import Path
from typing import Any

from wattcast.core import (
    bad_value,
    check_names,
    clip_text,
)
from wattcast.core.regular_files import open_regular
from wattcast.core.row_journals import Journal, read_lines
from wattcast.lab.campaigns.engine_load import LoadPoint
from wattcast.lab.campaigns.length_distribution import LengthDistribution
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import say

PARTS = ("steps", "traffic", "sampling", "long", "brief", "load")  # or the name of a load
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "repetition")  # of a step point
ENVIRONMENT = {  # before vllm is imported
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # DeepGEMM would compile hundreds of shapes; the session meets the planned ones before it
    # measures
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
MODELS_FILE = Path(__file__).with_name("engine_models.jsonl")
SMOKE_MODEL = "smoke"
MAX_SEQS = 256  # requests that run at once
# tokens of one step: what vLLM's server takes by itself on GPUs of this size
MAX_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 20480
MEMORY_SHARE = 0.9  # of the card, for all engines that run at once
GIB = 2**30
HELD_OUT_LOADS = (0.5,)  # shares of the capacity whose serving runs are kept for judging


@dataclass(frozen=True)
class EngineModel:
    """One model as the engine is started with it."""

    name: str
    config: Mapping[str, Any]  # of config.json
    source: str = ""
    held_out: bool = False
    why: str = ""
    quantization: str = ""  # of weights and products; empty: as the configuration says
    kv_dtype: str = "auto"
    start_s: float = 80.0  # time the start is expected to take
    longest_tokens: int = MAX_MODEL_LEN  # of a sequence, as far as the model allows
    adapters: int = 0  # LoRA adapters that requests take in turn; 0: none
    adapter_rank: int = 16
    # attributes of the configuration as this engine reads them, where transformers renames them
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cache_gib: float = 0.0  # room for keys and values beside other engines; 0: the request's
    parts: tuple[str, ...] = ()  # measured of this model; empty: those of the request

    @property
    def is_quantized(self) -> bool:
        """Tell whether the engine is to keep narrow weights."""
        return bool(self.quantization or self.config.get("quantization_config"))

    @property
    def max_model_len(self) -> int:
        """Longest sequence the engine is started for."""
        most_positions = int(self.config.get("max_position_embeddings", self.longest_tokens))
        return min(most_positions, self.longest_tokens)


@dataclass(frozen=True)
class StepPoint:
    """One kind of step: ``batch`` requests that decode, and ``prompts`` new prompts in every
    step.
    """

    batch: int = 0
    context: int = 0  # tokens in the cache of each decoding request when the measurement begins
    prompts: int = 0
    prompt_tokens: int = 0  # of each new prompt; a prompt longer than a step is computed in chunks
    temperature: float = 0.0
    top_k: int = 0  # of so many words; 0: of all
    top_p: float = 0.0  # of words that make up so much of the probability; 0: of all
    repetition: float = 0.0  # penalty of words that were there; 0: none
    why: str = ""

    def __post_init__(self) -> None:
        if (self.batch > 0) != (self.context > 0) or (self.prompts > 0) != (self.prompt_tokens > 0):
            raise bad_value(
                "a step point", "a context for a batch and a length for prompts", self.id
            )
        if self.batch == 0 and self.prompts == 0:
            raise bad_value("a step point", "requests that decode, or prompts", "neither")

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        if self.batch and self.prompts:
            return "mixed"
        return "decode" if self.batch else "prefill"

    @property
    def id(self) -> str:
        """The same in every run, so that a campaign can be continued."""
        decode = f"b{self.batch}-c{self.context}" if self.batch else ""
        prompt = f"p{self.prompts}x{self.prompt_tokens}" if self.prompts else ""
        warm = f"t{self.temperature:g}" if self.temperature else ""
        top_k = f"k{self.top_k}" if self.top_k else ""
        top_p = f"n{self.top_p:g}" if self.top_p else ""
        repetition = f"r{self.repetition:g}" if self.repetition else ""
        parts = (self.kind, decode, prompt, warm, top_k, top_p, repetition)
        return "-".join(part for part in parts if part)

    @property
    def sampling(self) -> dict[str, float]:
        """Return how tokens are chosen, as the engine takes it."""
        chosen: dict[str, float] = {"temperature": self.temperature}
        if self.top_k:
            chosen["top_k"] = self.top_k
        if self.top_p:
            chosen["top_p"] = self.top_p
        if self.repetition:
            chosen["repetition_penalty"] = self.repetition
        return chosen

    def fits(
        self,
        cache_tokens: int,
        max_seqs: int,
        max_model_len: int,
    ) -> bool:
        """Tell whether an engine has room for this point with some hundred more tokens for each
        request.
        """
        growth = 512
        room = (
            self.batch * (self.context + growth) + 3 * self.prompts * self.prompt_tokens
            <= 0.95 * cache_tokens
        )
        longest = max(self.context + growth, self.prompt_tokens + 1)
        return room and self.batch + 3 * self.prompts <= max_seqs + 3 and longest <= max_model_len


TRAFFIC_PROMPT = LengthDistribution(512.0, 0.8, 16, 4096)
TRAFFIC_OUTPUT = LengthDistribution(96.0, 0.6, 8, 384)


@dataclass(frozen=True)
class TrafficPoint:
    """Poisson arrivals at ``load`` times the capacity of the engine, for ``duration_s``."""

    load: float
    duration_s: float = 12.0
    seed: int = 1
    prompt: LengthDistribution = TRAFFIC_PROMPT
    output: LengthDistribution = TRAFFIC_OUTPUT
    why: str = ""

    @property
    def id(self) -> str:
        """The same in every run, so that a campaign can be continued."""
        return f"traffic-{self.load:g}-{self.duration_s:g}s-s{self.seed}"

    @property
    def kind(self) -> str:
        """``traffic``, as rows are called."""
        return "traffic"


Point = StepPoint | TrafficPoint | LoadPoint


def read_points(plan: str) -> list[dict[str, Any]]:
    """Read one plan of ``engine_points.jsonl``, the most valuable point first: a budget may end
    anywhere.
    """
    lines = read_lines(MODELS_FILE.with_name("engine_points.jsonl"))
    return [line for line in lines if line.pop("plan") == plan]


PROFILED_POINTS = (  # whose kernels are named, once a model
    StepPoint(batch=16, context=1024),
    StepPoint(prompts=1, prompt_tokens=2048),
)
STEP_POINTS = tuple(StepPoint(**point) for point in read_points("steps"))
LOAD_POINTS = {point["shape"]: LoadPoint.from_plain(point) for point in read_points("load")}
BRIEF_STEPS = 8  # of ``STEP_POINTS``, before loads: they tell the capacity


def read_own_model(
    folder: Path,
    quantization: str = "",
    kv_dtype: str = "auto",
) -> EngineModel:
    """Read a user's model from a folder with a ``config.json``."""
    path = folder / "config.json"
    try:
        with open_regular(path) as stream:
            config = dict(json.loads(stream.read()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise bad_value(
            "--own", "a folder with a config.json", f"{folder} ({clip_text(error)})"
        ) from None
    return EngineModel(
        folder.name,
        config,
        str(path),
        quantization=quantization,
        kv_dtype=kv_dtype,
        start_s=120.0,
    )


def choose_models(names: tuple[str, ...] = ()) -> list[EngineModel]:
    """Return the models called ``names`` in that order, or all planned ones.

    A name may say what is measured of the model: ``olmo-3-7b:brief+talk``.
    """
    planned = {line["name"]: EngineModel(**line) for line in read_lines(MODELS_FILE)}
    if not names:
        return [model for name, model in planned.items() if name != SMOKE_MODEL]
    chosen = []
    for entry in names:
        name, _, parts = entry.partition(":")
        check_names("planned model", (name,), planned, f"Planned: {', '.join(planned)}.")
        model_parts = tuple(part for part in parts.split("+") if part)
        check_names("part", model_parts, (*PARTS, *LOAD_POINTS))
        chosen.append(replace(planned[name], parts=model_parts))
    return chosen


@dataclass(frozen=True)
class EngineRequest:
    """What one call of ``measure engine`` is to do."""

    out: Path
    budget_s: float
    models: tuple[EngineModel, ...]
    parts: tuple[str, ...] = ("steps", "traffic")
    done: Path | None = None  # folder of an earlier call whose rows are not measured again
    traffic_s: float = 12.0
    loads: tuple[float, ...] = (0.8, 0.5, 1.1)
    smoke: bool = False
    together: int = 1  # engines that start at the same time; they are measured one by one
    cache_gib: float = 16.0  # room for keys and values of an engine that shares the card

    def __post_init__(self) -> None:
        check_names("part", self.parts, (*PARTS, *LOAD_POINTS))
        if self.together < 1 or self.cache_gib <= 0.0:
            raise bad_value("--together", "at least 1 engine, each with a cache", self.together)
        if not self.loads or min(self.loads) <= 0.0:
            raise bad_value("--loads", "shares of the capacity above 0", str(self.loads))

    def list_points(self, model: EngineModel) -> tuple[Point, ...]:
        """List what is measured of a model: steps first, which tell the capacity, then loads."""
        if self.smoke:
            steps = [StepPoint(**p) for p in read_points("smoke")]
            serves = [TrafficPoint(0.5, 3.0, why="smoke")]
        else:
            why = {point["load"]: point["why"] for point in read_points("traffic")}
            serves = [
                TrafficPoint(load, self.traffic_s, why=why.get(load, "asked for"))
                for load in self.loads
            ]
            steps = list(STEP_POINTS)
        parts = model.parts or self.parts
        by_part: dict[str, Sequence[Point]] = {
            "steps": steps,
            "brief": steps[:BRIEF_STEPS],
            "sampling": [StepPoint(**point) for point in read_points("sampling")],
            "long": [StepPoint(**point) for point in read_points("long")],
            "traffic": serves,
            "load": list(LOAD_POINTS.values()),
        }
        by_part |= {name: [point] for name, point in LOAD_POINTS.items()}
        points: list[Point] = []
        for part, part_points in by_part.items():
            if part in parts:
                points += part_points
        return tuple(dict.fromkeys(points))

    def caches_prefixes(self, model: EngineModel) -> bool:
        """Tell whether the engine keeps prefixes: loads are measured as servers run."""
        return any(isinstance(point, LoadPoint) for point in self.list_points(model))

    def plain(self, model: EngineModel) -> dict[str, Any]:
        """Return what the process of a model must know, ready for JSON."""
        return asdict(replace(self, models=(model,))) | {
            "out": str(self.out),
            "done": self.done and str(self.done),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> EngineRequest:
        """Build the request that ``plain`` returned."""
        paths = {"out": Path(plain["out"]), "done": Path(plain["done"]) if plain["done"] else None}
        models = tuple(
            EngineModel(**model | {"parts": tuple(model["parts"])}) for model in plain["models"]
        )
        return cls(**plain | paths | {"models": models})

    def done_ids(self) -> set[str]:
        """Return the ids of rows that are on file, here or in the folder of an earlier call."""
        folders = [self.out, *([self.done] if self.done else [])]
        return set().union(*(Journal(folder / "rows.jsonl").ids for folder in folders))

    def missing_ids(self, model: EngineModel) -> list[str]:
        """Return the ids of planned rows of ``model`` that are not on file; rows without room are
        on file.
        """
        done = self.done_ids()
        points = self.list_points(model)
        return [name for point in points if (name := engine_row_id(model, point)) not in done]


def engine_row_id(model: EngineModel, point: Point) -> str:
    """Return an id that is the same in every run."""
    return f"{model.name}/{point.id}"


LEAST_WORK_S = 15.0  # below this time for rows, a model is not started
START_SHARE = 2.2  # of the expected start, after which an engine that has not started is given up


def run_engine_campaign(
    request: EngineRequest, launch: Callable[[EngineRequest, EngineModel], Any] | None = None
) -> Counter[str]:
    """Measure the models in order within the budget; return counts of what happened."""
    began_s = time.monotonic()
    counts = Counter[str]()
    request.out.mkdir(parents=True, exist_ok=True)
    start = launch or _launch_child
    waiting = [model for model in request.models if request.missing_ids(model)]
    counts["models on file"] = len(request.models) - len(waiting)
    deadline_s = began_s + request.budget_s
    if request.together > 1:
        for first in range(0, len(waiting), request.together):
            group = waiting[first : first + request.together]
            _run_group(
                request,
                group,
                start,
                deadline_s,
                counts,
            )
    else:
        _run_one_by_one(
            request,
            waiting,
            start,
            deadline_s,
            counts,
        )
    counts["seconds"] = round(time.monotonic() - began_s)
    return counts


def _run_one_by_one(
    request: EngineRequest,
    waiting: list[EngineModel],
    start: Callable[[EngineRequest, EngineModel], Any],
    deadline_s: float,
    counts: Counter[str],
) -> None:
    """Start and measure an engine, then the next one, whose libraries are loaded meanwhile."""
    ready: dict[str, Any] = {}
    try:
        for place, model in enumerate(waiting):
            left_s = deadline_s - time.monotonic()
            if left_s < model.start_s + LEAST_WORK_S:
                counts["models left for another call"] += 1
                continue
            child = ready.pop(model.name, None) or start(request, model)
            for later in waiting[place + 1 : place + 2]:
                if left_s > model.start_s + later.start_s + 3.0 * LEAST_WORK_S:
                    ready[later.name] = start(request, later)
            say(f"{model.name}: starting, {left_s:.0f} s left")
            _run_child(
                request,
                model,
                child,
                left_s,
                counts,
            )
    finally:
        for child in ready.values():
            _end_child(child)


def _run_group(
    request: EngineRequest,
    group: list[EngineModel],
    start: Callable[[EngineRequest, EngineModel], Any],
    deadline_s: float,
    counts: Counter[str],
) -> None:
    """Start several engines at once, which saves minutes, then measure one after another.

    An engine that is ready says so by a file and waits: nothing else works while one is measured.
    """
    left_s = deadline_s - time.monotonic()
    slowest_start_s = max(model.start_s for model in group)
    if left_s < slowest_start_s + LEAST_WORK_S * len(group):
        counts["models left for another call"] += len(group)
        return
    say(f"{', '.join(model.name for model in group)}: starting, {left_s:.0f} s left")
    children = {model.name: start(request, model) for model in group}
    try:
        for child in children.values():
            _send_line(child, left_s)
        give_up_s = time.monotonic() + START_SHARE * slowest_start_s + LEAST_WORK_S
        ready = []
        for model in group:
            _wait_until_ready(request, model, children[model.name], min(give_up_s, deadline_s))
        for model in group:
            if ready_path(request, model).exists():
                ready.append(model)
            else:
                # It must not work while others are measured: one that did drew 400 W beside them.
                _end_child(children[model.name])
                _report_failure(
                    request,
                    model,
                    "did not become ready",
                    0,
                    counts,
                )
        for number, model in enumerate(ready):
            # What is left is shared evenly by the engines whose turn is still to come.
            turn_s = (deadline_s - time.monotonic()) / (len(ready) - number)
            _run_child(
                request,
                model,
                children[model.name],
                turn_s,
                counts,
            )
    finally:
        for child in children.values():
            _end_child(child)


def ready_path(request: EngineRequest, model: EngineModel) -> Path:
    """Return the file by which an engine of a group says that it waits for its turn."""
    return request.out / f"ready-{model.name}"


def _wait_until_ready(
    request: EngineRequest,
    model: EngineModel,
    child: Any,
    give_up_s: float,
) -> None:
    """Wait until an engine is ready, has ended, or the time is over."""
    while not ready_path(request, model).exists():
        if child.poll() is not None or time.monotonic() > give_up_s:
            return
        time.sleep(0.1)


def _send_line(child: Any, seconds: float) -> None:
    """Tell a child how many seconds it has; one that has ended is found out later."""
    with suppress(OSError):
        child.stdin.write(f"{seconds}\n")
        child.stdin.flush()


def _run_child(
    request: EngineRequest,
    model: EngineModel,
    child: Any,
    left_s: float,
    counts: Counter[str],
) -> None:
    """Give a waiting process its turn, and end it when the budget is spent."""
    rows = Journal(request.out / "rows.jsonl")
    before = len(rows.ids)
    started_s = time.monotonic()
    code = None
    reason = "ended with the budget"
    try:
        child.stdin.write(f"{left_s}\n")
        child.stdin.flush()
        code = child.wait(min(START_SHARE * model.start_s + LEAST_WORK_S, left_s))
    except subprocess.TimeoutExpired:
        if len(Journal(rows.path).ids) > before:  # it runs: its engine's row is there
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(max(left_s - (time.monotonic() - started_s), 1.0))
        else:
            reason = (
                f"did not start in {START_SHARE * model.start_s + LEAST_WORK_S:.0f} s, "
                "or in the budget"
            )
    except OSError:
        code = child.wait(5.0)
    _end_child(child)
    new_rows = len(Journal(rows.path).ids) - before
    counts["rows"] += new_rows
    if code == 0:
        counts["models"] += 1
        return
    reason = reason if code is None else f"ended with code {code}"
    _report_failure(
        request,
        model,
        reason,
        new_rows,
        counts,
    )


def _report_failure(
    request: EngineRequest,
    model: EngineModel,
    reason: str,
    new_rows: int,
    counts: Counter[str],
) -> None:
    """Save and print why a model was broken off, with the end of the engine's own output."""
    log = request.out / "engine.log"
    text = ""
    if log.exists():
        text = log.read_bytes()[-20_000:].decode(errors="replace").replace("\r", "\n")
    tail = [line[:300] for line in text.splitlines() if line.strip()][-25:]
    counts["models broken off"] += 1
    error = f"{reason}; {' | '.join(tail[-6:])}"[:2000]
    failed = {
        "id": f"{model.name}/failed",
        "kind": "failed",
        "model": model.name,
    }
    Journal(request.out / "rows.jsonl").append(failed | {"rows": new_rows, "error": error})
    say(f"{model.name}: {reason}\n" + "\n".join(tail))


def _launch_child(request: EngineRequest, model: EngineModel) -> subprocess.Popen[str]:
    """Start a process that loads its libraries and then waits for a line with its time."""
    with (request.out / "engine.log").open("a", encoding="utf-8") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "wattcast.lab.campaigns.engine_session",
                json.dumps(request.plain(model)),
            ],
            env=ENVIRONMENT | make_child_environment() | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def _end_child(child: Any) -> None:
    """End a process and those it started; one that waits for its turn ends when its input does."""
    with suppress(OSError):
        child.stdin.close()
    if child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.5)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(10.0)


@dataclass(frozen=True)
class EngineCampaignOptions:
    """The options of the command line, as they are written there."""

    out: Path
    seconds: float = 540.0
    models: str = ""
    parts: str = "steps,traffic"
    loads: str = "0.8,0.5,1.1"
    traffic_seconds: float = 12.0
    done: Path | None = None
    own: Path | None = None
    quantization: str = ""
    kv_dtype: str = "auto"
    smoke: bool = False
    together: int = 1
    cache_gib: float = 16.0

    def to_request(self) -> EngineRequest:
        """Check the options and return them as one request."""
        if self.own is not None:
            chosen = [read_own_model(self.own, self.quantization, self.kv_dtype)]
        elif self.smoke:
            chosen = choose_models((SMOKE_MODEL,))
        else:
            chosen = choose_models(tuple(name for name in self.models.split(",") if name))
        try:
            shares = tuple(float(load) for load in self.loads.split(",") if load)
        except ValueError:
            raise bad_value("--loads", "numbers with commas between", self.loads) from None
        return EngineRequest(
            self.out,
            self.seconds,
            tuple(chosen),
            tuple(part for part in self.parts.split(",") if part),
            self.done,
            self.traffic_seconds,
            shares,
            self.smoke,
            self.together,
            self.cache_gib,
        )


def describe_row(row: dict[str, Any]) -> str:
    """Describe a row in a short line."""
    if row.get("error") or row.get("skipped"):
        return f"{row['id']}: {row.get('error') or row.get('skipped')}"[:300]
    if row["kind"] in ("traffic", "load"):
        ttft = row["ttft_s"].get("p50", 0.0)
        tpot = row["tpot_s"].get("p50", 0.0)
        latencies = (
            f"{row['finished'] / row['length_s']:.2f}/s, TTFT {1e3 * ttft:.1f} ms, "
            f"TPOT {1e3 * tpot:.2f} ms"
        )
        return (
            f"{row['id']}: {latencies}, {row['output_tokens_per_s']:.0f} tokens/s, "
            f"{row.get('power_w', 0.0):.1f} W"
        )
    if row["kind"] == "engine":
        return (
            f"{row['id']}: started in {row['start_s']:.1f} s, cache of {row['cache_tokens']} tokens"
        )
    if row["kind"] == "idle":
        return f"{row['id']}: {row['power_w']:.1f} W"
    times = f"{1e3 * row['latency_s']:.3f} ms, device {1e3 * row.get('device_s', 0.0):.3f}"
    host = f"host {1e3 * row['host_s']:.3f}, {row['power_w']:.1f} W"
    return f"{row['id']}: {times}, {host} {' '.join(row.get('flags', []))}".rstrip()
