"""How a model is run: phase, sizes, number format, attention, software stack, parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypedDict, TypeVar, cast

from wattcast.core import Dtype, bad_value, unknown_name
from wattcast.core.errors import UnknownName
from wattcast.workload.model_catalogue import ModelKind, ModelSpec

SIZE_LIMIT = 1 << 31  # a larger size is a slip of the finger, and products would pass 64 bits
DEFAULT_TOKENS = 128
DECODE_GROUPS = 16
RUNNABLE_DTYPES = (Dtype.FP32, Dtype.TF32, Dtype.BF16, Dtype.FP16, Dtype.FP8, Dtype.INT8)


class WorkloadPhase(StrEnum):
    """The part of serving or training that is run."""

    PREFILL = "prefill"  # a whole prompt at once
    DECODE = "decode"  # one token a sequence, behind a cache of ``seq`` tokens
    GENERATE = "generate"  # a prefill and ``tokens - 1`` decode steps
    TRAIN = "train"  # forward, backward, optimiser
    FORWARD = "forward"  # one pass of a model that has no cache


class AttentionMode(StrEnum):
    """Whether attention writes its scores to memory operator by operator, or is one fused kernel."""

    EAGER = "eager"
    FLASH = "flash"


class OutputHead(StrEnum):
    """The tokens for which the language-model head runs."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class SoftwareStack(StrEnum):
    """The software that issues the kernels: PyTorch eager, a compiler that fuses, or an inference
    engine.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    ENGINE = "engine"


@dataclass(frozen=True)
class WeightRecipe:
    """How an engine keeps the weights of linear layers and experts, and what multiplies them.

    ``bit`` counts scales and zero points. With ``activations`` tokens are quantized to that format
    before each product (``mode``: a scale for a token or for 128 values of it); without, weights
    are widened on chip."""

    weights: str  # fp8, int8, int4 or fp4
    bit: float
    kernel: str
    activations: Dtype | None = None
    mode: str = ""
    expert_scales: str = ""
    group: int = -1  # weights that share a scale; -1: a whole row
    zero_points: bool = False
    experts_alone: bool = (
        False  # of a mixture only the experts are narrow, as gpt-oss was published
    )


# a scale of 16 bit, a zero of 4, for 128
_INT4_BIT = 4.0 + 16.0 / 128.0
_AWQ_BIT = 4.0 + (16.0 + 4.0) / 128.0
RECIPES = {
    "fp8": WeightRecipe("fp8", 8.0, "cutlass", Dtype.FP8, "token", "tensor"),
    "fp8-block": WeightRecipe(
        "fp8", 8.0 + 32.0 / 128.0**2, "deepgemm", Dtype.FP8, "block", "block"
    ),
    "w8a8": WeightRecipe("int8", 8.0, "cutlass", Dtype.INT8, "token", "tensor"),
    "awq": WeightRecipe("int4", _AWQ_BIT, "machete", None, "", "group", 128, True),
    "gptq": WeightRecipe("int4", _INT4_BIT, "machete", None, "", "group", 128),
    "gptq-8bit": WeightRecipe("fp8", 8.0 + 16.0 / 128.0, "marlin", None, "", "group", 128),
    "mxfp4": WeightRecipe(
        "fp4", 4.0 + 8.0 / 32.0, "marlin", None, "", "mx", 32, experts_alone=True
    ),
    "nvfp4": WeightRecipe("fp4", 4.0 + 8.0 / 16.0, "cutlass", Dtype.FP4, "block", "nv", 16),
}
UNQUANTIZED = "none"  # for a model whose published weights are narrow
WEIGHT_ONLY = {  # --weights
    "int4": RECIPES["gptq"],
    "fp8": WeightRecipe("fp8", 8.0, "marlin"),
    "fp4": replace(RECIPES["mxfp4"], experts_alone=False),
}
KV_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP8)


_PHASES = {
    ModelKind.LANGUAGE: tuple(WorkloadPhase),
    ModelKind.ENCODER: (WorkloadPhase.PREFILL, WorkloadPhase.FORWARD, WorkloadPhase.TRAIN),
    ModelKind.VISION: (WorkloadPhase.FORWARD, WorkloadPhase.TRAIN),
}
_SIZES = ("batch", "seq", "tokens", "tp", "pp", "dp", "ep", "cp", "image")
_ENUMS: dict[str, type[StrEnum]] = {
    "phase": WorkloadPhase,
    "dtype": Dtype,
    "attention": AttentionMode,
    "head": OutputHead,
    "stack": SoftwareStack,
    "kv_dtype": Dtype,
}


@dataclass(frozen=True)
class ModelOptions:
    """The choices of one run. None means the model's own default, which the graph then states."""

    batch: int = 1
    seq: int | None = None  # prompt length; in decode the tokens already in the cache
    tokens: int | None = None  # new tokens of ``generate``
    phase: WorkloadPhase | None = None
    dtype: Dtype = Dtype.BF16
    attention: AttentionMode = AttentionMode.FLASH
    head: OutputHead | None = None
    stack: SoftwareStack | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    # of tp * dp GPUs, those that share the experts; 1: tensor-parallel GPUs share each expert
    ep: int = 1
    cp: int = 1  # GPUs that share each sequence
    skew: float = 0.0  # 0: experts share tokens evenly; 1: all choices fall on the same experts
    recompute: bool = (
        False  # training: run each layer's forward again instead of keeping activations
    )
    image: int | None = None  # side of a square picture, in pixels (latent pixels for diffusion)
    quantization: str | None = (
        None  # a recipe of an engine, such as fp8-block (``RECIPES``); None: the model's own
    )
    weights: str | None = (
        None  # of an engine: weights alone in int4, fp8 or fp4, multiplied in ``dtype``
    )
    kv_dtype: Dtype | None = None  # of an engine's cache; None: as activations

    @classmethod
    def from_names(cls, **given: object) -> ModelOptions:
        """Make options from names and words as people and files give them."""
        for name in (name for name in given if name not in OPTION_NAMES):
            raise unknown_option_error(name)
        return cls(**given)  # type: ignore[arg-type]  # checked, and words looked up, when made

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            may_lack = getattr(ModelOptions, name) is None
            if not (type(value) is int and 0 < value < SIZE_LIMIT) and not (
                value is None and may_lack
            ):
                raise bad_value(name, f"a whole number from 1 to {SIZE_LIMIT - 1}", value)
        for name, kind in _ENUMS.items():
            value = getattr(self, name)
            may_lack = getattr(ModelOptions, name) is None
            if type(value) is not kind and not (value is None and may_lack):
                object.__setattr__(self, name, parse_word(kind, name, value))
        if not (isinstance(self.skew, (int, float)) and 0.0 <= self.skew <= 1.0):
            raise bad_value(
                "skew", "a number from 0 (balanced) to 1 (the same experts always)", self.skew
            )
        if self.dtype not in RUNNABLE_DTYPES:
            raise bad_value("dtype", f"one of {', '.join(RUNNABLE_DTYPES)}", str(self.dtype))
        if self.tokens is not None and self.phase is not WorkloadPhase.GENERATE:
            raise bad_value(
                "tokens", "phase generate", str(self.phase), "Leave tokens out, or choose generate."
            )
        training = self.phase is WorkloadPhase.TRAIN
        if self.recompute and not training:
            raise bad_value(
                "recompute", "phase train", str(self.phase), "Only training keeps activations."
            )
        if training and self.dtype in (Dtype.FP8, Dtype.INT8):
            raise bad_value("dtype", "fp32, tf32, bf16 or fp16 in training", str(self.dtype))
        if training and self.stack is SoftwareStack.ENGINE:
            raise bad_value(
                "stack", "eager or compiled in training", "engine", "An engine only serves."
            )
        known_words = {
            "quantization": (*RECIPES, UNQUANTIZED),
            "weights": WEIGHT_ONLY,
            "kv_dtype": KV_DTYPES,
        }
        for name, known in known_words.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise bad_value(name, f"one of {', '.join(known)}", value)
            if value is not None and self.stack not in (None, SoftwareStack.ENGINE):
                raise bad_value(name, "stack engine", str(self.stack), "Ask for --stack engine.")
        if self.quantization not in (None, UNQUANTIZED) and self.weights is not None:
            raise bad_value(
                "weights", "no recipe beside it", self.quantization, "Give one of the two."
            )
        if self.recipe is not None and self.dtype not in (Dtype.BF16, Dtype.FP16, Dtype.FP8):
            raise bad_value("dtype", "bf16 or fp16 with narrow weights", str(self.dtype))

    @property
    def recipe(self) -> WeightRecipe | None:
        """Return how weights are kept; ``dtype`` fp8 on an engine is the recipe of that name."""
        if self.weights is not None:
            return WEIGHT_ONLY[self.weights]
        if self.quantization not in (None, UNQUANTIZED):
            return RECIPES[self.quantization]
        served_fp8 = self.stack is SoftwareStack.ENGINE and self.dtype is Dtype.FP8
        return RECIPES["fp8"] if served_fp8 else None

    @property
    def gpu_count(self) -> int:
        """GPUs of all groups; experts are shared by GPUs that are there anyway."""
        return self.tp * self.pp * self.dp * self.cp


