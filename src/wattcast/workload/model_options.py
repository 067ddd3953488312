"""How a model is run: phase, sizes, number format, attention, software stack, parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wattcast.core import (
    Dtype,
    bad_value,
    bad_word,
)
from wattcast.core.option_declaration import list_declared
from wattcast.core.option_declaration import parse_word as parse_word
from wattcast.options.run_options import KV_DTYPES as KV_DTYPES
from wattcast.options.run_options import OPTION_NAMES as OPTION_NAMES
from wattcast.options.run_options import RUNNABLE_DTYPES as RUNNABLE_DTYPES
from wattcast.options.run_options import SIZE_LIMIT as SIZE_LIMIT
from wattcast.options.run_options import AttentionMode as AttentionMode
from wattcast.options.run_options import ModelOptions as ModelOptions
from wattcast.options.run_options import OutputHead as OutputHead
from wattcast.options.run_options import SoftwareStack as SoftwareStack
from wattcast.options.run_options import TokenSampling as TokenSampling
from wattcast.options.run_options import WeightUpdate as WeightUpdate
from wattcast.options.run_options import WorkloadPhase as WorkloadPhase
from wattcast.options.run_options import unknown_option_error as unknown_option_error
from wattcast.options.weight_recipes import RECIPES as RECIPES
from wattcast.options.weight_recipes import UNQUANTIZED as UNQUANTIZED
from wattcast.options.weight_recipes import WEIGHT_ONLY as WEIGHT_ONLY
from wattcast.options.weight_recipes import WeightRecipe as WeightRecipe
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.picture_pipeline import describe_pipeline

DEFAULT_TOKENS = 128
DECODE_GROUPS = 16
# architectures that see a latent of the picture
LATENT_NETWORKS = (
    *("unet", "dit", "joint", "video"),
    *("pixart", "hunyuan_dit", "cogvideo", "hunyuan_video"),
    "vae_decoder",
)
LATENT_SIDE = 8  # pixels of the picture to one of the latent
_PHASES = {
    ModelKind.LANGUAGE: tuple(WorkloadPhase),
    ModelKind.ENCODER: (WorkloadPhase.PREFILL, WorkloadPhase.FORWARD, WorkloadPhase.TRAIN),
    ModelKind.VISION: (WorkloadPhase.FORWARD, WorkloadPhase.TRAIN),
}


def parse_option(
    name: str,
    text: str,
    where: str,
) -> Any:
    """Return the value of an option as people write it: ``8`` for batch, ``yes`` for recompute,
    words as they are.
    """
    kinds = _OPTION_KINDS[name]
    if bool in kinds:
        return text.lower() in ("yes", "true", "1")
    number = next((kind for kind in (int, float) if kind in kinds), None)
    if number is None:
        return text
    try:
        return number(text)
    except ValueError:
        expected = "a whole number" if number is int else "a number"
        raise bad_value(f"{where}: {name}", expected, text) from None


_OPTION_KINDS = {declared.field: declared.members for declared in list_declared(ModelOptions)}


def resolve_options(model: ModelSpec, options: ModelOptions) -> tuple[ModelOptions, list[str]]:
    """Replace None by the model's defaults; return a sentence for each default and each assumption
    as well.
    """
    defaults = _Defaults(model, options)
    defaults.check_steps()
    defaults.choose_phase()
    defaults.choose_steps()
    if model.kind is ModelKind.VISION:
        defaults.choose_picture()
    else:
        defaults.choose_lengths()
    defaults.choose_published_formats()
    defaults.choose_stack()
    chosen = defaults.options
    check_engine_features(model, chosen)
    check_parallelism(model, chosen)
    return chosen, defaults.sentences + describe_assumptions(model, chosen)


class _Defaults:
    """Options of a run that are filled in one after another, with a sentence for each default."""

    def __init__(
        self,
        model: ModelSpec,
        options: ModelOptions,
    ) -> None:
        self.model = model
        self.options = options
        self.sentences: list[str] = []
        self._has_formats = bool(
            options.quantization or options.weights or options.dtype is not Dtype.BF16
        )
        self._may_serve = options.stack in (None, SoftwareStack.ENGINE)

    def _take(
        self,
        name: str,
        value: Any,
        why: str = "default",
    ) -> None:
        """Set an option that the user left open, and say why."""
        self.options = replace(self.options, **{name: value})
        self.sentences.append(f"{name} {value} ({why})")

    @property
    def _phase(self) -> WorkloadPhase:
        assert self.options.phase is not None, "the phase is chosen first"
        return self.options.phase

    def choose_phase(self) -> None:
        """Run a vision model forward, a denoiser for a whole picture, and a language model's
        prompt; refuse phases without sense.
        """
        kind = self.model.kind
        pipeline = self.model.pipeline
        phases = _PHASES[kind]
        usual = WorkloadPhase.PREFILL
        why = f"default of a {kind} model"
        if kind is ModelKind.VISION:
            usual = WorkloadPhase.FORWARD
        if pipeline is not None:
            usual = WorkloadPhase.GENERATE
            phases = (WorkloadPhase.GENERATE, *phases)
            why = f"a whole {pipeline.item}; --phase forward: one pass of the denoiser"
        if self.options.phase is None:
            self._take("phase", usual, why)
        if self._phase not in phases:
            raise bad_word(f"{self.model.name}: phase", map(str, phases), str(self._phase))

    def check_steps(self) -> None:
        """Refuse denoising steps of a model that no pipeline makes pictures with."""
        if self.options.steps is not None and self.model.pipeline is None:
            expected = f"no denoising steps for a {self.model.kind} model"
            raise bad_value(f"{self.model.name}: steps", expected, self.options.steps)

    def choose_steps(self) -> None:
        """Take the denoising steps of the published pipeline; a picture has no tokens."""
        model = self.model
        pipeline = model.pipeline
        if pipeline is None:
            return
        if self.options.tokens is not None:
            expected = f"no tokens for a {pipeline.item}"
            do = "Say how many denoising steps it takes: --steps."
            raise bad_value(f"{model.name}: tokens", expected, self.options.tokens, do)
        if self._phase is WorkloadPhase.GENERATE and self.options.steps is None:
            self._take("steps", pipeline.steps, pipeline.source)

    def choose_picture(self) -> None:
        """Take the published size of pictures; refuse those that the network cannot halve or cut
        into patches evenly.
        """
        model = self.model
        if self.options.seq is not None:
            expected = "no sequence length for a vision model"
            raise bad_value(f"{model.name}: seq", expected, self.options.seq)
        if self.options.image is None:
            size = model.dims.image * pixels_of_a_latent(model)
            self.options = replace(self.options, image=size)
            sides = f"pictures of {size} by {size}"
            if hasattr(model.dims, "columns"):
                width = model.dims.columns * pixels_of_a_latent(model)
                sides = f"frames of {width} by {size}"
            self.sentences.append(f"{sides} (the published input)")
        image = self.options.image
        assert image is not None
        steps = {
            "resnet": 32,
            "swin": 32,
            "mobilevit": 64,
            "unet": 8,
        }
        step = steps.get(model.architecture, getattr(model.dims, "patch", 1))
        step *= pixels_of_a_latent(model)
        if image < step or image % step:
            raise bad_value(f"{model.name}: image", f"a multiple of {step} pixels", image)

    def choose_lengths(self) -> None:
        """Choose the lengths of prompt and answer, and which tokens pass the output head."""
        model = self.model
        is_encoder = model.kind is ModelKind.ENCODER
        if self.options.image is not None:
            expected = f"no picture for a {model.kind} model"
            raise bad_value(f"{model.name}: image", expected, self.options.image)
        if not self.options.seq:
            length = 512 if is_encoder else 1024
            positions = getattr(model.dims, "max_positions", 0)
            self._take("seq", min(length, positions) if positions else length)
        if self._phase is WorkloadPhase.GENERATE and not self.options.tokens:
            self._take("tokens", DEFAULT_TOKENS)

        most = count_positions(model)
        longest = (self.options.seq or 0) + (self.options.tokens or 1) - 1
        if most is not None and longest > most:
            self.sentences.append(
                f"{longest} positions are more than the {most} this model was made for"
            )
        if self.options.head is None:
            head = OutputHead.NONE if is_encoder else OutputHead.LAST
            if self._phase is WorkloadPhase.TRAIN:
                head = OutputHead.ALL
            self._take("head", head)

    def choose_published_formats(self) -> None:
        """Serve a model in the formats it is published in, where the user named none."""
        model = self.model
        is_served = self._phase is not WorkloadPhase.TRAIN and self._may_serve
        if not is_served or self._has_formats:
            return
        if model.quantization is not None:
            why = "as it is published; --quantization none: as wide as --dtype"
            self._take("quantization", model.quantization, why)
        if model.kv_dtype is not None and self.options.kv_dtype is None:
            why = "as it is published; --kv-dtype bf16: as wide as activations"
            self._take("kv_dtype", model.kv_dtype, why)

    def choose_stack(self) -> None:
        """Choose an engine for what engines serve, and PyTorch eager for training, encoders,
        pictures and sound.
        """
        options = self.options
        if options.stack is not None:
            return
        model = self.model
        phase = self._phase
        has_template = model.template.engine
        serving_phases = (WorkloadPhase.PREFILL, WorkloadPhase.DECODE, WorkloadPhase.GENERATE)
        is_language = model.kind is ModelKind.LANGUAGE and has_template
        is_served = phase in serving_phases and options.attention is AttentionMode.FLASH
        formats = ("quantization", "weights", "kv_dtype")
        narrow = [name for name in formats if getattr(options, name) is not None]
        if narrow and not (has_template and phase is not WorkloadPhase.TRAIN):
            expected = "a language model that an engine serves"
            raise bad_value(narrow[0], expected, f"{model.name} {phase}")
        by_engine = narrow or (is_language and is_served)
        stack = SoftwareStack.ENGINE if by_engine else SoftwareStack.EAGER
        in_formats = " in narrow formats" if narrow else ""
        self._take("stack", stack, f"default of {phase} for a {model.kind} model{in_formats}")


def makes_pictures(model: ModelSpec, options: ModelOptions) -> bool:
    """Tell whether a run is of a whole pipeline, from text to picture."""
    return model.pipeline is not None and options.phase is WorkloadPhase.GENERATE


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


def check_engine_features(model: ModelSpec, options: ModelOptions) -> None:
    """Refuse what only vLLM's templates count, for a model that has none: it would be ignored."""
    if model.template.engine:
        return
    for name in ("lora", "sampling"):
        value = getattr(options, name)
        if value is not None:
            expected = f"none: {model.architecture} has no engine template"
            raise bad_value(f"{model.name}: {name}", expected, str(value))


