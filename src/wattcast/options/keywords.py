"""The keywords of each verb, as type checkers see them.

Generated from the declarations beside it by ``python -m wattcast.options.keyword_source``; do not
edit. Functions take them as ``**options: Unpack[PredictKeywords]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Required, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import TypeAlias

    import numpy.typing as npt

    from wattcast.hardware import Node
    from wattcast.predictor.bundle.bundle_file import Bundle
    from wattcast.serving.arrivals import Trace
    from wattcast.workload.model_catalogue import ModelSpec

    Quantity: TypeAlias = str | npt.ArrayLike  # "1830 MHz", 1.83e9, or an array in SI units


class PredictKeywords(TypedDict, total=False):
    """Keywords of ``predict``."""

    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    host_launch: Quantity | None
    temperature: Quantity | None
    duration: str | float | None
    data: str
    operands: str | None
    bundle: Bundle | str | Path | None
    factors: Mapping[str, float] | None
    card: str
    engine: str | None
    scheduling: str
    node: Node | str | Path | None
    force: bool
    host_factor: str | float | None
    power_factor: str | float | None
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class CompareKeywords(TypedDict, total=False):
    """Keywords of ``compare``."""

    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    host_launch: Quantity | None
    temperature: Quantity | None
    duration: str | float | None
    data: str


class SimulateKeywords(TypedDict, total=False):
    """Keywords of ``simulate``."""

    rate: str | float | None
    trace: str | Path | Trace | None
    seconds: str | float
    requests: int | None
    concurrency: int | None
    think_time: str | float
    ramp: str | float
    seeds: int
    prompt: str | int
    output: str | int
    arrivals: str
    seed: int
    turns: str | int
    turn_prompt: str | int | None
    turn_pause: str | float
    shared_prefix: int
    ttft: str | float | None
    tpot: str | float | None
    dtype: str
    tp: int
    pp: int
    dp: int
    ep: int
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    replicas: int
    router: str
    prefill_replicas: int
    transfer: str | float
    max_batched_tokens: int | None
    max_seqs: int | None
    block_tokens: int | None
    cache_tokens: int | None
    memory_utilisation: str | float | None
    max_model_len: int | None
    prefix_caching: bool | None
    prefix_hit_rate: str | float
    speculative_tokens: int
    acceptance_rate: str | float
    draft: str | Path | ModelSpec | None
    engine_args: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    engine: str | None
    node: Node | str | Path | None
    force: bool
    host_factor: str | float | None
    power_factor: str | float | None
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class PlanKeywords(TypedDict, total=False):
    """Keywords of ``plan``."""

    rate: Required[str | float]
    minimise: str
    headroom: str | float
    spare_replicas: int
    site_power: str | float | None
    power_budget: str | float | None
    host_share: str | float
    requests: int
    prompt: str | int
    output: str | int
    arrivals: str
    seed: int
    ttft: str | float | None
    tpot: str | float | None
    dtype: str
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    speculative_tokens: int
    acceptance_rate: str | float
    draft: str | Path | ModelSpec | None
    tp: str | Sequence[int]
    pp: str | Sequence[int]
    ep: str | Sequence[int]
    power_limits: str | Sequence[str | float]
    clocks: str | Sequence[str | float]
    pools: str | Sequence[str]
    max_batched_tokens: str | Sequence[int]
    node: Node | str | Path | None
    force: bool
    host_factor: str | float | None
    power_factor: str | float | None
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class TrainKeywords(TypedDict, total=False):
    """Keywords of ``train``."""

    gpus: int
    tokens: str | float
    seq: int | None
    global_batch: int | None
    minimise: str
    network: str | float | None
    dtype: str
    optimizer: str
    fp8_scales: str
    master_weights: bool
    gradient_byte: int
    stack: str
    attention: str
    attention_slowdown: float
    fp8_attention: bool
    fused_loss: bool
    loss_share: str | float
    expert_overlap: str | float
    expert_copies: bool
    expert_kernels: str
    documents: str | Sequence[str]
    mask_padding: bool
    graphs: bool
    lora: int
    lora_targets: str
    base_bits: int
    micro_batch: int | None
    tp: int | None
    pp: int | None
    cp: int
    ep: int
    interleave: int
    sequence_parallel: bool
    sharding: str | None
    recompute: str | None
    offload: bool
    host_share: str | float
    padding: str | float
    pause_share: str | float
    checkpoint_every: int
    checkpoint_time: str | float
    checkpoint_log: str | Path | None
    failures_per_gpu_day: float
    lost_minutes: float
    clock: Quantity | None
    power_limit: Quantity | None
    bundle: Bundle | str | Path | None
    node: Node | str | Path | None
    force: bool
    host_factor: str | float | None
    power_factor: str | float | None
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class ExploreKeywords(TypedDict, total=False):
    """Keywords of ``explore``."""

    slowdown: str | float | None
    latency: str | float | None
    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    bundle: Bundle | str | Path | None
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class StudyKeywords(TypedDict, total=False):
    """Keywords of ``explore_designs``."""

    where: Sequence[str]
    sample: str | None
    seed: int
    hold: str | None
    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    bundle: Bundle | str | Path | None


class ExploreDesignsKeywords(TypedDict, total=False):
    """Keywords of ``explore_designs``."""

    where: Sequence[str]
    sample: str | None
    seed: int
    hold: str | None
    front: Sequence[str]
    out: str | Path | None
    yes: bool
    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None
    clock: Quantity | None
    power_limit: Quantity | None
    bundle: Bundle | str | Path | None


class ModelKeywords(TypedDict, total=False):
    """Keywords of ``model``."""

    batch: int
    seq: int | None
    tokens: int | None
    phase: str | None
    dtype: str
    attention: str
    head: str | None
    stack: str | None
    tp: int
    pp: int
    dp: int
    ep: int
    cp: int
    skew: float
    recompute: bool
    image: int | None
    steps: int | None
    quantization: str | None
    weights: str | None
    kv_dtype: str | None
    lora: int | None
    adapters: int | None
    sampling: str | None
    channels_last: bool
    update: str | None


class SettingKeywords(TypedDict, total=False):
    """Keywords of ``settings``."""

    clock: Quantity | None
    power_limit: Quantity | None
    host_launch: Quantity | None
    temperature: Quantity | None
    duration: str | float | None
    data: str
    operands: str | None
    bundle: Bundle | str | Path | None
    factors: Mapping[str, float] | None
    card: str
    engine: str | None
    scheduling: str
    node: Node | str | Path | None
    force: bool
    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float


class PriceKeywords(TypedDict, total=False):
    """Keywords of ``prices``."""

    price: str | Sequence[str] | None
    electricity: str | None
    carbon: str | None
    pue: float
