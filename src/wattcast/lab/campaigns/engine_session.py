"""Measure one engine in its own process: step rows, then serving under arrivals, each saved when it
is done.

Arrivals are Poisson and open-loop: a request is given to the engine at the first step after its
arrival, and its latency counts from the arrival. Every request, every step and power over time are
kept, so that a simulation can be given the same requests. A row on file is skipped; a row that
fails is recorded with its error."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import (
    asdict,
    dataclass,
    field,
)
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import (
    CannotWrite,
    WattcastError,
    bad_value,
)
from wattcast.core.row_journals import (
    Journal,
    append_rows,
    read_lines,
)
from wattcast.lab.campaigns import (
    engine_campaign,
    engine_steps,
    engine_weights,
    lora_adapters,
)
from wattcast.lab.campaigns.engine_campaign import StepPoint, TrafficPoint
from wattcast.lab.campaigns.engine_load import (
    LoadPoint,
    PlannedArrivals,
    RequestSource,
    ServedRequest,
    make_source,
)
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    format_now,
    make_run_name,
    make_torch_run_info,
    say,
)
from wattcast.measure.window_summary import summarise_window

DRAIN_S = 6.0  # after the last of other arrivals, then requests under way are given up
SPIN_S = 0.0003  # before an arrival, the last part of a wait is spent reading the clock
QUANTILES = (50, 90, 99)


def draw_arrivals(
    point: TrafficPoint,
    rate_per_s: float,
    max_model_len: int = 2**30,
) -> list[ServedRequest]:
    """Draw Poisson arrivals at ``rate_per_s``; a seed fixes the lengths, and the rate scales the
    pauses.

    Prompts are cut where prompt and output together would be longer than ``max_model_len``.
    """
    random = np.random.default_rng(point.seed)
    count = int(rate_per_s * point.duration_s * 1.5) + 50
    pauses = random.standard_exponential(count)
    prompt_tokens = point.prompt.draw(random, count)
    output_tokens = point.output.draw(random, count)
    prompt_tokens = np.minimum(prompt_tokens, max_model_len - output_tokens - 1)
    drawn = zip(
        (np.cumsum(pauses) / rate_per_s).tolist(),
        prompt_tokens.tolist(),
        output_tokens.tolist(),
        strict=True,
    )
    return [ServedRequest(*request) for request in drawn if request[0] < point.duration_s]


def estimate_capacity(rows: list[dict[str, Any]], point: TrafficPoint | LoadPoint) -> float | None:
    """Estimate the requests a second the engine can serve, from its step rows; None where they are
    missing.

    A request costs its prompt at the rate of a prefill step and its output at the rate of the
    largest decode batch: 1 / c = P t_prefill / n_prefill + O t_decode / B, with the mean lengths P
    and O."""
    prefills = []
    decodes = []
    for row in rows:
        if row.get("error") or not row.get("latency_s"):
            continue
        if row.get("kind") == "prefill" and row.get("prompt_tokens_per_step"):
            prefills.append(row)
        elif row.get("kind") == "decode" and row.get("batch"):
            decodes.append(row)
    if not prefills or not decodes:
        return None
    prefill = min(prefills, key=lambda row: abs(row["prompt_tokens_per_step"] - 2048))
    decode = min(decodes, key=lambda row: (-row["batch"], abs(row["context"] - point.prompt.mean)))
    prompt_s: float = point.prompt.mean * prefill["latency_s"] / prefill["prompt_tokens_per_step"]
    output_s: float = point.output.mean * decode["latency_s"] / decode["batch"]
    return 1.0 / (prompt_s + output_s)


def serve_source(
    bench: engine_steps.EngineBench,
    source: RequestSource,
    duration_s: float,
    drain_s: float = DRAIN_S,
) -> tuple[float, list[ServedRequest]]:
    """Run the requests of a source, and note in them how they went.

    Return the moment on the clock from which their times count, and the requests. What comes due
    after ``duration_s`` is not sent; requests under way have ``drain_s`` to end.
    """
    recorder = bench.recorder
    engine = recorder.engine
    clock = recorder.clock
    by_name: dict[str, ServedRequest] = {}
    served: list[ServedRequest] = []
    origin_s = clock() + 0.02
    while True:
        now_s = clock() - origin_s
        due = source.take_due(min(now_s, duration_s))
        for request in due:
            ids = request.ids or bench.prompt(request.prompt_tokens)
            name = f"q{origin_s:.6f}-{len(served)}"
            by_name[bench.add(ids, request.output_tokens, name=name)] = request
            request.added_s = clock() - origin_s
            served.append(request)
        if engine.has_unfinished_requests():
            _note_outputs(recorder.step(), by_name, source, clock() - origin_s)
        elif source.next_due_s() < duration_s:
            pause_s = origin_s + source.next_due_s() - clock()
            if pause_s > SPIN_S:
                bench.sleep(min(pause_s - SPIN_S, 0.05))
        else:
            break
        if now_s > duration_s + drain_s:
            break
    return origin_s, served


def _note_outputs(
    outputs: list[Any],
    by_name: dict[str, ServedRequest],
    source: RequestSource,
    now_s: float,
) -> None:
    """Note the tokens that a step handed out, and tell the source which requests ended."""
    for output in outputs:
        request = by_name.get(output.request_id)
        if request is None:
            continue
        token_ids = output.outputs[0].token_ids
        request.token_s.extend([now_s] * len(token_ids))
        request.made_ids.extend(token_ids)
        request.cached_tokens = getattr(output, "num_cached_tokens", None) or request.cached_tokens
        if output.finished and not request.finished:
            request.finished = True
            source.end_request(request, now_s)


def measure_traffic(
    bench: engine_steps.EngineBench,
    point: TrafficPoint,
    rate_per_s: float,
    run: str,
) -> ServedRun:
    """Measure one serving run under Poisson arrivals."""
    arrivals = draw_arrivals(point, rate_per_s, bench.max_model_len)
    served_run = measure_source(bench, PlannedArrivals(arrivals), point.duration_s, run)
    served_run.row["rate_per_s"] = rate_per_s
    return served_run


def _name_outcome(row: Mapping[str, Any], point: engine_campaign.Point) -> str:
    """Return the count that a row belongs to."""
    if "error" in row:
        return "failed"
    if "skipped" in row:
        return "no room"
    return "measured" if isinstance(point, StepPoint) else "served"


class ServedRun(NamedTuple):
    """A serving run: its summary, its requests, and its steps and power over time as columns."""

    row: dict[str, Any]
    requests: list[dict[str, Any]]
    steps: dict[str, Any]
    power: dict[str, Any]


def measure_source(
    bench: engine_steps.EngineBench,
    source: RequestSource,
    duration_s: float,
    run: str,
    drain_s: float = DRAIN_S,
) -> ServedRun:
    """Measure one serving run with the requests of a source."""
    recorder = bench.recorder
    recorder.clear()
    mark = bench.sampler.head
    bench.sleep(0.3)  # ticks of the idle engine before the first arrival
    origin_s, served = serve_source(bench, source, duration_s, drain_s)
    ended_s = recorder.clock()
    bench.synchronize()
    bench.sleep(0.25)  # the counter's next ticks
    bench.sampler.check()
    samples = bench.sampler.since(mark)
    table = recorder.table(origin_s)
    preemptions = recorder.preemptions
    bench.drain([f"q{origin_s:.6f}-{number}" for number in range(len(served))])
    row = summarise_requests(served, ended_s - origin_s)
    arrivals_end_s = min(origin_s + duration_s, ended_s)
    row |= _summarise_power(run, samples, (origin_s, arrivals_end_s, ended_s))
    row |= {"preemptions": preemptions, "steps": len(table["begin_s"])}
    energy_j = row.get("energy_j")
    output_tokens = row["output_tokens"]
    row["energy_j_per_token"] = energy_j / output_tokens if energy_j and output_tokens else None
    return ServedRun(
        row,
        [request.plain(run, number) for number, request in enumerate(served)],
        {"run": run} | {name: _round_column(values, name) for name, values in table.items()},
        {"run": run} | power_over_time(samples, origin_s),
    )


# Fields of a window that a serving run has of its own, or that say nothing of it
_DROPPED_FIELDS = (
    "name",
    "steady",
    "duration_s",
    "throttle",
    "flags",
    "doubts",
    "believed",
    "readings_j",
)


def _summarise_power(
    run: str,
    samples: EnergySamples,
    times_s: tuple[float, float, float],
) -> dict[str, Any]:
    """Return power, energy and flags of a run: from its origin to its end, and while requests
    arrive.
    """
    origin_s, arrivals_end_s, ended_s = times_s
    whole = summarise_window(run, samples, origin_s, ended_s)
    loaded = summarise_window(run, samples, origin_s, arrivals_end_s)
    fields = {name: value for name, value in whole.plain().items() if name not in _DROPPED_FIELDS}
    return fields | {
        "throttle": list(samples.throttle),
        "flags": list(dict.fromkeys([*loaded.flags, *whole.doubts])),
        "arrivals_power_w": loaded.power_w,
        "arrivals_energy_j": loaded.energy_j,
    }


def summarise_requests(served: list[ServedRequest], length_s: float) -> dict[str, Any]:
    """Return percentiles over requests that finished, and tokens over the whole run of
    ``length_s``.

    ``ttft_s`` runs from arrival to first token, ``tpot_s`` is the mean pause of a request after its
    first token, ``gap_s`` is each single pause, ``e2e_s`` from arrival to the last token."""
    done = [request for request in served if request.finished]
    output_tokens = sum(len(request.token_s) for request in served)
    ttft_s = [request.token_s[0] - request.arrival_s for request in done]
    several = [request.token_s for request in done if len(request.token_s) > 1]
    tpot_s = [(token_s[-1] - token_s[0]) / (len(token_s) - 1) for token_s in several]
    gap_s = np.concatenate([np.diff(request.token_s) for request in done]) if done else np.empty(0)
    return {
        "length_s": length_s,
        "requests": len(served),
        "finished": len(done),
        "prompt_tokens": sum(request.prompt_tokens for request in served),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / length_s,
        "ttft_s": compute_percentiles(ttft_s),
        "tpot_s": compute_percentiles(tpot_s),
        "gap_s": compute_percentiles(gap_s),
        "e2e_s": compute_percentiles([request.token_s[-1] - request.arrival_s for request in done]),
        "queued_s": compute_percentiles([request.added_s - request.arrival_s for request in done]),
    }


def compute_percentiles(values: npt.ArrayLike) -> dict[str, float]:
    """Return the mean and the 50th, 90th and 99th percentile, linear between values; nothing
    without values.

    >>> compute_percentiles([1.0, 2.0, 3.0])["p50"]
    2.0
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return {}
    percentiles = {f"p{q}": float(np.percentile(numbers, q)) for q in QUANTILES}
    return {"mean": float(numbers.mean()), **percentiles}


