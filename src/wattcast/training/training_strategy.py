"""How a model is trained: number formats and software (a recipe), and how GPUs share it (a
strategy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

from wattcast.core import Dtype, bad_value
from wattcast.workload.model_options import AttentionMode, SoftwareStack


class Sharding(StrEnum):
    """What data-parallel GPUs keep a share of instead of a copy (ZeRO's stages; ``zero3`` is FSDP's
    full shard).
    """

    NONE = "none"
    ZERO1 = "zero1"  # optimiser state and master weights
    ZERO2 = "zero2"  # gradients as well
    ZERO3 = "zero3"  # weights as well, gathered layer by layer


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"  # all but the results of products
    FULL = "full"  # everything but the input of each layer
    OFFLOAD = "offload"  # nothing: they wait in the host's memory


class ExpertKernels(StrEnum):
    """How the products of a layer's experts run."""

    SEPARATE = (
        "separate"  # one product after another for each expert (Transformer Engine's GroupedLinear)
    )
    GROUPED = "grouped"  # all experts in one kernel
    FUSED = "fused"  # with activations, biases and casts inside that kernel


class Optimizer(StrEnum):
    """The update rule, which decides the state kept for each weight."""

    ADAMW = "adamw"
    ADAMW8BIT = "adamw8bit"
    ADAFACTOR = "adafactor"
    MUON = "muon"
    SGD = "sgd"


# bytes of state for each trained weight beside fp32 master weights: AdamW keeps two moments, in
# fp32 or in blocks of eight bits; Adafactor's factored moment is a row and a column a matrix; Muon
# and SGD keep one moment. Without masters moments have the format of the weights.
STATE_BYTE = {
    Optimizer.ADAMW: 8.0,
    Optimizer.ADAMW8BIT: 2.0,
    Optimizer.ADAFACTOR: 0.0,
    Optimizer.MUON: 4.0,
    Optimizer.SGD: 4.0,
}


NARROW = {"fp8": Dtype.FP8, "nvfp4": Dtype.FP4}
NVFP4_BIT = 4.5  # of a value with its share of a scale of 16


@dataclass(frozen=True)
class TrainingRecipe:
    """Number formats, optimiser and software of a training run."""

    precision: str = (
        "bf16"  # bf16, fp16, fp32, or the format that linear layers alone multiply in: fp8, nvfp4
    )
    optimizer: Optimizer = Optimizer.ADAMW
    master_weights: bool = True  # fp32 copies of bf16 weights, which the optimiser updates
    gradient_byte: int = 4  # bytes of a gradient while it is summed: fp32 unless told
    stack: SoftwareStack = SoftwareStack.COMPILED
    attention: AttentionMode = AttentionMode.FLASH
    attention_slowdown: float = (
        1.0  # of an older attention kernel: its time over that of the one measured here
    )
    fused_loss: bool = (
        False  # the loss and its gradient are one kernel, in chunks, and the logits are never kept
    )
    loss_share: float = (
        0.05  # of the compute time, lost on several GPUs to input, logging and uneven clocks
    )
    expert_overlap: float = (
        0.2  # of exchanges between expert-parallel GPUs, hidden behind the work of other batches
    )
    expert_copies: bool = (
        False  # tokens travel once to each expert (NCCL's all-to-all), not once to each GPU
    )
    expert_kernels: ExpertKernels = ExpertKernels.GROUPED
    graphs: bool = False  # CUDA graphs replay the step, so that the GPU never waits for the host
    lora_rank: int = 0  # 0: all weights are trained
    base_bits: int = 16  # of frozen weights; 4 is QLoRA

    def __post_init__(self) -> None:
        known = ("bf16", "fp16", "fp32", *NARROW)
        for name, found, wanted, holds in (
            ("dtype", self.precision, "bf16, fp16, fp32, fp8 or nvfp4", self.precision in known),
            ("loss_share", self.loss_share, "at least 0 and below 1", 0.0 <= self.loss_share < 1.0),
            (
                "expert_overlap",
                self.expert_overlap,
                "at least 0 and below 1",
                0.0 <= self.expert_overlap < 1.0,
            ),
            ("gradient_byte", self.gradient_byte, "2 or 4", self.gradient_byte in (2, 4)),
            (
                "attention_slowdown",
                self.attention_slowdown,
                "a number above 0",
                self.attention_slowdown > 0.0,
            ),
            (
                "lora",
                self.lora_rank,
                "a rank of at least 1, or 0 to train all weights",
                self.lora_rank >= 0,
            ),
            ("base_bits", self.base_bits, "4, 8 or 16", self.base_bits in (4, 8, 16)),
        ):
            if not holds:
                raise bad_value(name, wanted, found)
        if self.stack is SoftwareStack.ENGINE:
            raise bad_value(
                "stack", "eager or compiled in training", "engine", "An engine only serves."
            )
        if self.base_bits != 16 and not self.lora_rank:
            raise bad_value(
                "base_bits", "16 where all weights are trained", self.base_bits, "Add --lora 16."
            )

    @property
    def dtype(self) -> Dtype:
        """The format of weights and activations."""
        return Dtype.BF16 if self.narrow else Dtype.parse(self.precision)

    @property
    def narrow(self) -> bool:
        """Whether linear layers multiply in a narrower format than that of weights and activations."""
        return self.precision in NARROW

    @property
    def narrow_byte(self) -> float:
        """Bytes of a weight's narrow copies, in both orders."""
        return {"fp8": 2.0, "nvfp4": 2 * NVFP4_BIT / 8}.get(self.precision, 0.0)

    @property
    def product_dtype(self) -> Dtype:
        """The format linear layers multiply in, whose peak utilisation is stated against."""
        return NARROW.get(self.precision, self.dtype)

    @property
    def state_byte(self) -> float:
        """Bytes of optimiser state and master weights for each trained weight."""
        moments = STATE_BYTE[self.optimizer]
        if self.optimizer is Optimizer.ADAMW8BIT or self.dtype is Dtype.FP32:
            return moments + (4.0 if self.has_masters else 0.0)
        return moments + 4.0 if self.has_masters else moments * self.dtype.byte / 4.0

    @property
    def has_masters(self) -> bool:
        """Whether the optimiser updates fp32 copies of narrower weights."""
        return self.master_weights and self.dtype is not Dtype.FP32