OPTION_NAMES = tuple(item.name for item in fields(ModelOptions))


class ModelKeywords(TypedDict, total=False):
    """The fields of ``ModelOptions`` as functions take them: ``**options: Unpack[ModelKeywords]``."""

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
    quantization: str | None
    weights: str | None
    kv_dtype: str | None


_Word = TypeVar("_Word", bound=StrEnum)


def parse_word(kind: type[_Word], name: str, value: object) -> _Word:
    """Return the member of an enum that a user's word names."""
    if kind is Dtype and isinstance(value, str):
        return cast(_Word, Dtype.parse(value))
    try:
        return kind(str(value))
    except ValueError:
        raise bad_value(name, f"one of {', '.join(kind)}", value) from None


def parse_option(name: str, text: str, where: str) -> Any:
    """Return the value of an option as people write it: ``8`` for batch, ``yes`` for recompute,
    words as they are.
    """
    kind = str(ModelOptions.__annotations__[name])
    if "int" not in kind and "float" not in kind:
        return text.lower() in ("yes", "true", "1") if kind == "bool" else text
    try:
        return int(text) if "int" in kind else float(text)
    except ValueError:
        wanted = "a whole number" if "int" in kind else "a number"
        raise bad_value(f"{where}: {name}", wanted, text) from None