def check_parallelism(model: ModelSpec, options: ModelOptions) -> None:
    """Check that GPUs share heads, widths and experts evenly, and that each stage has a layer."""
    rules = [
        *_list_tensor_rules(model, options),
        *_list_expert_rules(model, options),
        *_list_context_rules(model, options),
        *_list_stage_rules(model, options),
    ]
    for rule in rules:
        if rule.is_broken:
            value = getattr(options, rule.option)
            raise bad_value(f"{model.name}: {rule.option}", rule.expected, value, rule.remedy)


@dataclass(frozen=True)
class _SharingRule:
    """What the number of GPUs that share something has to be."""

    option: str
    is_broken: bool
    expected: str
    remedy: str = ""


def _list_tensor_rules(model: ModelSpec, options: ModelOptions) -> list[_SharingRule]:
    """GPUs share the heads and the widths of every layer evenly."""
    tp = options.tp
    dims: Any = model.dims
    if model.kind is ModelKind.VISION:
        return [_SharingRule("tp", tp > 1, "1 for a vision model")]
    rules = []
    for width in ("heads", "intermediate", "expert_intermediate", "shared_intermediate"):
        size = getattr(dims, width, 0)
        rules.append(_SharingRule("tp", size % tp != 0, f"a divisor of {width}={size}"))
    kv_heads = getattr(dims, "kv_heads", tp)
    is_uneven = kv_heads % tp != 0 and tp % kv_heads != 0
    rules.append(
        _SharingRule("tp", is_uneven, f"a divisor or multiple of kv_heads={kv_heads}"),
    )
    return rules