def power_over_time(samples: EnergySamples, origin_s: float) -> dict[str, list[float]]:
    """Return mean power between ticks of the energy counter, and the sensor's own readings every
    100 ms.
    """
    stepped = find_ticks(samples)
    series = {
        "tick_s": np.round(stepped.time_s[1:] - origin_s, 5).tolist(),
        "tick_w": np.round(stepped.interval_w, 3).tolist() if len(stepped.time_s) > 1 else [],
    }
    for column in ("instant_w", "sm_clock_hz", "memory_w", "temperature_c"):
        values = samples[column]
        time_s = samples["time_s"]
        readable = np.isfinite(values)
        values = values[readable]
        time_s = time_s[readable] - origin_s
        _, first = np.unique(np.floor(time_s / 0.1), return_index=True)
        series[f"{column}_at_s"] = np.round(time_s[first], 4).tolist()
        series[column] = np.round(values[first], 3).tolist()
    return series


def _round_column(values: engine_steps.Array, name: str) -> list[float | None]:
    """Round times to the microsecond, shares to four digits, counts to whole numbers; None where
    not known.
    """
    if name.endswith("_s"):
        return [round(float(value), 6) if np.isfinite(value) else None for value in values]
    if name == "cache_use":
        return [round(float(value), 4) for value in values]
    return [int(value) for value in values]


