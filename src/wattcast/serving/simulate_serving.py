"""Simulate a model under traffic: ``wattcast.simulate``.

Requests of a trace go to replicas behind a router. With prefill replicas, prompts are computed on
engines of their own and their cache is sent to the engines that decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wattcast.core import bad_value, check_names, units
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.api import find_gpu, predict
from wattcast.predictor.prices import PriceKeywords, Prices, parse_prices
from wattcast.predictor.runnable_checks import check_power_limit
from wattcast.serving.arrivals import Trace, draw_trace, drop_long_requests, make_trace
from wattcast.serving.engine_simulator import EngineReplica, Patience, ReplicaRun
from wattcast.serving.latency_bounds import LatencyBound, parse_both_bounds
from wattcast.serving.request_plan import EngineSettings, RequestPlan, plan_requests
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import tabulate_step_costs
from wattcast.serving.trace_files import read_trace
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import (
    ModelOptions,
    SoftwareStack,
    WorkloadPhase,
    count_positions,
)
from wattcast.workload.readers.load_workload import find_model

ROUTERS = ("round-robin", "least-loaded")
WHOLE_TIME = (
    "energy, power and cost are over the whole time, start and drain included; after a pause a step "
    "runs at the top clock until the governor reacts"
)
TRANSFER_BYTE_PER_S = 50e9  # of a cache that is sent to another engine, where nothing else is said


def simulate(
    model: str | Path | ModelSpec,
    gpu: str | Path | Gpu = "h200",
    *,
    trace: str | Path | Trace | None = None,
    rate: str | float | None = None,
    prompt: str | int = 512,
    output: str | int = 128,
    arrivals: str = "poisson",
    seconds: str | float = "600",
    requests: int | None = None,
    seed: int = 1,
    seeds: int = 1,
    dtype: str = "bf16",
    quantization: str | None = None,
    weights: str | None = None,
    kv_dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    clock: str | float | None = None,
    power_limit: str | float | None = None,
    replicas: int = 1,
    router: str = "round-robin",
    prefill_replicas: int = 0,
    transfer: str | float = "50GB/s",
    max_batched_tokens: int = 8192,
    max_seqs: int = 256,
    block_tokens: int = 16,
    cache_tokens: int | None = None,
    memory_utilisation: str | float = "90%",
    prefix_hit_rate: str | float = "0%",
    speculative_tokens: int = 0,
    acceptance_rate: str | float = "70%",
    node: str | None = None,
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    force: bool = False,
    **prices: Unpack[PriceKeywords],
) -> ServingResult:
    """Serve a trace, or arrivals drawn at ``rate``, and return latencies, throughput, power and
    energy.

    >>> import wattcast
    >>> found = wattcast.simulate("llama3-8b", "h200", rate="8/s", prompt=512, output=128, seconds=60)
    >>> round(found.summarise()["ttft_s"]["p50"], 3) < 0.2
    True

    ``model`` is a catalogue name or a Hugging Face ``config.json``. Lengths and ``arrivals`` are
    written as ``draw_trace`` takes them. ``replicas`` engines of ``tp`` GPUs in each of ``pp``
    stages share the requests, or groups of ``dp`` engines that share the experts of a mixture
    (``ep`` GPUs). With ``prefill_replicas`` they only decode, and prompts come from those at
    ``transfer``. ``cache_tokens`` replaces the room that follows from the GPU's memory. ``seeds``
    repeats it all with other arrivals, lengths and launch times, or a given trace with other launch
    times. Requests of more tokens than the model was made for are rejected, as engines do;
    ``force`` serves them."""
    spec = find_language_model(model)
    counts = (
        ("replicas", replicas, 1),
        ("prefill_replicas", prefill_replicas, 0),
        ("seeds", seeds, 1),
    )
    for name, value, least in counts:
        if isinstance(value, bool) or not least <= value <= 4096:
            raise bad_value(name, f"from {least} to 4096", value)
    check_names("router", router, ROUTERS)
    taken = units.parse_amount(
        memory_utilisation, "", "memory_utilisation", most=1.0, inclusive=False
    )
    cached = units.parse_amount(prefix_hit_rate, "", "prefix_hit_rate", most=1.0)
    accepted = units.parse_amount(acceptance_rate, "", "acceptance_rate", most=1.0)
    speed = units.parse_amount(transfer, "byte/s", "transfer", inclusive=False)
    bounds = parse_both_bounds(ttft, tpot)
    money = parse_prices(**prices)
    if (trace is None) == (rate is None):
        found = "both" if rate is not None else "neither"
        raise bad_value("simulate", "either a rate or a trace (--rate, --trace)", found)
    settings = EngineSettings(
        max_batched_tokens, max_seqs, cached, speculative_tokens, accepted, seed
    )
    shared: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "weights": weights,
        "kv_dtype": kv_dtype,
    }
    shared |= {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    chip = find_gpu(gpu, node)
    options = ModelOptions.from_names(**shared, stack=SoftwareStack.ENGINE)
    if dp > 1 and ep <= tp:
        raise bad_value(
            "dp", "engines that share experts (an ep of more GPUs than tp)", dp, "Use --replicas."
        )
    if trace is not None:
        traces = [trace if isinstance(trace, Trace) else read_trace(trace)] * seeds
    else:
        per_s = units.parse_amount(rate, "/s", "rate")
        length_s = units.parse_seconds(seconds)
        drawn = (per_s, prompt, output, arrivals, length_s, requests)
        traces = [draw_trace(*drawn, seed + i) for i in range(seeds)]
    asked_requests = len(traces[0])
    most_positions = count_positions(spec)
    accepted_traces = [drop_long_requests(one, spec.name, most_positions, force) for one in traces]
    traces = [one for one, _ in accepted_traces]
    limit_w = None if power_limit is None else units.parse_amount(power_limit, "W", "power_limit")
    if not force:
        check_power_limit(chip, OperatingPoint(power_limit_w=limit_w))
    longest = max(int((one.prompt_tokens + one.output_tokens).max()) for one in traces)
    costs = tabulate_step_costs(
        spec,
        chip,
        options,
        max_tokens=max_batched_tokens,
        max_seqs=max(max_seqs // pp, 1),
        longest_context=longest,
        context_spread=traces[0].context_spread,
        tokens_a_step=1 + speculative_tokens,
        block_tokens=block_tokens,
        memory_utilisation=taken,
        clock_hz=None if clock is None else units.parse_amount(clock, "Hz", "clock"),
        power_limit_w=limit_w,
    )
    if cache_tokens is not None:
        costs = replace(costs, cache_tokens=cache_tokens)
    transfer_s_per_token = costs.count_transfer_s(speed) if prefill_replicas else 0.0
    layout = (replicas, router, prefill_replicas, transfer_s_per_token, bounds, money)
    runs = [
        serve_trace(t, costs, replace(settings, seed=seed + i), *layout)
        for i, t in enumerate(traces)
    ]
    figures = [run.headline for run in runs]
    spread = {
        name: (min(one[name] for one in figures), max(one[name] for one in figures))
        for name in figures[0]
    }
    interval = _predictor_interval(spec, chip, options, runs[0])
    rejection = accepted_traces[0][1]
    return replace(
        runs[0],
        seed_spread=spread if seeds > 1 else {},
        model_interval=interval,
        rejected=asked_requests - len(traces[0]),
        assumptions=(*((rejection,) if rejection else ()), WHOLE_TIME, *runs[0].assumptions),
    )


def find_language_model(model: str | Path | ModelSpec) -> ModelSpec:
    """Return a language model by its name or file, or raise an error that says what else it is."""
    spec = model if isinstance(model, ModelSpec) else find_model(model)
    if spec is None or spec.kind is not ModelKind.LANGUAGE:
        raise bad_value("model", "a language model", str(model), "`wattcast models` lists them.")
    return spec


def serve_trace(
    trace: Trace,
    costs: StepCosts,
    settings: EngineSettings,
    replicas: int = 1,
    router: str = "round-robin",
    prefill_replicas: int = 0,
    transfer_s_per_token: float = 0.0,
    bounds: tuple[LatencyBound, ...] = (),
    prices: Prices | None = None,
    carried: bool = False,
    patience: Patience | None = None,
) -> ServingResult:
    """Serve one trace with known step costs.

    ``carried`` prompts were computed on another engine and come with their cache. A run that
    breaks the limits of ``patience`` raises ``BoundsBroken`` before its end.
    """
    notes = [*costs.assumptions, f"router: {router}"]
    settings = replace(settings, max_seqs=max(settings.max_seqs // costs.stages, 1))
    replicas = replicas * costs.lanes
    prefill_replicas = prefill_replicas * costs.lanes
    if prefill_replicas:
        notes.append(
            "prompts are computed on engines of their own; a full decode engine does not hold them back"
        )
        prompts = replace(trace, output_tokens=np.ones(len(trace), dtype=np.int64))
        plan = plan_requests(prompts, settings)
        served = _share_requests(plan, costs, settings, prefill_replicas, router, patience)
        served = _decode_apart(
            served, trace, costs, settings, replicas, router, transfer_s_per_token
        )
    else:
        plan = plan_requests(trace, settings, carried)
        served = _share_requests(plan, costs, settings, replicas, router, patience)
    if settings.speculative_tokens:
        notes.append(
            "speculative decoding: drafting itself is free, tokens a step from the acceptance rate"
        )
    return ServingResult(
        costs.model,
        costs.gpu,
        trace,
        served.first_token_s,
        served.last_token_s,
        tuple(served.runs),
        bounds,
        prices or Prices(),
        tuple(dict.fromkeys(notes)),
        lanes=costs.lanes,
    )


@dataclass(frozen=True)
class _ServedRequests:
    """The runs of some replicas, and the moments at which every request had its tokens."""

    runs: list[ReplicaRun]
    first_token_s: Array
    last_token_s: Array


def _decode_apart(
    prompts: _ServedRequests,
    trace: Trace,
    costs: StepCosts,
    settings: EngineSettings,
    replicas: int,
    router: str,
    transfer_s_per_token: float,
) -> _ServedRequests:
    """Send the cache of computed prompts to other engines, which decode."""
    rows = np.flatnonzero(trace.output_tokens > 1)
    if not len(rows):
        return prompts
    sending_s = transfer_s_per_token * trace.prompt_tokens[rows]
    handed_s = prompts.first_token_s[rows] + sending_s
    order = np.argsort(handed_s, kind="stable")
    rows = rows[order]
    sent = make_trace(handed_s[order], trace.prompt_tokens[rows], trace.output_tokens[rows])
    plan = plan_requests(sent, replace(settings, prefix_hit_rate=0.0), carried=True)
    decoded = _share_requests(plan, costs, settings, replicas, router)
    last_s = prompts.last_token_s.copy()
    last_s[rows] = decoded.last_token_s
    return _ServedRequests([*prompts.runs, *decoded.runs], prompts.first_token_s, last_s)


def _share_requests(
    plan: RequestPlan,
    costs: StepCosts,
    settings: EngineSettings,
    replicas: int,
    router: str,
    patience: Patience | None = None,
) -> _ServedRequests:
    """Share the requests among replicas and run each."""
    engines = [EngineReplica(costs, settings, plan, patience) for _ in range(replicas)]
    if replicas == 1 or router == "round-robin":
        for place, engine in enumerate(engines):
            engine.submit(range(place, len(plan.arrival_s), replicas))
    else:
        for request, moment_s in enumerate(plan.arrival_s):
            for engine in engines:
                engine.run_until(moment_s)
            # the engine with the least load, in turns where several have
            turn = request % replicas
            in_turn = (*engines[turn:], *engines[:turn])
            min(in_turn, key=lambda engine: engine.load).submit((request,))
    runs = [engine.finish() for engine in engines]
    first_s = np.fmax.reduce([run.first_token_s for run in runs])
    last_s = np.fmax.reduce([run.last_token_s for run in runs])
    return _ServedRequests(runs, first_s, last_s)


def _predictor_interval(
    spec: ModelSpec, gpu: Gpu, options: ModelOptions, result: ServingResult
) -> dict[str, tuple[float, float]]:
    """Return the predictor's interval on the mean decode step, as factors on its values."""
    sequences = 0.0  # of all decode steps
    steps = 0.0
    for run in result.runs:
        decodes = run.segments["decodes"]
        sequences += float((decodes * run.segments["steps"]).sum())
        steps += float(run.segments["steps"][decodes > 0].sum())
    batch = max(round(sequences / max(steps, 1.0)), 1)
    context = max(int((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean()), 1)
    step = replace(options, phase=WorkloadPhase.DECODE, batch=batch, seq=context)
    prediction = predict(build_graph(spec, step), gpu, host_launch=0.0)
    factors = {}
    for name, column in (("tpot_s", "latency_s"), ("power_w", "power_w"), ("energy_j", "energy_j")):
        ends = np.ravel(getattr(prediction.interval, column))
        low, high = (ends / float(getattr(prediction, column))).tolist()
        factors[name] = (low, high)
    return factors
