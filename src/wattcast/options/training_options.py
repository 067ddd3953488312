"""The options of a training job: what it trains, the recipe, how GPUs share it, and what it
loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype, bad_value
from wattcast.core.option_declaration import Option
from wattcast.options.run_options import AttentionMode, SoftwareStack
from wattcast.options.setting_options import (
    CARD_SETTINGS,
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.verb_options import VerbOptions, part_of

MINIMISE = ("time", "energy", "cost")
_RECIPE_PANEL = "The recipe"
_SHARING_PANEL = "How GPUs share it (chosen where not given)"
_LOSS_PANEL = "Hosts and pauses"


class LossCoefficients(Coefficients):
    """What jobs on several GPUs lose beside compute and exchanges."""

    share: float  # of the compute time


LOSSES = load_coefficients("training_losses", LossCoefficients)


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


class LoraTargets(StrEnum):
    """The linear layers that have a LoRA adapter."""

    ALL = "all"
    ATTENTION = "attention"  # those of attention alone, as PEFT has it unless told otherwise


class Fp8Scales(StrEnum):
    """What shares a scale in fp8, and when scales are found.

    Delayed ones are known from earlier steps, so that one kernel casts a tensor in both orders; all
    others are found anew before every product, weights too.
    """

    DELAYED = "delayed"  # Transformer Engine's first recipe
    TENSOR = "tensor"  # torchao's tensorwise, Transformer Engine's current scaling
    ROW = "row"  # torchao's rowwise
    BLOCK = "block"  # 1 x 128 tokens and 128 x 128 weights: torchao's prototype, DeepSeek


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


def parse_count(value: Any, where: str) -> float:
    """Read a count such as ``1B``, ``300M``, ``1.5T`` or ``1e9``.

    >>> parse_count("1.5B", "tokens")
    1500000000.0
    """
    if isinstance(value, str):
        text = value.strip().lower()
        factor = {
            "k": 1e3,
            "m": 1e6,
            "b": 1e9,
            "t": 1e12,
        }.get(text[-1:], 1.0)
        try:
            number = float(text[:-1] if factor > 1.0 else text) * factor
        except ValueError:
            raise bad_value(where, "a number such as 1B, 300M or 1e9", value) from None
    else:
        number = float(value)
    if not 0 < number < 1e18:
        raise bad_value(where, "a number above 0 and below 1e18", value)
    return number


def parse_documents(value: Any, where: str) -> tuple[float, ...]:
    """Read the lengths of documents, ``300,1200,8k``; a single number is their mean.

    >>> parse_documents("300,1.2k", "documents")
    (300.0, 1200.0)
    """
    parts = value.split(",") if isinstance(value, str) else value
    lengths = parts if isinstance(parts, list | tuple) else [parts]
    if not lengths:
        raise bad_value(where, "a mean in tokens, or lengths such as 300,1200", value)
    return tuple(parse_count(length, where) for length in lengths)


@dataclass(frozen=True)
class TrainingJob:
    """What is trained, on how many GPUs, and what decides between ways to share it."""

    gpus: Annotated[int, Option("GPUs in all.", least=1)] = 8
    tokens: Annotated[float, Option("Tokens to train on: 1B, 300M, 15T.", parse=parse_count)] = 1e9
    seq: Annotated[int | None, Option("Tokens of a sequence; default 4096.", least=1)] = None
    global_batch: Annotated[
        int | None, Option("Sequences of a step; default: 524,288 tokens.", least=1)
    ] = None
    minimise: Annotated[str, Option("The least time|energy|cost decides.", choices=MINIMISE)] = (
        "time"
    )
    network_byte_per_s: Annotated[
        float | None,
        Option(
            "Network rate of one GPU in one direction, such as 50GB/s.",
            panel=_SHARING_PANEL,
            unit="byte/s",
            above=0,
        ),
    ] = None


@dataclass(frozen=True)
class TrainingRecipe:
    """Number formats, optimiser and software of a training run."""

    # fp8 and nvfp4: the format that linear layers alone multiply in
    precision: Annotated[
        str,
        Option(
            "bf16|fp16|fp32|fp8|nvfp4",
            keyword="dtype",
            choices=("bf16", "fp16", "fp32", *NARROW),
        ),
    ] = "bf16"
    optimizer: Annotated[Optimizer, Option("adamw|adamw8bit|adafactor|muon|sgd")] = Optimizer.ADAMW
    fp8_scales: Annotated[
        Fp8Scales, Option("Scales of fp8 products: delayed|tensor|row|block.", panel=_RECIPE_PANEL)
    ] = Fp8Scales.DELAYED
    master_weights: Annotated[
        bool, Option("The optimiser updates fp32 copies of narrower weights.", panel=_RECIPE_PANEL)
    ] = True
    gradient_byte: Annotated[
        int, Option("Bytes of a gradient while it is summed: 2|4.", panel=_RECIPE_PANEL)
    ] = 4
    stack: Annotated[SoftwareStack, Option("PyTorch's kernels: compiled|eager.")] = (
        SoftwareStack.COMPILED
    )
    attention: Annotated[
        AttentionMode,
        Option("Attention kernels: flash, or eager as before 2022.", panel=_RECIPE_PANEL),
    ] = AttentionMode.FLASH
    attention_slowdown: Annotated[
        float,
        Option("Time of your attention kernel relative to cuDNN's of 2026.", panel=_RECIPE_PANEL),
    ] = 1.0
    fp8_attention: Annotated[
        bool,
        Option("Attention multiplies in fp8 as well, with --dtype fp8.", panel=_RECIPE_PANEL),
    ] = False
    # the loss and its gradient are one kernel, in chunks
    fused_loss: Annotated[
        bool, Option("Compute the loss without ever keeping all logits.", panel=_RECIPE_PANEL)
    ] = False
    loss_share: Annotated[
        float,
        Option("Share of compute lost to input and uneven clocks.", panel=_RECIPE_PANEL, unit=""),
    ] = LOSSES.share
    expert_overlap: Annotated[
        float,
        Option(
            "Share of expert exchanges that other work hides.",
            panel=_RECIPE_PANEL,
            unit="",
            most=1,
        ),
    ] = 0.2
    # NCCL's all-to-all; otherwise tokens travel once to each GPU
    expert_copies: Annotated[
        bool, Option("Send a token once to each of its experts (NCCL).", panel=_RECIPE_PANEL)
    ] = False
    expert_kernels: Annotated[
        ExpertKernels, Option("Products of experts: grouped|separate|fused.", panel=_RECIPE_PANEL)
    ] = ExpertKernels.GROUPED
    # attention stays inside each; a single number is their mean
    documents: Annotated[
        tuple[float, ...],
        Option(
            "Tokens of the documents that are packed into a sequence: 600, or 300,1200,...",
            panel=_RECIPE_PANEL,
            parse=parse_documents,
            commas=True,
        ),
    ] = ()
    mask_padding: Annotated[
        bool,
        Option(
            "Attention reads a mask (of padding, of a window) and skips nothing.",
            panel=_RECIPE_PANEL,
        ),
    ] = False
    graphs: Annotated[
        bool,
        Option("Replay the step with CUDA graphs; the host costs nothing.", panel=_RECIPE_PANEL),
    ] = False
    lora_rank: Annotated[
        int,
        Option(
            "Rank of LoRA adapters; 0 trains all weights.",
            keyword="lora",
            panel=_RECIPE_PANEL,
            least=0,
        ),
    ] = 0
    lora_targets: Annotated[
        LoraTargets, Option("Linear layers with adapters: all|attention.", panel=_RECIPE_PANEL)
    ] = LoraTargets.ALL
    base_bits: Annotated[
        int, Option("Bits of frozen weights: 16, 8, or 4 (QLoRA).", panel=_RECIPE_PANEL)
    ] = 16

    def __post_init__(self) -> None:
        if self.precision not in ("bf16", "fp16", "fp32", *NARROW):
            raise bad_value("dtype", "bf16, fp16, fp32, fp8 or nvfp4", self.precision)
        for name in ("loss_share", "expert_overlap"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise bad_value(name, "at least 0 and below 1", getattr(self, name))
        if self.gradient_byte not in (2, 4):
            raise bad_value("gradient_byte", "2 or 4", self.gradient_byte)
        if not self.attention_slowdown > 0.0:
            raise bad_value("attention_slowdown", "a number above 0", self.attention_slowdown)
        if self.lora_rank < 0:
            expected = "a rank of at least 1, or 0 to train all weights"
            raise bad_value("lora", expected, self.lora_rank)
        if self.lora_targets is not LoraTargets.ALL and not self.lora_rank:
            expected = "all where no layer has an adapter"
            raise bad_value("lora_targets", expected, str(self.lora_targets), "Add --lora 16.")
        if self.fp8_attention and not self.narrow:
            raise bad_value("fp8_attention", "dtype fp8 or nvfp4", self.precision)
        if self.fp8_scales is not Fp8Scales.DELAYED and self.precision != "fp8":
            do = "Add --dtype fp8."
            raise bad_value("fp8_scales", "delayed but for dtype fp8", str(self.fp8_scales), do)
        if self.base_bits not in (4, 8, 16):
            raise bad_value("base_bits", "4, 8 or 16", self.base_bits)
        if self.stack is SoftwareStack.ENGINE:
            do = "An engine only serves."
            raise bad_value("stack", "eager or compiled in training", "engine", do)
        if self.base_bits != 16 and not self.lora_rank:
            expected = "16 where all weights are trained"
            raise bad_value("base_bits", expected, self.base_bits, "Add --lora 16.")

    @property
    def dtype(self) -> Dtype:
        """The format of weights and activations."""
        return Dtype.BF16 if self.narrow else Dtype.parse(self.precision)

    @property
    def narrow(self) -> bool:
        """Whether linear layers multiply in a narrower format than that of weights and
        activations.
        """
        return self.precision in NARROW

    @property
    def narrow_byte(self) -> float:
        """Bytes of a weight's narrow copies, in both orders, that the optimiser writes.

        With scales found anew, weights are cast before each product instead.
        """
        if self.precision == "fp8" and self.fp8_scales is not Fp8Scales.DELAYED:
            return 0.0
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
class GpuSharing:
    """How GPUs share a job; what is None is chosen so that the job fits and is fast."""

    micro_batch: Annotated[
        int | None, Option("Sequences computed at a time.", panel=_SHARING_PANEL, least=1)
    ] = None
    tp: Annotated[int | None, Option("Tensor-parallel GPUs.", panel=_SHARING_PANEL, least=1)] = None
    pp: Annotated[int | None, Option("Pipeline stages.", panel=_SHARING_PANEL, least=1)] = None
    cp: Annotated[int, Option("GPUs that share a sequence.", panel=_SHARING_PANEL, least=1)] = 1
    ep: Annotated[int, Option("GPUs that share the experts.", panel=_SHARING_PANEL, least=1)] = 1
    interleave: Annotated[
        int, Option("Model chunks of a pipeline stage.", panel=_SHARING_PANEL, least=1)
    ] = 1
    sequence_parallel: Annotated[
        bool, Option("Share norms along the sequence, too.", panel=_SHARING_PANEL)
    ] = True
    sharding: Annotated[
        Sharding | None,
        Option(
            "What is sharded over replicas: none|zero1|zero2|zero3 (FSDP).", panel=_SHARING_PANEL
        ),
    ] = None
    recompute: Annotated[
        Recompute | None,
        Option("Activations to recompute: none|selective|full, or offload.", panel=_SHARING_PANEL),
    ] = None
    offload: Annotated[
        bool, Option("Activations may wait in the host's memory.", panel=_SHARING_PANEL)
    ] = False

    def __post_init__(self) -> None:
        if self.offload and self.recompute not in (None, Recompute.OFFLOAD):
            expected = "offload, or nothing, with --offload"
            do = "Leave one of the two away."
            raise bad_value("recompute", expected, str(self.recompute), do)


@dataclass(frozen=True)
class JobLosses:
    """What a job loses to pauses and failures, and what hosts draw."""

    host_share: Annotated[
        float,
        Option("Energy of hosts, network and fans over the GPUs'.", panel=_LOSS_PANEL, unit=""),
    ] = 0.25
    padding: Annotated[
        float,
        Option(
            "Share of tokens that are padding.",
            panel=_LOSS_PANEL,
            unit="",
            most=0.99,
        ),
    ] = 0.0
    pause_share: Annotated[
        float,
        Option(
            "Share of the time for evaluation and other work, at the power of steps.",
            panel=_LOSS_PANEL,
            unit="",
        ),
    ] = 0.0
    checkpoint_every: Annotated[
        int, Option("Steps between checkpoints; 0: none.", panel=_LOSS_PANEL, least=0)
    ] = 0
    checkpoint_time_s: Annotated[
        float,
        Option("Time that GPUs wait for each checkpoint, such as 9s.", panel=_LOSS_PANEL, unit="s"),
    ] = 0.0
    checkpoint_log: Annotated[
        str | Path | None,
        Option("Read checkpoints from a log, a CSV with step, seconds.", panel=_LOSS_PANEL),
    ] = None
    failures_per_gpu_day: Annotated[
        float, Option("Failures per GPU and day.", "failures", panel=_LOSS_PANEL, least=0)
    ] = 0.0
    lost_minutes: Annotated[
        float,
        Option("Work repeated after each failure, in minutes.", panel=_LOSS_PANEL, least=0),
    ] = 30.0

    def __post_init__(self) -> None:
        if self.checkpoint_log is not None and self.checkpoint_every:
            expected = "a log, or how often"
            raise bad_value("checkpoint-log and checkpoint-every", expected, "both")
        if bool(self.checkpoint_every) != bool(self.checkpoint_time_s):
            expected = "both, or neither: how often, and how long the GPUs wait"
            actual = f"{self.checkpoint_every} and {self.checkpoint_time_s:g} s"
            do = "Checkpoints that are written beside the steps cost no time: leave both away."
            raise bad_value("checkpoint-every and checkpoint-time", expected, actual, do)


TRAIN = VerbOptions(
    "train",
    TrainingJob,
    TrainingRecipe,
    GpuSharing,
    JobLosses,
    part_of(
        SettingOptions,
        *CARD_SETTINGS,
        "bundle",
        "node",
        "force",
    ),
    MachineOptions,
    PriceOptions,
)