def _list_expert_rules(model: ModelSpec, options: ModelOptions) -> list[_SharingRule]:
    """GPUs that share the experts are part of a tensor-parallel group, or several whole ones."""
    tp = options.tp
    ep = options.ep
    experts = getattr(model.dims, "experts", 0)
    all_gpus = tp * options.dp
    is_training = options.phase is WorkloadPhase.TRAIN
    is_uneven = (tp % ep != 0 and ep % tp != 0) or all_gpus % ep != 0
    groups = f"a divisor of tp={tp}, or a multiple of it that divides tp * dp = {all_gpus}"
    remedy = "Set --tp or --dp to the GPUs that share the experts."
    return [
        _SharingRule("ep", ep > 1 and not experts, "1 for a model without experts"),
        _SharingRule("ep", ep > 1 and is_training, "1 in training", "Use --tp."),
        _SharingRule("ep", experts % ep != 0, f"a divisor of its {experts} experts"),
        _SharingRule("ep", is_uneven, groups, remedy),
    ]


def _list_context_rules(model: ModelSpec, options: ModelOptions) -> list[_SharingRule]:
    """GPUs share a sequence only where vLLM can split keys and values by token."""
    cp = options.cp
    has_heads = model.kind is ModelKind.LANGUAGE and hasattr(model.dims, "kv_heads")
    is_served = options.stack is SoftwareStack.ENGINE and options.phase is not WorkloadPhase.TRAIN
    alone = (
        "1 but for language models with keys and values of heads, served by an engine "
        "(--stack engine)"
    )
    too_few = cp > 1 and (options.seq or 1) < cp
    return [
        _SharingRule("cp", cp > 1 and not (has_heads and is_served), alone),
        _SharingRule("cp", too_few, f"at most as many GPUs as tokens (seq {options.seq})"),
    ]


