"""Simulate a model under traffic: ``wattcast.simulate``.

Requests of a trace go to replicas behind a router. With prefill replicas, prompts are computed on
engines of their own and their cache is sent to the engines that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    Any,
    Unpack,
    overload,
)

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array
from wattcast.core.user_results import ResultList
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.options.keywords import SimulateKeywords
from wattcast.options.serving_options import (
    SIMULATE,
    Conversations,
    Deployment,
    EngineOptions,
    LatencyTargets,
    RequestShape,
    Traffic,
)
from wattcast.options.serving_options import TRANSFER_BYTE_PER_S as TRANSFER_BYTE_PER_S
from wattcast.options.setting_options import (
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.verb_options import ParsedOptions
from wattcast.predictor.api import (
    SeveralGpus,
    find_gpu,
    predict,
)
from wattcast.predictor.machine_factors import UNTOLD
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prices import Prices, read_prices
from wattcast.predictor.runnable_checks import check_power_limit
from wattcast.serving.arrivals import (
    Trace,
    draw_trace,
    drop_long_requests,
    make_trace,
)
from wattcast.serving.cache_layout import keeps_prefixes
from wattcast.serving.cache_size import CacheSetting
from wattcast.serving.closed_loop import (
    list_route_keys,
    make_router,
    serve_sessions,
)
from wattcast.serving.draft_models import choose_draft_options
from wattcast.serving.engine_simulator import (
    BoundsBroken,
    EngineReplica,
    Patience,
    ReplicaRun,
)
from wattcast.serving.engines.engine_defaults import (
    EngineLimits,
    describe_scheduler,
    fill_limits,
    start_scheduler,
)
from wattcast.serving.latency_bounds import LatencyBound, parse_both_bounds
from wattcast.serving.request_plan import (
    EngineSettings,
    RequestPlan,
    plan_requests,
)
from wattcast.serving.request_sessions import (
    Sessions,
    draw_sessions,
    has_users,
    is_interactive,
    make_closed_loop,
    replay_users,
)
from wattcast.serving.serving_intervals import widen_to_runs
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
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

_ONE_ENGINE = Deployment()
WHOLE_TIME = (
    "energy, power and cost are over the whole time, start and drain included; after a "
    "pause a step "
    "runs at the top clock until the governor reacts"
)

_MORE_SESSIONS = 4  # times those that were drawn, where clients used them up
_INTERVAL_COLUMNS = {"tpot_s": "latency_s", "power_w": "power_w", "energy_j": "energy_j"}


@overload
def simulate(
    model: str | Path | ModelSpec,
    gpu: str | Path | Gpu = "h200",
    **options: Unpack[SimulateKeywords],
) -> ServingResult: ...


@overload
def simulate(
    model: str | Path | ModelSpec,
    gpu: SeveralGpus,
    **options: Unpack[SimulateKeywords],
) -> ResultList[ServingResult]: ...


@SIMULATE.sign
def simulate(
    model: str | Path | ModelSpec,
    gpu: str | Path | Gpu | SeveralGpus = "h200",
    **options: Unpack[SimulateKeywords],
) -> ServingResult | ResultList[ServingResult]:
    """Serve a trace, or arrivals drawn at ``rate``, and return latencies, throughput, power and
    energy. With a list of GPUs, return a result for each kind.

    >>> import wattcast
    >>> lengths = {"prompt": 512, "output": 128}
    >>> result = wattcast.simulate("llama3-8b", "h200", rate="8/s", seconds=60, **lengths)
    >>> round(result.summarise()["ttft_s"]["p50"], 3) < 0.2
    True

    ``model`` is a catalogue name or a Hugging Face ``config.json``. Lengths and ``arrivals`` are
    written as ``draw_trace`` takes them. ``replicas`` engines of ``tp`` GPUs in each of ``pp``
    stages share the requests, or groups of ``dp`` engines that share the experts of a mixture
    (``ep`` GPUs). With ``prefill_replicas`` they only decode, and prompts come from those at
    ``transfer``. ``cache_tokens`` replaces the room that follows from the GPU's memory; it is
    the number that an engine prints when it starts, for requests of ``max_model_len``. ``seeds``
    repeats it all with other arrivals, lengths and launch times, or a given trace with other launch
    times. Requests of more tokens than the model was made for are rejected, as engines do;
    ``force`` serves them. With ``concurrency``, so many clients wait for each answer; ``turns``
    makes conversations of requests. ``draft`` is the model that drafts ``speculative_tokens``;
    without one drafting costs nothing."""
    if isinstance(gpu, list | tuple):
        return ResultList(simulate(model, kind, **options) for kind in gpu)
    chosen = SIMULATE.parse(options)
    spec = find_language_model(model)
    draft = find_draft_model(spec, chosen[EngineOptions])
    settings = chosen[SettingOptions]
    targets = chosen[LatencyTargets]
    bounds = parse_both_bounds(targets.ttft, targets.tpot)
    prices = read_prices(chosen[PriceOptions])
    deployment = chosen[Deployment]
    chip = find_gpu(gpu, settings.node, settings.engine)
    run = _read_engine_run(chosen.select_keywords(ModelOptions))
    if draft is not None and run.pp > 1:
        raise bad_value("pp", "one stage beside a draft model, which is not split", run.pp)
    limits = fill_limits(chosen[EngineOptions], chip, run.tp)

    most_tokens = _limit_length(spec, chosen[EngineOptions], settings.force)
    drawn = _draw_loads(chosen, spec.name, most_tokens)
    limit_w = settings.read_number("power_limit_w")
    if not settings.force:
        check_power_limit(chip, OperatingPoint(power_limit_w=limit_w))

    costs = _tabulate_engine(
        spec,
        draft,
        chip,
        run,
        chosen,
        limits,
        drawn.traces,
        most_tokens,
    )
    results = _serve_loads(
        drawn.loads,
        costs,
        _list_settings(spec, chip, chosen, limits, costs.block_tokens),
        deployment,
        bounds,
        prices,
    )
    first = results[0]
    drafting = (draft, chosen[EngineOptions].speculative_tokens)
    machine = chosen[MachineOptions]
    model_interval = measure_model_interval(spec, chip, run, first, machine, drafting)
    notes = [drawn.rejection] if drawn.rejection else []
    notes += describe_scheduler(chip.engine)
    return replace(
        first,
        seed_spread=_measure_spread(results) if len(results) > 1 else {},
        model_interval=widen_to_runs(model_interval),
        rejected=drawn.rejected,
        assumptions=(*notes, WHOLE_TIME, *first.assumptions),
    )


@dataclass(frozen=True)
class _DrawnLoads:
    """The requests of each seed, and those of the first that the engine rejects as too long."""

    loads: Sequence[Trace | Sessions]
    rejected: int = 0
    rejection: str = ""  # a sentence about the rejected ones

    @property
    def traces(self) -> list[Trace]:
        """The requests without the order in which sessions send them."""
        return [load.requests if isinstance(load, Sessions) else load for load in self.loads]


def _draw_loads(
    chosen: ParsedOptions,
    model: str,
    most_tokens: int | None,
) -> _DrawnLoads:
    """Draw the requests of each seed, and drop those of more than ``most_tokens``."""
    traffic = _read_traffic(chosen)
    force = chosen[SettingOptions].force
    if is_interactive(traffic, chosen[Conversations]):
        return _DrawnLoads(_make_sessions(traffic, chosen, None if force else most_tokens))
    traces = _make_traces(traffic, chosen[RequestShape])
    is_set = chosen[EngineOptions].max_model_len is not None
    accepted = [
        drop_long_requests(
            trace,
            model,
            most_tokens,
            force,
            is_set,
        )
        for trace in traces
    ]
    loads = [trace for trace, _ in accepted]
    rejection = accepted[0][1]
    rejected = len(traces[0]) - len(loads[0]) if rejection else 0
    return _DrawnLoads(loads, rejected, rejection)


def _caches_prefixes(spec: ModelSpec, engine: EngineOptions) -> bool:
    """Whether the engine keeps prompts for later ones, as set or as it decides for the model."""
    return keeps_prefixes(spec) if engine.prefix_caching is None else engine.prefix_caching


def _tabulate_engine(
    spec: ModelSpec,
    draft: ModelSpec | None,
    chip: Gpu,
    run: ModelOptions,
    chosen: ParsedOptions,
    limits: EngineLimits,
    traces: Sequence[Trace],
    most_tokens: int | None,
) -> StepCosts:
    """Predict the costs of all steps that these requests can need, and the room of the cache."""
    engine = chosen[EngineOptions]
    settings = chosen[SettingOptions]
    longest_context = max(_longest_context(trace) for trace in traces)
    steps = StepRange(
        max_tokens=limits.max_batched_tokens,
        max_seqs=max(limits.max_seqs // run.pp, 1),
        longest_context=longest_context,
        context_spread=traces[0].context_spread,
        tokens_a_step=1 + engine.speculative_tokens,
        draft=draft,
    )
    cache_setting = CacheSetting(
        block_tokens=limits.block_tokens,
        memory_utilisation=limits.memory_utilisation,
        prefix_caching=_caches_prefixes(spec, engine),
        share=limits.memory_share,
    )
    costs = tabulate_step_costs(
        spec,
        chip,
        run,
        steps,
        cache_setting=cache_setting,
        clock_hz=settings.read_number("clock_hz"),
        power_limit_w=settings.read_number("power_limit_w"),
        machine=chosen[MachineOptions],
    )
    if engine.cache_tokens is None:
        return costs
    room_tokens = costs.groups.convert_engine_tokens(
        engine.cache_tokens,
        most_tokens or longest_context,
        limits.max_batched_tokens,
    )
    return replace(costs, cache_tokens=room_tokens)


def _read_engine_run(keywords: Mapping[str, Any]) -> ModelOptions:
    """Return how the GPUs of an engine share the model, and in which formats it runs."""
    run = ModelOptions.from_names(**keywords, stack=SoftwareStack.ENGINE)
    if run.dp > 1 and run.ep <= run.tp:
        expected = "engines that share experts (an ep of more GPUs than tp)"
        raise bad_value("dp", expected, run.dp, "Use --replicas.")
    return run


def _limit_length(
    spec: ModelSpec,
    engine: EngineOptions,
    force: bool,
) -> int | None:
    """Return the most tokens of a request; None is no limit."""
    positions = count_positions(spec)
    if engine.max_model_len is None:
        return positions
    if positions is not None and engine.max_model_len > positions and not force:
        expected = f"at most the {positions:,} tokens that {spec.name} was made for"
        raise bad_value("max_model_len", expected, engine.max_model_len, "Or use --force.")
    return engine.max_model_len


def _read_traffic(chosen: ParsedOptions) -> Traffic:
    """Return the traffic that was asked for, with the requests of its trace."""
    traffic = chosen[Traffic]
    if traffic.trace is None or isinstance(traffic.trace, Trace):
        return traffic
    if traffic.rate_per_s is not None:  # a contradiction is told before a file is missed
        raise bad_value("simulate", "either a rate or a trace (--rate, --trace)", "both")
    return replace(traffic, trace=read_trace(traffic.trace))


def _make_sessions(
    traffic: Traffic,
    chosen: ParsedOptions,
    most_tokens: int | None,
) -> list[Sessions]:
    """Return the sessions of each seed."""
    shape = chosen[RequestShape]
    if has_users(traffic):
        _check_users_alone(traffic, chosen)
        assert isinstance(traffic.trace, Trace)
        return [replay_users(traffic.trace, most_tokens)] * traffic.seeds
    if isinstance(traffic.trace, Trace) and traffic.concurrency is not None:
        return [make_closed_loop(traffic.trace, traffic, most_tokens)] * traffic.seeds
    if traffic.trace is not None:
        expected = "--concurrency or nothing beside a trace, which brings its own requests"
        raise bad_value("simulate", expected, "conversations or a ramp")
    if (traffic.rate_per_s is None) == (traffic.concurrency is None):
        count = "neither" if traffic.rate_per_s is None else "both"
        raise bad_value("simulate", "either a rate or clients (--rate, --concurrency)", count)
    if chosen[Deployment].prefill_replicas:
        expected = "engines that compute prompts themselves, with --concurrency, --turns or --ramp"
        raise bad_value("prefill_replicas", expected, chosen[Deployment].prefill_replicas)
    talk = chosen[Conversations]
    return [
        draw_sessions(replace(shape, seed=shape.seed + place), traffic, talk, most_tokens)
        for place in range(traffic.seeds)
    ]


def _check_users_alone(traffic: Traffic, chosen: ParsedOptions) -> None:
    """Refuse options that a trace with users answers itself."""
    talk = chosen[Conversations]
    is_drawn = talk != Conversations() or traffic.concurrency or traffic.ramp_s
    if is_drawn or traffic.rate_per_s is not None:
        expected = "nothing else about users beside a trace whose columns user and pause_s say it"
        do = "Leave out --rate, --concurrency, --ramp and what makes conversations."
        raise bad_value("simulate", expected, "more", do)
    if chosen[Deployment].prefill_replicas:
        expected = "engines that compute prompts themselves, with users in a trace"
        raise bad_value("prefill_replicas", expected, chosen[Deployment].prefill_replicas)


def _make_traces(traffic: Traffic, shape: RequestShape) -> list[Trace]:
    """Return the requests of each seed, drawn at a rate or read from a trace."""
    if isinstance(traffic.trace, Trace) and traffic.rate_per_s is None:
        return [traffic.trace] * traffic.seeds
    if traffic.trace is not None or traffic.rate_per_s is None:
        count = "neither" if traffic.trace is None else "both"
        raise bad_value("simulate", "either a rate or a trace (--rate, --trace)", count)
    traces = []
    for place in range(traffic.seeds):
        trace = draw_trace(
            traffic.rate_per_s,
            shape.prompt,
            shape.output,
            shape.arrivals,
            traffic.seconds,
            traffic.requests,
            shape.seed + place,
        )
        traces.append(trace)
    return traces


def _longest_context(trace: Trace) -> int:
    return int((trace.prompt_tokens + trace.output_tokens).max())


def _list_settings(
    spec: ModelSpec,
    chip: Gpu,
    chosen: ParsedOptions,
    limits: EngineLimits,
    block_tokens: int,
) -> list[EngineSettings]:
    """Return the settings of an engine for the requests of each seed."""
    engine = chosen[EngineOptions]
    start = start_scheduler(chip.engine, engine.engine_args)
    first = EngineSettings(
        limits.max_batched_tokens,
        limits.max_seqs,
        engine.prefix_hit_rate,
        engine.speculative_tokens,
        engine.acceptance_rate,
        chosen[RequestShape].seed,
        _caches_prefixes(spec, engine),
        block_tokens,
        start,
    )
    return [replace(first, seed=first.seed + place) for place in range(chosen[Traffic].seeds)]


def _serve_loads(
    loads: Sequence[Trace | Sessions],
    costs: StepCosts,
    settings_by_seed: Sequence[EngineSettings],
    deployment: Deployment,
    bounds: tuple[LatencyBound, ...],
    prices: Prices,
) -> list[ServingResult]:
    """Serve the requests of each seed."""
    results = []
    for load, settings in zip(loads, settings_by_seed, strict=True):
        if isinstance(load, Sessions):
            result = _serve_sessions(
                load,
                costs,
                settings,
                deployment,
                bounds,
                prices,
            )
        else:
            result = serve_trace(
                load,
                costs,
                settings,
                deployment,
                bounds,
                prices,
            )
        results.append(result)
    return results


def _measure_spread(results: Sequence[ServingResult]) -> dict[str, tuple[float, float]]:
    """Return the least and the most of each headline figure over the seeds."""
    headlines = [result.headline for result in results]
    spread = {}
    for name in headlines[0]:
        values = [headline[name] for headline in headlines]
        spread[name] = (min(values), max(values))
    return spread


def find_language_model(model: str | Path | ModelSpec, option: str = "model") -> ModelSpec:
    """Return a language model by its name or file, or raise an error that says what else it is."""
    spec = model if isinstance(model, ModelSpec) else find_model(model)
    if spec is None or spec.kind is not ModelKind.LANGUAGE:
        raise bad_value(option, "a language model", str(model), "`wattcast models` lists them.")
    return spec


def find_draft_model(target: ModelSpec, engine: EngineOptions) -> ModelSpec | None:
    """Return the model that drafts for a target, if one was asked for and can."""
    if engine.draft is None:
        return None
    if not engine.speculative_tokens:
        do = "Say how many tokens it drafts: --speculative-tokens 4."
        raise bad_value("draft", "tokens to draft beside it", "none", do)
    draft = find_language_model(engine.draft, "draft")
    if draft.dims.vocab != target.dims.vocab:
        expected = f"a model with the {target.dims.vocab:,} words of {target.name}"
        raise bad_value("draft", expected, f"{draft.name} with {draft.dims.vocab:,}")
    return draft


def serve_trace(
    trace: Trace,
    costs: StepCosts,
    settings: EngineSettings,
    deployment: Deployment = _ONE_ENGINE,
    bounds: tuple[LatencyBound, ...] = (),
    prices: Prices | None = None,
    carried: bool = False,
    patience: Patience | None = None,
) -> ServingResult:
    """Serve one trace with known step costs.

    ``carried`` prompts were computed on another engine and come with their cache. A run that
    breaks the limits of ``patience`` raises ``BoundsBroken`` before its end.
    """
    notes = [*costs.assumptions, f"router: {deployment.router}"]
    settings = replace(settings, max_seqs=max(settings.max_seqs // costs.stages, 1))
    if deployment.prefill_replicas:
        notes.append(
            "prompts are computed on engines of their own; a full decode engine does not "
            "hold them back"
        )
        served = _serve_in_pools(
            trace,
            costs,
            settings,
            deployment,
            patience,
        )
    else:
        plan = plan_requests(trace, settings, carried)
        replicas = deployment.replicas * costs.lanes
        served = _share_requests(
            plan,
            costs,
            settings,
            replicas,
            deployment.router,
            patience,
        )
    notes += _describe_speculation(costs, settings)
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


def _describe_speculation(costs: StepCosts, settings: EngineSettings) -> list[str]:
    """Say what drafting costs, and that it was not measured."""
    drafted = settings.speculative_tokens
    if not drafted:
        return []
    if costs.draft is None:
        return [
            "speculative decoding: the cost of drafting is not included, as if n-grams of the text "
            "were looked up; --draft MODEL includes that of a draft model"
        ]
    passes = costs.draft.costs
    gpus = "the GPU" if passes.gpu_count == 1 else f"the {passes.gpu_count} GPUs"
    return [
        f"speculative decoding: {passes.model} drafts {drafted} tokens of each sequence in a step "
        f"on {gpus} of {costs.model}, one pass for each; its weights and cache are there too",
        "speculative decoding: no engine was measured with a draft model, whose kernels and host "
        "are taken to cost what they cost in steps of its own, launched layer by layer",
    ]


def _serve_sessions(
    sessions: Sessions,
    costs: StepCosts,
    settings: EngineSettings,
    deployment: Deployment,
    bounds: tuple[LatencyBound, ...],
    prices: Prices,
) -> ServingResult:
    """Serve requests that wait for one another; of a closed loop by time, as many as it takes."""
    settings = replace(settings, max_seqs=max(settings.max_seqs // costs.stages, 1))
    replicas = deployment.replicas * costs.lanes
    served = serve_sessions(
        sessions,
        costs,
        settings,
        replicas,
        deployment.router,
    )
    while served.is_exhausted and sessions.redraw is not None:
        sessions = sessions.redraw(_MORE_SESSIONS * len(sessions.first_requests))
        served = serve_sessions(
            sessions,
            costs,
            settings,
            replicas,
            deployment.router,
        )
    notes = [*costs.assumptions, f"router: {deployment.router}"]
    notes += _describe_speculation(costs, settings)
    return ServingResult(
        costs.model,
        costs.gpu,
        served.trace,
        served.first_token_s,
        served.last_token_s,
        tuple(served.runs),
        bounds,
        prices,
        tuple(dict.fromkeys(notes)),
        lanes=costs.lanes,
    )


@dataclass(frozen=True)
class _ServedRequests:
    """The runs of some replicas, and the moments at which every request had its tokens."""

    runs: list[ReplicaRun]
    first_token_s: Array
    last_token_s: Array


def _serve_in_pools(
    trace: Trace,
    costs: StepCosts,
    settings: EngineSettings,
    deployment: Deployment,
    patience: Patience | None,
) -> _ServedRequests:
    """Compute prompts on engines of their own, and send their cache to others, which decode."""
    prompts = replace(trace, output_tokens=np.ones(len(trace), dtype=np.int64))
    prefill_plan = plan_requests(prompts, settings)
    prefill_replicas = deployment.prefill_replicas * costs.lanes
    prefilled = _share_requests(
        prefill_plan,
        costs,
        settings,
        prefill_replicas,
        deployment.router,
        patience,
    )
    rows = np.flatnonzero(trace.output_tokens > 1)
    if not len(rows):
        return prefilled

    # the cache of a prompt arrives once it has been sent, in another order than prompts came
    transfer_s_per_token = costs.count_transfer_s(deployment.transfer_byte_per_s)
    sent_s = prefilled.first_token_s[rows] + transfer_s_per_token * trace.prompt_tokens[rows]
    order = np.argsort(sent_s, kind="stable")
    rows = rows[order]
    sent = make_trace(sent_s[order], trace.prompt_tokens[rows], trace.output_tokens[rows])

    decode_plan = plan_requests(sent, replace(settings, prefix_hit_rate=0.0), carried=True)
    decode_replicas = deployment.replicas * costs.lanes
    decoded = _share_requests(
        decode_plan,
        costs,
        settings,
        decode_replicas,
        deployment.router,
    )
    last_s = prefilled.last_token_s.copy()
    last_s[rows] = decoded.last_token_s
    return _ServedRequests([*prefilled.runs, *decoded.runs], prefilled.first_token_s, last_s)


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
        route = make_router(router, engines, list_route_keys(plan.paths or (), replicas))
        for request, moment_s in enumerate(plan.arrival_s):
            for engine in engines:
                engine.run_until(moment_s)
            route(request).submit((request,))
    try:
        runs = [engine.finish() for engine in engines]
    except BoundsBroken:
        raise BoundsBroken(max(engine.most_running for engine in engines)) from None
    first_s = np.fmax.reduce([run.first_token_s for run in runs])
    last_s = np.fmax.reduce([run.last_token_s for run in runs])
    return _ServedRequests(runs, first_s, last_s)


def measure_model_interval(
    spec: ModelSpec,
    gpu: Gpu,
    options: ModelOptions,
    result: ServingResult,
    machine: MachineOptions = UNTOLD,
    drafting: tuple[ModelSpec | None, int] = (None, 0),
) -> dict[str, tuple[float, float]]:
    """Return the predictor's interval on the mean decode step, as factors on its values.

    ``drafting`` is a draft model and its passes in a step. The errors of both models are taken to
    go the same way.
    """
    sequences = 0.0  # of all decode steps
    steps = 0.0
    for run in result.runs:
        decodes = run.segments["decodes"]
        sequences += float((decodes * run.segments["steps"]).sum())
        steps += float(run.segments["steps"][decodes > 0].sum())
    batch = max(round(sequences / max(steps, 1.0)), 1)
    context = max(int((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean()), 1)

    members = [(spec, options, 1)]
    draft, passes = drafting
    if draft is not None:
        members.append((draft, choose_draft_options(options), passes))
    predictions = []
    for model, served, count in members:
        step = replace(
            served,
            phase=WorkloadPhase.DECODE,
            batch=batch,
            seq=context,
        )
        prediction = predict(
            build_graph(model, step),
            gpu,
            host_launch=0.0,
            power_factor=machine.power_factor,
        )
        predictions.append((prediction, count))
    return _weigh_intervals(predictions)


def _weigh_intervals(
    predictions: Sequence[tuple[Prediction, int]],
) -> dict[str, tuple[float, float]]:
    """Return the interval of predictions that follow one another, each so many times."""
    total_s = sum(count * float(prediction.latency_s) for prediction, count in predictions)
    factors = {}
    for name, column in _INTERVAL_COLUMNS.items():
        value = 0.0
        ends = np.zeros(2)
        for prediction, count in predictions:
            # power is a mean over time, the others are sums
            time_share = count * float(prediction.latency_s) / total_s
            weight = time_share if name == "power_w" else float(count)
            value += weight * float(getattr(prediction, column))
            ends += weight * np.ravel(getattr(prediction.interval, column))
        low, high = (ends / value).tolist()
        factors[name] = (low, high)
    return factors