def unknown_option_error(name: str, settings: Iterable[str] = ()) -> UnknownName:
    """Return the error for a name that is no option; ``settings`` are further names known where it
    was given.
    """
    settings = tuple(settings)
    known = f"Options of a model: {', '.join(OPTION_NAMES)}."
    if settings:
        known += f" Settings beside them: {', '.join(settings)}."
    return unknown_name("option", name, OPTION_NAMES + settings, known)


def resolve_options(model: ModelSpec, options: ModelOptions) -> tuple[ModelOptions, list[str]]:
    """Replace None by the model's defaults; return a sentence for each default and each assumption
    as well.
    """
    said: list[str] = []
    taken: dict[str, Any] = {}

    def take(name: str, value: Any, why: str = "default") -> Any:
        taken[name] = value
        said.append(f"{name} {value} ({why})")
        return value

    kind = model.kind
    usual = WorkloadPhase.FORWARD if kind is ModelKind.VISION else WorkloadPhase.PREFILL
    phase = options.phase or take("phase", usual, f"default of a {kind} model")
    if phase not in _PHASES[kind]:
        raise bad_value(f"{model.name}: phase", f"one of {', '.join(_PHASES[kind])}", str(phase))
    if kind is ModelKind.VISION:
        if options.seq is not None:
            raise bad_value(
                f"{model.name}: seq", "no sequence length for a vision model", options.seq
            )
        image = options.image
        if image is None:
            taken["image"] = image = model.dims.image
            said.append(f"pictures of {image} by {image} (the published input)")
        # Refuse pictures that the network cannot halve or cut into patches evenly
        steps = {"resnet": 32, "swin": 32, "mobilevit": 64, "unet": 8}
        step = steps.get(model.architecture, getattr(model.dims, "patch", 1))
        if image < step or image % step:
            raise bad_value(f"{model.name}: image", f"a multiple of {step} pixels", image)
    else:
        if options.image is not None:
            raise bad_value(f"{model.name}: image", f"no picture for a {kind} model", options.image)
        positions = getattr(model.dims, "max_positions", 0)
        length = 512 if kind is ModelKind.ENCODER else 1024
        seq = options.seq or take("seq", min(length, positions) if positions else length)
        generating = phase is WorkloadPhase.GENERATE
        tokens = options.tokens or (take("tokens", DEFAULT_TOKENS) if generating else None)
        most = count_positions(model)
        longest = seq + (tokens or 1) - 1
        if most is not None and longest > most:
            said.append(f"{longest} positions are more than the {most} this model was made for")
        if options.head is None:
            serving = OutputHead.NONE if kind is ModelKind.ENCODER else OutputHead.LAST
            take("head", OutputHead.ALL if phase is WorkloadPhase.TRAIN else serving)
    asked = options.quantization or options.weights or options.dtype is not Dtype.BF16
    served = phase is not WorkloadPhase.TRAIN and options.stack in (None, SoftwareStack.ENGINE)
    if model.quantization is not None and served and not asked:
        why = "as it is published; --quantization none: as wide as --dtype"
        options = replace(options, quantization=take("quantization", model.quantization, why))
    if model.kv_dtype is not None and served and not asked and options.kv_dtype is None:
        why = "as it is published; --kv-dtype bf16: as wide as activations"
        options = replace(options, kv_dtype=take("kv_dtype", model.kv_dtype, why))
    if options.stack is None:
        # an engine for what engines serve; PyTorch eager for training, encoders, pictures and sound
        language = model.kind is ModelKind.LANGUAGE and model.template.engine
        serving_phase = phase in (
            WorkloadPhase.PREFILL,
            WorkloadPhase.DECODE,
            WorkloadPhase.GENERATE,
        )
        by_engine = language and serving_phase and options.attention is AttentionMode.FLASH
        narrow = [
            name
            for name in ("quantization", "weights", "kv_dtype")
            if getattr(options, name) is not None
        ]
        if narrow and not (model.template.engine and phase is not WorkloadPhase.TRAIN):
            raise bad_value(
                narrow[0], "a language model that an engine serves", f"{model.name} {phase}"
            )
        why = f"default of {phase} for a {kind} model{' in narrow formats' if narrow else ''}"
        take("stack", SoftwareStack.ENGINE if narrow or by_engine else SoftwareStack.EAGER, why)
    options = replace(options, **taken) if taken else options
    check_parallelism(model, options)
    return options, said + describe_assumptions(model, options)


