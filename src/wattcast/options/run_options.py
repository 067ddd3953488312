"""The options of one run of a model: phase, sizes, number format, software stack, parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated

from wattcast.core import (
    Dtype,
    bad_value,
    bad_word,
    unknown_name,
)
from wattcast.core.errors import UnknownName
from wattcast.core.option_declaration import Option, parse_word
from wattcast.options.weight_recipes import (
    RECIPES,
    UNQUANTIZED,
    WEIGHT_ONLY,
    WeightRecipe,
)

SIZE_LIMIT = 1 << 31  # a larger size is a slip of the finger, and products would pass 64 bits
RUNNABLE_DTYPES = (Dtype.FP32, Dtype.TF32, Dtype.BF16, Dtype.FP16, Dtype.FP8, Dtype.INT8)
KV_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP8)
NARROW_FORMATS = {
    "quantization": (*RECIPES, UNQUANTIZED),
    "weights": tuple(WEIGHT_ONLY),
    "kv_dtype": tuple(map(str, KV_DTYPES)),
}
_MODEL_PANEL = "The model"
_PARALLEL_PANEL = "Several GPUs"


class WorkloadPhase(StrEnum):
    """The part of serving or training that is run."""

    PREFILL = "prefill"  # a whole prompt at once
    DECODE = "decode"  # one token a sequence, behind a cache of ``seq`` tokens
    # a prefill and ``tokens - 1`` decode steps; of a denoiser a whole picture of ``steps`` steps
    GENERATE = "generate"
    TRAIN = "train"  # forward, backward, optimiser
    FORWARD = "forward"  # one pass of a model that has no cache; of a denoiser one step


class AttentionMode(StrEnum):
    """Whether attention writes its scores to memory operator by operator, or is one fused
    kernel.
    """

    EAGER = "eager"
    FLASH = "flash"


class OutputHead(StrEnum):
    """The tokens for which the language-model head runs."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class TokenSampling(StrEnum):
    """How an engine draws the next token of each sequence from its logits."""

    GREEDY = "greedy"  # the likeliest one (temperature 0)
    RANDOM = "random"  # of all words, by their probabilities
    TOP_K = "top-k"  # of the k likeliest words
    TOP_P = "top-p"  # of the likeliest words that make up a share of the probability
    TOP_K_TOP_P = "top-k-top-p"  # both, as many models ship it
    PENALTIES = "penalties"  # random, with penalties for words that were there


class WeightUpdate(StrEnum):
    """How a training step updates the weights by AdamW."""

    FUSED = "fused"  # in one pass over weights, gradients and moments
    # in fp32 beside weights in half precision, with loss scale and clipping, as apex's O2 and AMP
    # do
    MASTERS = "masters"
    SEPARATE = "separate"  # operator by operator and tensor by tensor, with clipping