ROW_S = 4.5  # kept back for one more step row
TAIL_S = 3.0  # kept back after a run for what it saves
END_S = 4.0  # kept back for the end of the process, so that it is not ended from outside
# Triton compiles a kernel anew for counts of tokens that are odd, or multiples of 2, 4, 8 or 16
WARM_PROMPTS = (
    64,
    256,
    600,
    601,
    602,
    604,
    1024,
    1025,
    1026,
    1536,
    2048,
    2049,
    3072,
    3073,
    4096,
    4097,
    6144,
    6145,
)


def _needs_s(point: engine_campaign.Point) -> float:
    """Return the seconds that must be left for a row to be begun."""
    if isinstance(point, StepPoint):
        return ROW_S
    drain_s = point.drain_s if isinstance(point, LoadPoint) else DRAIN_S
    return point.duration_s + drain_s + TAIL_S


@dataclass
class EngineSession:
    """One engine that runs, where its rows go, and until when."""

    request: engine_campaign.EngineRequest
    model: engine_campaign.EngineModel
    bench: engine_steps.EngineBench
    deadline_s: float
    run: str
    cache_tokens: int
    max_seqs: int = engine_campaign.MAX_SEQS
    # how the engine's weights were filled, and whether it computes with them
    weights: engine_weights.WeightReport | None = None
    normal_weights: bool = False
    list_kernels: Callable[[StepPoint], list[dict[str, Any]]] | None = None
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.done = self.request.done_ids()
        self.rows = Journal(self.request.out / "rows.jsonl")

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - self.clock()

    def measure_all(self) -> Counter[str]:
        """Measure every planned row that is not on file and for which there is time.

        Nothing is measured of an engine whose weights could not be filled."""
        if self.weights is not None:
            self.normal_weights = self.weights.filled > 0
            if self.weights.fault:
                name = f"{self.model.name}/refused-{self.run}"
                self.append(name, "refused", error=self.weights.fault)
                say(f"{self.model.name}: no row is measured: {self.weights.fault}")
                self.counts["models refused"] += 1
                return self.counts
        for point in self.request.list_points(self.model):
            name = engine_campaign.engine_row_id(self.model, point)
            if name in self.done:
                self.counts["on file"] += 1
            elif self.left_s < _needs_s(point):
                self.counts["left for another call"] += 1
            else:
                self._measure(name, point)
        self._list_kernels()
        return self.counts

    def _list_kernels(self) -> None:
        """Save the names of the kernels of a decode step and of a prompt, where there is time."""
        for point in engine_campaign.PROFILED_POINTS:
            if self.list_kernels is None or self.left_s < ROW_S:
                return
            name = f"{self.model.name}/kernels-{point.id}"
            try:
                kernels = self.list_kernels(point)
            except Exception as error:
                say(f"  {name}: {type(error).__name__}: {error}"[:300])
                continue
            line = {
                "id": name,
                "model": self.model.name,
                "run": self.run,
                "kernels": kernels,
            }
            append_rows(self.request.out / "kernels.jsonl", [line])

    def append(
        self,
        name: str,
        kind: str,
        **values: Any,
    ) -> dict[str, Any]:
        """Save one row with what all rows say, and return it."""
        model = self.model
        shared = {
            "id": name,
            "kind": kind,
            "model": model.name,
            "held_out": model.held_out,
            "quantization": model.quantization or "none",
            "kv_dtype": model.kv_dtype,
            "normal_weights": self.normal_weights,
            "run": self.run,
            "date": format_now(),
        }
        self.rows.append(shared | values)
        return shared | values

    def _measure(
        self,
        name: str,
        point: engine_campaign.Point,
    ) -> None:
        """Measure and save one row; after a failure a broken sampler is started again, a lost GPU
        ends the model.
        """
        began_s = self.clock()
        planned = asdict(point)
        for key in engine_campaign.SAMPLING_FIELDS:
            if not planned.get(key):
                planned.pop(key, None)
        if isinstance(point, TrafficPoint):
            planned["held_out_load"] = point.load in engine_campaign.HELD_OUT_LOADS
        device_error = None
        try:
            gc.collect()
            row = self._measure_point(name, point)
        except CannotWrite:  # no later row could be kept either
            raise
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:400]}
            if not isinstance(error, WattcastError) and "CUDA" in row["error"]:
                device_error = error
        outcome = _name_outcome(row, point)
        self.counts[outcome] += 1
        saved = self.append(name, point.kind, **planned, **row)
        spent = f"({self.clock() - began_s:.1f} s, {self.left_s:.0f} s left)"
        say(f"  {engine_campaign.describe_row(saved)} {spent}")
        if device_error is not None:
            raise device_error
        if outcome == "failed" and not self.bench.sampler.healthy:
            self.bench.sampler.restart()

    def _measure_point(
        self,
        name: str,
        point: engine_campaign.Point,
    ) -> dict[str, Any]:
        """Serve a load, or measure a step where the engine's cache has room for it."""
        if isinstance(point, TrafficPoint):
            return self._serve_traffic(name, point)
        if isinstance(point, LoadPoint):
            return self._serve_load(name, point)
        if not point.fits(self.cache_tokens, self.max_seqs, self.model.max_model_len):
            return {"skipped": f"no room in a cache of {self.cache_tokens} tokens"}
        return engine_steps.measure_point(self.bench, point)

    def _serve_traffic(
        self,
        name: str,
        point: TrafficPoint,
    ) -> dict[str, Any]:
        """Serve Poisson arrivals at a share of the capacity that step rows show."""
        capacity_per_s = self._read_capacity(point)
        rate_per_s = point.load * capacity_per_s
        served_run = measure_traffic(self.bench, point, rate_per_s, name)
        return {"capacity_per_s": capacity_per_s} | self._keep_run(served_run)

    def _serve_load(
        self,
        name: str,
        point: LoadPoint,
    ) -> dict[str, Any]:
        """Serve one run under load, beginning with an empty prefix cache."""
        capacity_per_s = 0.0 if point.users else self._read_capacity(point)
        self.bench.recorder.engine.reset_prefix_cache()
        source = make_source(point, capacity_per_s, self.bench.prompt, self.bench.max_model_len)
        served_run = measure_source(self.bench, source, point.duration_s, name, point.drain_s)
        return {"capacity_per_s": capacity_per_s} | self._keep_run(served_run)

    def _read_capacity(self, point: TrafficPoint | LoadPoint) -> float:
        """Return the requests a second that step rows on file show."""
        folders = [self.request.out, self.request.done]
        paths = [folder / "rows.jsonl" for folder in folders if folder]
        rows = [row for path in paths if path.exists() for row in read_lines(path)]
        model_rows = [row for row in rows if row.get("model") == self.model.name]
        capacity_per_s = estimate_capacity(model_rows, point)
        if capacity_per_s is None:
            raise bad_value("traffic", "step rows of decodes and prefills before it", "none")
        return capacity_per_s

    def _keep_run(self, served_run: ServedRun) -> dict[str, Any]:
        """Save requests, steps and power of a run, and return its summary."""
        out = self.request.out
        append_rows(out / "requests.jsonl", served_run.requests)
        append_rows(out / "steps.jsonl", [served_run.steps])
        append_rows(out / "power.jsonl", [served_run.power])
        return served_run.row