def count_output(model: ModelSpec, options: ModelOptions) -> tuple[int | None, int | None]:
    """Count the tokens and the items (pictures, audio clips) of one run on all GPUs together.

    Tokens are prompt tokens in a prefill, new tokens in decode (one a sequence) and in generate
    (its prefill costs time and energy but its prompt does not count), and tokens trained on in
    training. A decode step finishes no item."""
    sequences = options.batch * options.dp
    items = sequences if model.template.item and options.phase is not WorkloadPhase.DECODE else None
    if model.kind is ModelKind.VISION:
        return None, items
    generating = options.phase is WorkloadPhase.GENERATE
    length = (
        1
        if options.phase is WorkloadPhase.DECODE
        else options.tokens
        if generating
        else options.seq
    )
    return sequences * (length or 1), items


def check_parallelism(model: ModelSpec, options: ModelOptions) -> None:
    """Check that GPUs share heads, widths and experts evenly, and that each stage has a layer."""
    dims: Any = model.dims
    tp = options.tp
    pp = options.pp
    dp = options.dp
    ep = options.ep
    cp = options.cp
    kv_heads = getattr(dims, "kv_heads", tp)
    experts = getattr(dims, "experts", 0)
    layers = getattr(dims, "layers", getattr(dims, "decoder_layers", 1))
    training = options.phase is WorkloadPhase.TRAIN
    served = options.stack is SoftwareStack.ENGINE
    by_engine = (
        served and model.kind is ModelKind.LANGUAGE and hasattr(dims, "kv_heads") and not training
    )
    shared = ("heads", "intermediate", "expert_intermediate", "shared_intermediate")
    widths = {of: getattr(dims, of, 0) for of in shared if model.kind is not ModelKind.VISION}
    whole = f"a divisor of tp={tp}, or a multiple of it that divides tp * dp = {tp * dp}"
    alone = "1 but for language models with keys and values of heads, served by an engine (--stack engine)"
    for name, is_wrong, wanted, do in (
        ("tp", tp > 1 and model.kind is ModelKind.VISION, "1 for a vision model", ""),
        *(("tp", size % tp, f"a divisor of {of}={size}", "") for of, size in widths.items()),
        (
            "tp",
            kv_heads % tp and tp % kv_heads,
            f"a divisor or multiple of kv_heads={kv_heads}",
            "",
        ),
        ("ep", ep > 1 and not experts, "1 for a model without experts", ""),
        ("ep", ep > 1 and training, "1 in training", "Use --tp."),
        ("ep", experts % ep, f"a divisor of its {experts} experts", ""),
        (
            "ep",
            (tp % ep and ep % tp) or tp * dp % ep,
            whole,
            "Set --tp or --dp to the GPUs that share the experts.",
        ),
        ("cp", cp > 1 and not by_engine, alone, ""),
        (
            "cp",
            cp > 1 and (options.seq or 1) < cp,
            f"at most as many GPUs as tokens (seq {options.seq})",
            "",
        ),
        ("pp", pp > layers, f"at most as many stages as layers ({layers})", ""),
    ):
        if is_wrong:
            raise bad_value(f"{model.name}: {name}", wanted, getattr(options, name), do)