def _list_stage_rules(model: ModelSpec, options: ModelOptions) -> list[_SharingRule]:
    """Every pipeline stage has a layer."""
    if makes_pictures(model, options):
        return [_SharingRule("pp", options.pp > 1, "1 for a whole picture")]
    layers = getattr(model.dims, "layers", getattr(model.dims, "decoder_layers", 1))
    expected = f"at most as many stages as layers ({layers})"
    return [_SharingRule("pp", options.pp > layers, expected)]


def describe_assumptions(model: ModelSpec, options: ModelOptions) -> list[str]:
    """Return a sentence for everything that holds for this run and is not an option."""
    o = options
    dtype = activation_dtype(options)
    phase = options.phase
    by_engine = o.stack is SoftwareStack.ENGINE
    seq = o.seq
    group = decode_group_size((o.tokens or 1) - 1)
    generating = phase is WorkloadPhase.GENERATE and not makes_pictures(model, options)
    decoding = phase is WorkloadPhase.DECODE or generating
    formats = _describe_formats(model, options)
    experts = _describe_experts(model, options)
    by_chance = "by chance and skew" if o.skew else "by chance"
    words = {
        f"{model.name}: {model.note}": model.note,
        "one pass of the denoiser, not a whole picture": (
            model.pipeline is not None and not makes_pictures(model, options)
        ),
        "no padding: all sequences are of one length": model.kind is not ModelKind.VISION,
        f"one new token a sequence behind a cache of {seq}": phase is WorkloadPhase.DECODE,
        f"an encoder reads {seq} tokens; the decoder begins with a start "
        "token": model.template.encodes_prompt,
        "the cache grows by concatenation (Hugging Face DynamicCache)": decoding and not by_engine,
        f"the prefill yields the first token; decode steps in groups of {group}, each at "
        "its mean context": generating,
        f"weights, gradients and AdamW moments in {dtype}; fused AdamW, no clipping": (
            phase is WorkloadPhase.TRAIN and o.update in (None, WeightUpdate.FUSED)
        ),
        f"weights in {dtype}; AdamW in fp32 masters, with loss scale and clipping": (
            o.update is WeightUpdate.MASTERS
        ),
        f"weights, gradients and AdamW moments in {dtype}; AdamW operator by operator, "
        "with clipping": (o.update is WeightUpdate.SEPARATE),
        formats: formats,
        _FP32_NOTE: o.dtype is Dtype.FP32,
        "tf32: matrix products and convolutions round fp32 to TF32 "
        "(torch.set_float32_matmul_precision('high'))": (o.dtype is Dtype.TF32),
        "compiled: pointwise runs and row reductions are fused as TorchInductor does; "
        "products are not": (o.stack is SoftwareStack.COMPILED),
        "engine: vLLM's kernels, merged projections, paged cache in "
        f"{o.kv_dtype or dtype}; weights and activations "
        "as random numbers of usual size": by_engine and model.template.engine,
        f"no engine template for {model.architecture}: fused as a compiler would": (
            by_engine and not model.template.engine
        ),
        f"tokens are drawn by {o.sampling or TokenSampling.GREEDY} sampling, without "
        "FlashInfer's sampler": (by_engine and model.template.engine and o.head is OutputHead.LAST),
        f"sequences take {o.adapters or 1} LoRA adapters of rank {o.lora} in turn; experts "
        "have none": (o.lora is not None),
        experts: experts,
        f"one of {o.tp} tensor-parallel GPUs; heads, feed-forward width and vocabulary are "
        "shared out": o.tp > 1,
        f"one of {o.pp} pipeline stages, with the largest share of the layers and both "
        "embedding and head; waiting "
        "for other stages is not counted": o.pp > 1,
        f"one of {o.dp} replicas, each with its own batch": o.dp > 1,
        f"experts are spread over {o.ep} GPUs, and this is the one that gets most tokens "
        f"{by_chance}": o.ep > 1,
        f"one of {o.cp} GPUs that share each sequence and its cache": o.cp > 1,
    }
    sentences = [sentence for sentence, holds in words.items() if holds]
    if model.pipeline is not None and makes_pictures(model, options):
        sentences += describe_pipeline(model.pipeline, options)
    return sentences