@dataclass(frozen=True)
class TrainingStrategy:
    """How GPUs share a model and its batch: ``tp``·``pp``·``cp``·``dp`` GPUs; ``ep`` of them share
    the experts.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sharding: Sharding = Sharding.ZERO1
    recompute: Recompute = Recompute.NONE
    micro_batch: int = 1  # sequences that one GPU group computes at a time
    accumulation: int = 1  # micro-batches a step
    interleave: int = 1  # model chunks a pipeline stage holds
    sequence_parallel: bool = True  # tensor-parallel GPUs share the tokens outside products

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """GPUs that hold copies of the same experts, of which ``ep`` neighbours have one each
        [NVIDIA2026].
        """
        return max(self.dp * self.cp * self.tp // self.ep, 1) if self.ep > 1 else self.dp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.dp * self.micro_batch * self.accumulation

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("dp", "tp", "pp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        words += [str(self.sharding)] if self.sharding is not Sharding.NONE and self.dp > 1 else []
        words += [f"recompute {self.recompute}"] if self.recompute is not Recompute.NONE else []
        words += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        return " ".join([*words, f"micro-batch {self.micro_batch} x {self.accumulation}"])


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


def list_strategies(
    gpus: int,
    dims: Any,
    node_gpus: int,
    given: TrainingStrategy,
    batch: int,
    free_batch: bool,
    recompute: Sequence[Recompute],
    micro_batch: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    sharding: Sharding | None = None,
) -> list[TrainingStrategy]:
    """List every way in which ``gpus`` GPUs, ``node_gpus`` to a node, can share a model of these
    dimensions.

    ``given`` holds what is never chosen. Of the rest, what is None is open. A ``free_batch`` was
    not given: it may grow to what GPUs can share."""
    heads = getattr(dims, "heads", 1)
    layers = getattr(dims, "layers", 1)
    kv_heads = getattr(dims, "kv_heads", heads)
    tps = [tp] if tp else [n for n in (1, 2, 4, 8) if n <= min(gpus, node_gpus) and heads % n == 0]
    pps = (
        [pp]
        if pp
        else [n for n in (1, 2, 4, 8, 16) if n <= layers and (n == 1 or gpus > node_gpus)]
    )
    if (pp or 1) > layers:
        raise bad_value("pp", f"at most the model's {layers} layers", pp)
    if given.interleave > 1 and (pp or 1) == 1:
        raise bad_value("interleave", "1 without pipeline stages", given.interleave, "Add --pp 4.")
    found: list[TrainingStrategy] = []
    for t, p in product(tps, pps):
        if heads % t or (kv_heads % t and t % kv_heads):
            raise bad_value("tp", f"a divisor of heads={heads}", t)
        dp, left = divmod(gpus, t * p * given.cp)
        if left:
            continue
        whole = max(-(-batch // dp), 1) * dp if free_batch else batch
        useful = [Sharding.ZERO1] if p > 1 else [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]
        shards = [sharding] if sharding else useful if dp * given.cp > 1 else [Sharding.NONE]
        sizes = [
            size
            for size in ([micro_batch] if micro_batch else MICRO_BATCHES)
            if whole % (dp * size) == 0
        ]
        for zero, again, size in product(shards, recompute, sizes):
            shared = replace(given, dp=dp, tp=t, pp=p, sharding=zero, recompute=again)
            found.append(replace(shared, micro_batch=size, accumulation=whole // (dp * size)))
    if gpus % (group := (tp or 1) * (pp or 1) * given.cp):
        raise bad_value("gpus", f"a multiple of tp x pp x cp = {group}", gpus)
    if not found:
        wanted = f"sequences that {gpus} GPUs can share evenly with these options"
        do = "--micro-batch, --tp or --pp"
        raise bad_value("global_batch", wanted, batch, f"Change --global-batch, {do}.")
    return found