def describe_assumptions(model: ModelSpec, options: ModelOptions) -> list[str]:
    """Return a sentence for everything that holds for this run and is not an option."""
    o = options
    dtype = activation_dtype(options)
    phase = options.phase
    recipe = options.recipe
    by_engine = o.stack is SoftwareStack.ENGINE
    seq = o.seq
    group = decode_group_size((o.tokens or 1) - 1)
    decoding = phase in (WorkloadPhase.DECODE, WorkloadPhase.GENERATE)
    grouped = getattr(model.dims, "kv_heads", 0) not in (0, getattr(model.dims, "heads", 0))
    formats = ""
    experts = ""
    if grouped and dtype is Dtype.FP32 and o.attention is AttentionMode.FLASH:
        formats = "fused attention is assumed, though PyTorch has no fused kernel for grouped queries in fp32"
    elif recipe is not None:
        formats = f"linear weights in {recipe.weights} ({recipe.bit:.3g} bit with scales), "
        scale = f"{recipe.activations} with a scale for {'128 values' if recipe.mode == 'block' else 'a token'}"
        widened = f"widened on chip and multiplied in bf16 by {recipe.kernel}"
        widened += " (on other GPUs than Hopper by marlin)" * (recipe.kernel == "machete")
        formats += widened if recipe.activations is None else f"activations quantized to {scale}"
        formats += "; all else in bf16"
    elif o.dtype is Dtype.FP8:
        formats = "fp8: linear layers multiply in fp8, activations cast by static scales; all else in bf16"
    elif o.dtype is Dtype.INT8:
        formats = "int8: weights of linear layers are kept in int8 and multiplied in bf16; all else in bf16"
    if getattr(model.dims, "experts", 0):
        even = "tokens are spread evenly over the experts"
        drawn = "each token draws its experts at random, all alike; an expert that none draws is not read"
        skewed = f"a share of {o.skew:g} of all expert choices falls on the same experts, the rest is even"
        experts = skewed if o.skew else drawn if by_engine else even
    by_chance = "by chance and skew" if o.skew else "by chance"
    said = {
        f"{model.name}: {model.note}": model.note,
        "no padding: all sequences are of one length": model.kind is not ModelKind.VISION,
        f"one new token a sequence behind a cache of {seq}": phase is WorkloadPhase.DECODE,
        f"an encoder reads {seq} tokens; the decoder begins with a start token": model.template.source,
        "the cache grows by concatenation (Hugging Face DynamicCache)": decoding and not by_engine,
        f"the prefill yields the first token; decode steps in groups of {group}, each at its mean context": (
            phase is WorkloadPhase.GENERATE
        ),
        f"weights, gradients and AdamW moments in {dtype}; fused AdamW, no clipping": phase
        is WorkloadPhase.TRAIN,
        formats: formats,
        _FP32_NOTE: o.dtype is Dtype.FP32,
        "tf32: matrix products and convolutions round fp32 to TF32 (torch.set_float32_matmul_precision('high'))": (
            o.dtype is Dtype.TF32
        ),
        "compiled: pointwise runs and row reductions are fused as TorchInductor does; products are not": (
            o.stack is SoftwareStack.COMPILED
        ),
        f"engine: vLLM's kernels, merged projections, paged cache in {o.kv_dtype or dtype}; weights and activations "
        "as random numbers of usual size": by_engine and model.template.engine,
        f"no engine template for {model.architecture}: fused as a compiler would": (
            by_engine and not model.template.engine
        ),
        experts: experts,
        f"one of {o.tp} tensor-parallel GPUs; heads, feed-forward width and vocabulary are shared out": o.tp
        > 1,
        f"one of {o.pp} pipeline stages, with the largest share of the layers and both embedding and head; waiting "
        "for other stages is not counted": o.pp > 1,
        f"one of {o.dp} replicas, each with its own batch": o.dp > 1,
        f"experts are spread over {o.ep} GPUs, and this is the one that gets most tokens {by_chance}": o.ep
        > 1,
        f"one of {o.cp} GPUs that share each sequence and its cache": o.cp > 1,
    }
    return [sentence for sentence, holds in said.items() if holds]