def _describe_formats(model: ModelSpec, options: ModelOptions) -> str:
    """Say in which formats weights are kept and products are computed, where that is no plain
    type.
    """
    recipe = options.recipe
    has_groups = getattr(model.dims, "kv_heads", 0) not in (0, getattr(model.dims, "heads", 0))
    is_wide = activation_dtype(options) is Dtype.FP32
    if has_groups and is_wide and options.attention is AttentionMode.FLASH:
        return (
            "fused attention is assumed, though PyTorch has no fused kernel for "
            "grouped queries in fp32"
        )
    if recipe is not None:
        weight_format = f"linear weights in {recipe.weights} ({recipe.bit:.3g} bit with scales)"
        if recipe.activations is None:
            multiplied = f"widened on chip and multiplied in bf16 by {recipe.kernel}"
            if recipe.kernel == "machete":
                multiplied += " (on other GPUs than Hopper by marlin)"
        else:
            scaled = "128 values" if recipe.mode == "block" else "a token"
            multiplied = f"activations quantized to {recipe.activations} with a scale for {scaled}"
        return f"{weight_format}, {multiplied}; all else in bf16"
    if options.dtype is Dtype.FP8:
        return (
            "fp8: linear layers multiply in fp8, activations cast by static scales; "
            "all else in bf16"
        )
    if options.dtype is Dtype.INT8:
        return (
            "int8: weights of linear layers are kept in int8 and multiplied in bf16; "
            "all else in bf16"
        )
    return ""


def _describe_experts(model: ModelSpec, options: ModelOptions) -> str:
    """Say how tokens are spread over experts; nothing of a model without any."""
    if not getattr(model.dims, "experts", 0):
        return ""
    if options.skew:
        return (
            f"a share of {options.skew:g} of all expert choices falls on the same experts, "
            "the rest is even"
        )
    if options.stack is SoftwareStack.ENGINE:
        return (
            "each token draws its experts at random, all alike; an expert that none "
            "draws is not read"
        )
    return "tokens are spread evenly over the experts"


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


def pixels_of_a_latent(model: ModelSpec) -> int:
    """Return the side in pixels of one latent pixel; 1 for networks that see the picture itself.

    The autoencoders of Stable Diffusion, DiT, FLUX and Wan make a latent of an eighth of the side
    (Rombach et al. 2021, f = 8; Wan et al. 2025, section 4.1).
    """
    return LATENT_SIDE if model.architecture in LATENT_NETWORKS else 1


def name_graph(model: ModelSpec, options: ModelOptions) -> str:
    """Return a name such as ``llama3-8b prefill b8 s1024 bf16``."""
    size = f"i{options.image}" if model.kind is ModelKind.VISION else f"s{options.seq}"
    words = [model.name, str(options.phase), f"b{options.batch}", size]
    if options.tokens:
        words.append(f"t{options.tokens}")
    if options.steps:
        words.append(f"n{options.steps}")
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
