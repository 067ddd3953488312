"""The options of a service: its traffic, its engines, how they are deployed, and what a plan
tries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from wattcast.core import bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse_seconds
from wattcast.options.run_options import ModelOptions
from wattcast.options.setting_options import (
    CARD_SETTINGS,
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.verb_options import VerbOptions, part_of

if TYPE_CHECKING:
    from wattcast.serving.arrivals import Trace
    from wattcast.workload.model_catalogue import ModelSpec

ROUTERS = ("round-robin", "least-loaded", "sticky")
TRANSFER_BYTE_PER_S = 50e9  # of a cache that is sent to another engine
TENSOR_PARALLEL = (1, 2, 4, 8)  # that a plan tries
PLAN_REQUESTS = 500  # that a plan simulates for each answer
MOST_REPLICAS = 4096
_LENGTHS = "512, lognormal:median=512,sigma=0.8, a file."
_TRAFFIC_PANEL = "Traffic in detail"
_ENGINE_PANEL = "The engine"
_SEVERAL_PANEL = "Several GPUs"
_REPLICA_PANEL = "The search"


class PlanAim(StrEnum):
    """What the plan has least of; energy decides between equals."""

    GPUS = "gpus"
    ENERGY = "energy"
    COST = "cost"
    CARBON = "carbon"


@dataclass(frozen=True)
class RequestShape:
    """How long requests are and how they arrive; ``draw_trace`` reads the words."""

    prompt: Annotated[str | int, Option(f"Tokens: {_LENGTHS}")] = 512
    output: Annotated[str | int, Option(f"Tokens: {_LENGTHS}")] = 128
    arrivals: Annotated[
        str, Option("poisson|fixed|gamma:cv=2| diurnal:peak=1.5,period=24h", panel=_TRAFFIC_PANEL)
    ] = "poisson"
    seed: Annotated[
        int, Option("Seed of the drawn arrivals and lengths.", panel=_TRAFFIC_PANEL, least=0)
    ] = 1


@dataclass(frozen=True)
class Traffic:
    """Requests that are drawn at a rate, or read from a trace."""

    rate_per_s: Annotated[
        float | None, Option("Requests, such as 8/s or 600/min.", unit="/s", above=0)
    ] = None
    trace: Annotated[str | Path | Trace | None, Option("Requests of a CSV or JSON Lines file.")] = (
        None
    )
    seconds: Annotated[
        float,
        Option(
            "Duration: 600, 1h.",
            unit="s",
            above=0,
            parse=parse_seconds,
        ),
    ] = 600.0
    requests: Annotated[int | None, Option("Request count, instead of --seconds.")] = None
    concurrency: Annotated[
        int | None,
        Option("Waiting clients, instead of --rate.", least=1, most=1 << 20),
    ] = None
    think_time: Annotated[
        str | float,
        Option(
            "Pause of a client before it asks again: 2s, exponential:mean=2s.", panel=_TRAFFIC_PANEL
        ),
    ] = 0.0
    ramp_s: Annotated[
        float,
        Option("Time in which rate or clients rise from zero.", panel=_TRAFFIC_PANEL, unit="s"),
    ] = 0.0
    seeds: Annotated[
        int,
        Option(
            "Number of draws to repeat, for the spread.",
            panel=_TRAFFIC_PANEL,
            least=1,
            most=100,
        ),
    ] = 1


@dataclass(frozen=True)
class Conversations:
    """Requests of several turns; each prompt is all that was said before, and new text."""

    turns: Annotated[
        str | int, Option("Turns of a conversation: 4, lognormal:...", panel=_TRAFFIC_PANEL)
    ] = 1
    turn_prompt: Annotated[
        str | int | None,
        Option("New tokens of a later turn; default: those of --prompt.", panel=_TRAFFIC_PANEL),
    ] = None
    turn_pause: Annotated[
        str | float,
        Option(
            "Pause between turns, for a tool or a person: 2s, lognormal:median=2s,sigma=1.",
            panel=_TRAFFIC_PANEL,
        ),
    ] = 0.0
    shared_prefix: Annotated[
        int,
        Option("Tokens of a prefix that all requests share.", panel=_TRAFFIC_PANEL, least=0),
    ] = 0


def _keep_bounds(value: Any, where: str) -> Any:
    """Return latency bounds as they are written: ``parse_both_bounds`` reads percentiles, too."""
    del where
    return value


@dataclass(frozen=True)
class LatencyTargets:
    """How long requests may wait; ``parse_both_bounds`` reads them."""

    ttft: Annotated[
        str | float | None,
        Option("Time to first token: 500ms, p99:500ms.", unit="s", parse=_keep_bounds),
    ] = None
    tpot: Annotated[
        str | float | None,
        Option("Time per output token: 50ms, p90:50ms.", unit="s", parse=_keep_bounds),
    ] = None


@dataclass(frozen=True)
class EngineOptions:
    """Limits and features of every engine, named as vLLM names them.

    Where a limit is not set, each engine has its own (``serving.engines.engine_defaults``).
    """

    max_batched_tokens: Annotated[
        int | None,
        Option("Most tokens that a step computes.", panel=_ENGINE_PANEL, least=1),
    ] = None
    max_seqs: Annotated[
        int | None,
        Option("Most sequences that a step computes.", panel=_ENGINE_PANEL, least=1),
    ] = None
    block_tokens: Annotated[
        int | None,
        Option("Tokens of a cache block.", panel=_ENGINE_PANEL, least=1),
    ] = None
    cache_tokens: Annotated[
        int | None,
        Option(
            "Tokens that the cache holds, as the engine prints it; default: what fits.",
            panel=_ENGINE_PANEL,
            least=1,
        ),
    ] = None
    memory_utilisation: Annotated[
        float | None,
        Option(
            "Share of the memory an engine takes.",
            panel=_ENGINE_PANEL,
            unit="",
            above=0,
            most=1,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Most tokens of a request; default: the model's own limit.",
            panel=_ENGINE_PANEL,
            least=1,
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        Option(
            "Keep prompts for later ones; default: as the engine does, unless layers keep states.",
            name="prefix-caching/no-prefix-caching",
            panel=_ENGINE_PANEL,
        ),
    ] = None
    prefix_hit_rate: Annotated[
        float,
        Option(
            "Share of each prompt found in the cache.",
            panel=_ENGINE_PANEL,
            unit="",
            most=1,
        ),
    ] = 0.0
    speculative_tokens: Annotated[
        int,
        Option(
            "Tokens that are drafted for a sequence in a step.",
            panel=_ENGINE_PANEL,
            least=0,
            most=64,
        ),
    ] = 0
    acceptance_rate: Annotated[
        float,
        Option(
            "Chance that a drafted token is kept.",
            panel=_ENGINE_PANEL,
            unit="",
            most=1,
        ),
    ] = 0.7
    draft: Annotated[
        str | Path | ModelSpec | None,
        Option(
            "Model that drafts them, named as MODEL is; default: the cost of drafting is left out.",
            panel=_ENGINE_PANEL,
        ),
    ] = None
    engine_args: Annotated[
        str | None,
        Option(
            "Arguments of the engine's scheduler: enable_mixed_chunk=true.",
            panel=_ENGINE_PANEL,
        ),
    ] = None


@dataclass(frozen=True)
class Deployment:
    """How many engines share the requests, and how."""

    replicas: Annotated[
        int, Option("Engines that share requests.", least=1, most=MOST_REPLICAS)
    ] = 1
    router: Annotated[
        str, Option("round-robin|least-loaded|sticky", choices=ROUTERS, panel=_SEVERAL_PANEL)
    ] = "round-robin"
    prefill_replicas: Annotated[
        int,
        Option(
            "Engines for prompts alone; others decode.",
            panel=_SEVERAL_PANEL,
            least=0,
            most=MOST_REPLICAS,
        ),
    ] = 0
    transfer_byte_per_s: Annotated[
        float,
        Option(
            "Speed of sending a prompt's cache on.",
            panel=_SEVERAL_PANEL,
            unit="byte/s",
            above=0,
        ),
    ] = TRANSFER_BYTE_PER_S


@dataclass(frozen=True)
class PlanDemand:
    """What a plan must serve, and what it has least of."""

    rate_per_s: Annotated[float, Option("Requests: 20/s or 600/min.", unit="/s", above=0)]
    minimise: Annotated[PlanAim, Option("gpus|energy|cost|carbon")] = PlanAim.GPUS
    headroom: Annotated[float, Option("Traffic to plan for on top of the rate.", unit="")] = 0.1
    spare_replicas: Annotated[int, Option("Replicas that may be down.", "spare", least=0)] = 0
    site_power_w: Annotated[
        float | None, Option("Most mean power of all GPUs: 20kW.", unit="W", above=0)
    ] = None
    power_budget_w: Annotated[
        float | None, Option("Power to fill, at the meter: 10MW.", unit="W", above=0)
    ] = None
    host_share: Annotated[
        float,
        Option(
            "Energy of hosts, network and fans over the GPUs'.", panel="Cost and carbon", unit=""
        ),
    ] = 0.25
    requests: Annotated[
        int, Option("Requests simulated for each answer.", panel=_TRAFFIC_PANEL, least=1)
    ] = PLAN_REQUESTS


def parse_pools(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    """Return engines that compute prompts and engines that decode, of each of several ``1:2``."""
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(_parse_pool(text, where) for text in texts)


def _parse_pool(text: str, where: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,2}):([1-9]\d?)\s*", text)
    if not match or (text.strip().startswith("0:") and text.strip() != "0:1"):
        expected = "engines for prompts and engines that decode, such as 1:2, or 0:1 for none"
        raise bad_value(where, expected, text)
    return int(match[1]), int(match[2])


def _tried(text: str) -> Option:
    return Option(
        text,
        panel=_REPLICA_PANEL,
        least=1,
        commas=True,
    )


@dataclass(frozen=True)
class PlanSearch:
    """What the replicas of a plan are made of; an empty field stands for what is usual for the card
    and the demand.
    """

    tp: Annotated[tuple[int, ...], Option("Tensor-parallel GPUs to try.", least=1, commas=True)] = (
        TENSOR_PARALLEL
    )
    pp: Annotated[tuple[int, ...], _tried("Pipeline stages to try; default: where needed.")] = ()
    ep: Annotated[tuple[int, ...], _tried("GPUs that share the experts, to try; 1: none.")] = ()
    power_limits_w: Annotated[
        tuple[float, ...],
        Option(
            "Power limits to try: 700W,500W; default: several where energy counts.",
            "power-limit",
            panel=_REPLICA_PANEL,
            unit="W",
            above=0,
            commas=True,
        ),
    ] = ()
    clocks_hz: Annotated[
        tuple[float, ...],
        Option(
            "Highest clocks to try: 1.98GHz,1.4GHz; default: several where energy counts.",
            "clock",
            panel=_REPLICA_PANEL,
            unit="Hz",
            above=0,
            commas=True,
        ),
    ] = ()
    pools: Annotated[
        tuple[tuple[int, int], ...],
        Option(
            "Engines for prompts and for decoding, to try: 0:1,1:2; default: where needed.",
            panel=_REPLICA_PANEL,
            parse=parse_pools,
            commas=True,
        ),
    ] = ()
    max_batched_tokens: Annotated[
        tuple[int, ...], _tried("Tokens of a step to try; default: where needed.")
    ] = ()


# What an engine runs, of the options of a model.
SERVED_MODEL = ("dtype", "quantization", "weights", "kv_dtype", "lora", "adapters", "sampling")
# What a plan tries on its best replica.
SPECULATION = ("speculative_tokens", "acceptance_rate", "draft")
SIMULATE = VerbOptions(
    "simulate",
    Traffic,
    RequestShape,
    Conversations,
    LatencyTargets,
    part_of(
        ModelOptions,
        *SERVED_MODEL,
        "tp",
        "pp",
        "dp",
        "ep",
    ),
    Deployment,
    EngineOptions,
    part_of(
        SettingOptions,
        *CARD_SETTINGS,
        "engine",
        "node",
        "force",
    ),
    MachineOptions,
    PriceOptions,
)
PLAN = VerbOptions(
    "plan",
    PlanDemand,
    RequestShape,
    LatencyTargets,
    part_of(ModelOptions, *SERVED_MODEL),
    part_of(EngineOptions, *SPECULATION),
    PlanSearch,
    part_of(SettingOptions, "node", "force"),
    MachineOptions,
    PriceOptions,
)