class SoftwareStack(StrEnum):
    """The software that issues the kernels: PyTorch eager, a compiler that fuses, or an inference
    engine.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    ENGINE = "engine"


@dataclass(frozen=True)
class ModelOptions:
    """The choices of one run. None means the model's own default, which the graph then states."""

    batch: Annotated[int, Option("Sequences or images at once.", least=1)] = 1
    seq: Annotated[
        int | None, Option("Prompt length; in decode the length of the cache.", least=1)
    ] = None
    tokens: Annotated[int | None, Option("New tokens that phase generate makes.", least=1)] = None
    phase: Annotated[WorkloadPhase | None, Option("prefill|decode|generate|train|forward")] = None
    dtype: Annotated[
        Dtype,
        Option("fp32|tf32|bf16|fp16|fp8|int8", choices=tuple(map(str, RUNNABLE_DTYPES))),
    ] = Dtype.BF16
    attention: Annotated[AttentionMode, Option("eager|flash", panel=_MODEL_PANEL)] = (
        AttentionMode.FLASH
    )
    head: Annotated[
        OutputHead | None, Option("Tokens that get logits: none|last|all.", panel=_MODEL_PANEL)
    ] = None
    stack: Annotated[
        SoftwareStack | None, Option("eager|compiled|engine; default for serving: engine")
    ] = None
    tp: Annotated[int, Option("Tensor-parallel GPUs.", least=1)] = 1
    pp: Annotated[int, Option("Pipeline stages.", panel=_PARALLEL_PANEL, least=1)] = 1
    dp: Annotated[int, Option("Data-parallel replicas.", panel=_PARALLEL_PANEL, least=1)] = 1
    # of tp * dp GPUs; 1: tensor-parallel GPUs share each expert
    ep: Annotated[int, Option("GPUs that share the experts.", panel=_PARALLEL_PANEL, least=1)] = 1
    cp: Annotated[int, Option("GPUs that share a sequence.", panel=_PARALLEL_PANEL, least=1)] = 1
    # 0: experts share tokens evenly; 1: all choices fall on the same experts
    skew: Annotated[
        float,
        Option(
            "Load of experts: 0 even, 1 all on the same.",
            panel=_PARALLEL_PANEL,
            least=0,
            most=1,
        ),
    ] = 0.0
    recompute: Annotated[
        bool, Option("In training, recompute activations.", panel=_MODEL_PANEL)
    ] = False
    image: Annotated[int | None, Option("Side of a picture in pixels.", least=1)] = None
    steps: Annotated[
        int | None,
        Option("Denoising steps of a picture.", least=1),
    ] = None
    quantization: Annotated[
        str | None,
        Option(
            "Engine: fp8|fp8-block|w8a8|awq|gptq|mxfp4|nvfp4|none.",
            choices=NARROW_FORMATS["quantization"],
        ),
    ] = None
    weights: Annotated[
        str | None,
        Option(
            "Narrow the weights alone in an engine: int4|fp8|fp4.",
            panel=_MODEL_PANEL,
            choices=NARROW_FORMATS["weights"],
        ),
    ] = None
    kv_dtype: Annotated[
        Dtype | None,
        Option(
            "Number format of an engine's cache: bf16|fp16|fp8.",
            panel=_MODEL_PANEL,
            choices=NARROW_FORMATS["kv_dtype"],
        ),
    ] = None
    lora: Annotated[
        int | None,
        Option("Rank of LoRA adapters that an engine serves.", panel=_MODEL_PANEL, least=1),
    ] = None
    adapters: Annotated[
        int | None,
        Option("Adapters that requests use in turn; default 1.", panel=_MODEL_PANEL, least=1),
    ] = None
    sampling: Annotated[
        TokenSampling | None,
        Option(
            "How an engine draws tokens: greedy|random|top-k|top-p| top-k-top-p|penalties.",
            panel=_MODEL_PANEL,
        ),
    ] = None
    channels_last: Annotated[
        bool, Option("Pictures lie in memory pixel by pixel.", panel=_MODEL_PANEL)
    ] = False
    update: Annotated[
        WeightUpdate | None,
        Option("AdamW in training: fused|masters|separate.", panel=_MODEL_PANEL),
    ] = None

    @classmethod
    def from_names(cls, **keywords: object) -> ModelOptions:
        """Make options from names and words as people and files give them."""
        for name in keywords:
            if name not in OPTION_NAMES:
                raise unknown_option_error(name)
        return cls(**keywords)  # type: ignore[arg-type]  # checked, and words looked up, when made

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._check_size(name)
        for name, kind in _ENUMS.items():
            value = getattr(self, name)
            may_lack = getattr(ModelOptions, name) is None
            if type(value) is not kind and not (value is None and may_lack):
                object.__setattr__(self, name, parse_word(kind, name, value))
        if not (isinstance(self.skew, (int, float)) and 0.0 <= self.skew <= 1.0):
            expected = "a number from 0 (balanced) to 1 (the same experts always)"
            raise bad_value("skew", expected, self.skew)
        if self.dtype not in RUNNABLE_DTYPES:
            raise bad_word("dtype", map(str, RUNNABLE_DTYPES), str(self.dtype))
        self._check_adapters()
        if self.sampling is not None and self.stack not in (None, SoftwareStack.ENGINE):
            do = "Ask for --stack engine: only engines draw tokens."
            raise bad_value("sampling", "stack engine", str(self.stack), do)
        self._check_phase()
        self._check_narrow_formats()

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        may_lack = getattr(ModelOptions, name) is None
        if value is None and may_lack:
            return
        if type(value) is not int or not 0 < value < SIZE_LIMIT:
            raise bad_value(name, f"a whole number from 1 to {SIZE_LIMIT - 1}", value)

    def _check_adapters(self) -> None:
        """Check that adapters are served by an engine, and have a rank."""
        if self.adapters is not None and self.lora is None:
            do = "Give their rank, such as --lora 16."
            raise bad_value("adapters", "a rank beside it", "none", do)
        if self.lora is not None and self.stack not in (None, SoftwareStack.ENGINE):
            do = "Ask for --stack engine; `wattcast train --lora` trains adapters."
            raise bad_value("lora", "stack engine", str(self.stack), do)

    def _check_phase(self) -> None:
        """Check that options which belong to one phase come with it."""
        if self.tokens is not None and self.phase is not WorkloadPhase.GENERATE:
            do = "Leave tokens out, or choose generate."
            raise bad_value("tokens", "phase generate", str(self.phase), do)
        if self.steps is not None and self.phase not in (None, WorkloadPhase.GENERATE):
            do = "Leave steps out, or choose generate: another phase runs one step."
            raise bad_value("steps", "phase generate", str(self.phase), do)
        is_training = self.phase is WorkloadPhase.TRAIN
        if self.recompute and not is_training:
            do = "Only training keeps activations."
            raise bad_value("recompute", "phase train", str(self.phase), do)
        if self.update is not None and not is_training:
            do = "Only training updates weights."
            raise bad_value("update", "phase train", str(self.phase), do)
        if self.update is WeightUpdate.MASTERS and self.dtype not in (Dtype.BF16, Dtype.FP16):
            do = "Weights in fp32 are their own masters."
            raise bad_value("update", "dtype bf16 or fp16 with masters", str(self.dtype), do)
        if is_training and self.dtype in (Dtype.FP8, Dtype.INT8):
            raise bad_value("dtype", "fp32, tf32, bf16 or fp16 in training", str(self.dtype))
        if is_training and self.stack is SoftwareStack.ENGINE:
            do = "An engine only serves."
            raise bad_value("stack", "eager or compiled in training", "engine", do)

    def _check_narrow_formats(self) -> None:
        """Check the formats of an engine's weights and cache."""
        for name, choices in NARROW_FORMATS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if value not in choices:
                raise bad_word(name, choices, value)
            if self.stack not in (None, SoftwareStack.ENGINE):
                raise bad_value(name, "stack engine", str(self.stack), "Ask for --stack engine.")
        if self.quantization not in (None, UNQUANTIZED) and self.weights is not None:
            do = "Give one of the two."
            raise bad_value("weights", "no recipe beside it", self.quantization, do)
        if self.recipe is not None and self.dtype not in (Dtype.BF16, Dtype.FP16, Dtype.FP8):
            raise bad_value("dtype", "bf16 or fp16 with narrow weights", str(self.dtype))

    @property
    def recipe(self) -> WeightRecipe | None:
        """Return how weights are kept; ``dtype`` fp8 on an engine is the recipe of that name."""
        if self.weights is not None:
            return WEIGHT_ONLY[self.weights]
        if self.quantization is not None and self.quantization != UNQUANTIZED:
            return RECIPES[self.quantization]
        is_served_fp8 = self.stack is SoftwareStack.ENGINE and self.dtype is Dtype.FP8
        return RECIPES["fp8"] if is_served_fp8 else None

    @property
    def gpu_count(self) -> int:
        """GPUs of all groups; experts are shared by GPUs that are there anyway."""
        return self.tp * self.pp * self.dp * self.cp


OPTION_NAMES = tuple(item.name for item in fields(ModelOptions))
_SIZES = (
    *("batch", "seq", "tokens", "tp", "pp", "dp", "ep", "cp", "image", "steps"),
    *("lora", "adapters"),
)
_ENUMS: dict[str, type[StrEnum]] = {
    "phase": WorkloadPhase,
    "dtype": Dtype,
    "attention": AttentionMode,
    "head": OutputHead,
    "stack": SoftwareStack,
    "kv_dtype": Dtype,
    "sampling": TokenSampling,
    "update": WeightUpdate,
}


def unknown_option_error(name: str, settings: Iterable[str] = ()) -> UnknownName:
    """Return the error for a name that is no option; ``settings`` are further names known where it
    was given.
    """
    settings = tuple(settings)
    hint = f"Options of a model: {', '.join(OPTION_NAMES)}."
    if settings:
        hint += f" Settings beside them: {', '.join(settings)}."
    return unknown_name("option", name, OPTION_NAMES + settings, hint)