def run_model(order: dict[str, Any]) -> int:
    """Measure one model in this process: load libraries, read the seconds it has, start the engine,
    measure rows.
    """
    for name, value in engine_campaign.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    import vllm

    # vLLM loads its parts when they are asked for: ask before the turn comes
    with suppress(ImportError):
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.gpu_worker
    _ = vllm.LLM, vllm.SamplingParams
    line = sys.stdin.readline()
    if not line.strip():
        return 0
    deadline_s = time.monotonic() + float(line) - END_S
    request = engine_campaign.EngineRequest.from_plain(order)
    model = request.models[0]

    with tempfile.TemporaryDirectory(prefix="wattcast-engine-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
        began_s = time.monotonic()
        llm = _start_engine(vllm, model, Path(folder), request)
        start_s = time.monotonic() - began_s
        say(f"{model.name}: started in {start_s:.1f} s")
        facts = read_engine_facts(llm.llm_engine) | {
            "start_s": start_s,
            "vllm": str(vllm.__version__),
        }
        facts["filled_byte"] = engine_weights.fill_cache(llm.llm_engine, torch)
        bench = _make_bench(llm.llm_engine, model, vllm, torch)
        if model.adapters:
            bench.adapters = lora_adapters.make_adapter_requests(
                Path(folder),
                model.config,
                model.adapters,
                model.adapter_rank,
                torch,
            )
        prompts = [tokens for tokens in WARM_PROMPTS if tokens + 2 < model.max_model_len]
        engine_steps.warm_engine(bench, tuple(prompts))
        weights = _fill_and_check(
            llm.llm_engine,
            vllm,
            torch,
            bench,
            model.is_quantized,
        )
        if request.together > 1:
            _meet_points(bench, request, model, facts)
            deadline_s = _wait_for_turn(engine_campaign.ready_path(request, model))
        counts = _measure_rows(
            bench,
            request,
            facts,
            deadline_s,
            weights,
            torch,
        )
    say(f"{model.name}: {json.dumps(counts)}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine can take many seconds to be torn down, and everything is on file


def _make_bench(
    engine: Any,
    model: engine_campaign.EngineModel,
    vllm: Any,
    torch: Any,
) -> engine_steps.EngineBench:
    """Return the bench of a started engine; its requests run to their end and return no text."""
    from vllm.sampling_params import RequestOutputKind

    def mark_stream() -> Any:
        """Return a time mark on the stream that the engine launches on."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    make_sampling = partial(
        vllm.SamplingParams,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    return engine_steps.EngineBench(
        engine_steps.StepRecorder(engine, mark_stream),
        None,
        make_sampling,
        vocab_size=int(model.config["vocab_size"]),
        max_model_len=model.max_model_len,
        synchronize=torch.cuda.synchronize,
    )


def _measure_rows(
    bench: engine_steps.EngineBench,
    request: engine_campaign.EngineRequest,
    facts: dict[str, Any],
    deadline_s: float,
    weights: engine_weights.WeightReport,
    torch: Any,
) -> Counter[str]:
    """Measure all rows of a warm engine, with the card's sensors beside them; return the counts."""
    model = request.models[0]
    with Sampler("nvml", period_s=0.005) as sampler:
        bench.sampler = sampler
        run = make_run_name()
        Journal(request.out / "runs.jsonl", key="run").append(
            make_torch_run_info(run, sampler.identity, torch)
        )
        room = facts["cache_tokens"], facts["max_seqs"]
        session = EngineSession(
            request,
            model,
            bench,
            deadline_s,
            run,
            *room,
            weights=weights,
        )
        session.list_kernels = partial(engine_steps.list_step_kernels, bench, torch=torch)
        session.append(
            f"{model.name}/engine-{run}",
            "engine",
            source=model.source,
            why=model.why,
            **facts,
        )
        gc.collect()
        gc.freeze()
        bench.sleep(0.5)
        idle = engine_steps.measure_idle_engine(bench)
        session.append(f"{model.name}/idle-{run}", "idle", **idle)
        counts = session.measure_all()
        counts["sampler read errors"] += sampler.errors
    return counts


def _meet_points(
    bench: engine_steps.EngineBench,
    request: engine_campaign.EngineRequest,
    model: engine_campaign.EngineModel,
    facts: dict[str, Any],
) -> None:
    """Run a few steps of every planned kind, so that kernels compiled at first use are there.

    Engines that start together do this while the others still start, where it costs no time.
    """
    for point in request.list_points(model):
        if not isinstance(point, StepPoint):
            continue
        if point.fits(facts["cache_tokens"], facts["max_seqs"], bench.max_model_len):
            try:
                engine_steps.meet_point(bench, point)
            except WattcastError as error:
                say(f"  {point.id}: {error}"[:300])


def _wait_for_turn(ready: Path) -> float:
    """Say that the engine is ready, wait for its turn, and return the moment when it must end."""
    ready.touch()
    line = sys.stdin.readline()
    ready.unlink()
    if not line.strip():
        sys.exit(0)
    return time.monotonic() + float(line) - END_S


def _fill_and_check(
    engine: Any,
    vllm: Any,
    torch: Any,
    bench: engine_steps.EngineBench,
    is_quantized: bool,
) -> engine_weights.WeightReport:
    """Fill the weights of an engine, and look whether they are there and its outputs numbers."""
    filled = engine_weights.fill_weights(engine, torch)
    zero = engine_weights.find_zero_weights(engine, torch)
    sampling = vllm.SamplingParams(
        max_tokens=4,
        temperature=0.0,
        logprobs=1,
        detokenize=False,
    )
    is_finite = engine_weights.has_finite_outputs(engine, sampling, bench.prompt(64))
    is_narrow = not is_quantized or engine_weights.has_narrow_weights(engine)
    return engine_weights.WeightReport(filled, zero, is_finite, is_narrow)


def _start_engine(
    vllm: Any,
    model: engine_campaign.EngineModel,
    folder: Path,
    request: engine_campaign.EngineRequest,
) -> Any:
    """Start an engine as a user would, with dummy weights; a smoke test captures few graphs.

    Engines that share the card are told the size of their cache, since they could not find out
    how much memory the others will take.
    """
    memory_share = engine_campaign.MEMORY_SHARE
    options: dict[str, Any] = {"quantization": model.quantization} if model.quantization else {}
    if model.adapters:
        options["enable_lora"] = True
        options["max_loras"] = model.adapters
        options["max_lora_rank"] = model.adapter_rank
    if model.overrides:
        options["hf_overrides"] = partial(_override_config, overrides=model.overrides)
    if request.smoke:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        memory_share = 0.3
    if request.together > 1:
        memory_share /= request.together
        cache_gib = model.cache_gib or request.cache_gib
        options["kv_cache_memory_bytes"] = int(cache_gib * engine_campaign.GIB)
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=model.kv_dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=engine_campaign.MAX_SEQS,
        max_num_batched_tokens=engine_campaign.MAX_BATCHED_TOKENS,
        gpu_memory_utilization=memory_share,
        enable_prefix_caching=request.caches_prefixes(model),
        disable_log_stats=True,
        generation_config="vllm",
        **options,
    )


def _override_config(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Set attributes of a configuration that transformers renamed and the engine still expects."""
    for name, value in overrides.items():
        setattr(config, name, value)
    return config


def read_engine_facts(engine: Any) -> dict[str, Any]:
    """Return how the engine was set up: room in its cache, limits, graphs, backends, as far as it
    says.
    """
    config = engine.vllm_config
    cache = config.cache_config
    scheduler = config.scheduler_config
    compilation = config.compilation_config
    blocks = int(cache.num_gpu_blocks)
    block = int(cache.block_size)
    facts: dict[str, Any] = {
        "cache_tokens": int(getattr(cache, "kv_cache_size_tokens", None) or blocks * block),
        "cache_blocks": blocks,
        "block_tokens": block,
        "max_seqs": int(scheduler.max_num_seqs),
        "max_batched_tokens": int(scheduler.max_num_batched_tokens),
        "max_model_len": int(config.model_config.max_model_len),
        "async_scheduling": bool(scheduler.async_scheduling),
        "prefix_caching": bool(cache.enable_prefix_caching),
    }

    def layers() -> Any:
        return engine.model_executor.driver_worker.model_runner.get_model().modules()

    readers: dict[str, Callable[[], Any]] = {
        "model_runner": lambda: "v2" if config.use_v2_model_runner else "v1",
        "cudagraph_mode": lambda: str(compilation.cudagraph_mode),
        "capture_sizes": lambda: [int(size) for size in compilation.cudagraph_capture_sizes],
        "compile_s": lambda: float(compilation.compilation_time),
        "attention": lambda: sorted(
            {type(layer.impl).__name__ for layer in layers() if hasattr(layer, "impl")}
        ),
    }
    for name, ask in readers.items():
        with suppress(Exception):
            facts[name] = ask()
    return facts


if __name__ == "__main__":
    sys.exit(run_model(json.loads(sys.argv[1])))