_FP32_NOTE = (
    "fp32 as PyTorch computes it by default: matrix products on CUDA cores, convolutions in TF32 "
    "on cards that have it (torch.backends.cudnn.allow_tf32); --dtype tf32 for both"
)


def count_positions(model: ModelSpec) -> int | None:
    """Count the tokens that a model can tell the places of; None where it is not known."""
    positions = getattr(model.dims, "max_positions", 0)
    if not positions:
        return None
    # RoBERTa begins after its padding's
    return int(positions) - (2 if getattr(model.dims, "counted_positions", False) else 0)


def decode_group_size(steps: int) -> int:
    """Return how many decode steps share one context: an odd number, which gives about sixteen
    groups at most.
    """
    return max(-(-steps // DECODE_GROUPS) | 1, 1)


def activation_dtype(options: ModelOptions) -> Dtype:
    """Return the format of activations: fp8 and int8 narrow the linear weights only."""
    if options.dtype is Dtype.TF32:
        return Dtype.FP32
    return Dtype.BF16 if options.dtype in (Dtype.FP8, Dtype.INT8) else options.dtype


def name_graph(model: ModelSpec, options: ModelOptions) -> str:
    """Return a name such as ``llama3-8b prefill b8 s1024 bf16``."""
    size = f"i{options.image}" if model.kind is ModelKind.VISION else f"s{options.seq}"
    words = [model.name, str(options.phase), f"b{options.batch}", size]
    if options.tokens:
        words.append(f"t{options.tokens}")
    recipe = options.quantization if options.quantization != UNQUANTIZED else None
    words.append(recipe or (f"w-{options.weights}" if options.weights else str(options.dtype)))
    if options.kv_dtype is not None:
        words.append(f"kv-{options.kv_dtype}")
    counts = {name: getattr(options, name) for name in ("tp", "pp", "dp", "ep", "cp")}
    words += [
        str(options.stack),
        *(f"{name}{count}" for name, count in counts.items() if count > 1),
    ]
    return " ".join(words)
