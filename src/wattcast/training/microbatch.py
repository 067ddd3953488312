"""Count what one micro-batch computes, sends and keeps on a GPU, section by section of the model,
and the memory of all.

A model's training pass is traced once (``workload.program``). Collectives are taken out of the
operators, because some of them overlap with compute; they are counted here and timed by
``step_time``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from functools import lru_cache
from typing import Any, NamedTuple

from wattcast.core import Dtype, bad_value
from wattcast.options.training_options import (
    ExpertKernels,
    LoraTargets,
    Recompute,
    Sharding,
    TrainingRecipe,
)
from wattcast.training.framework_kernels import FrameworkKernels
from wattcast.training.operand_casts import (
    FP4_CASTS,
    cast_around_attention,
    cast_to_fp4,
    cast_to_fp8_anew,
    is_cast_alone,
)
from wattcast.training.training_coefficients import TRAINING
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import (
    AttentionMode,
    OutputHead,
    SoftwareStack,
)
from wattcast.workload.models.decoders import DecoderDims
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Collective,
    Conv2d,
    Elementwise,
    Linear,
    RowReduction,
    Softmax,
)
from wattcast.workload.program import (
    PassSettings,
    ProgramSection,
    trace_program,
)
from wattcast.workload.symbolic_tensor import TapeEntry, Tensor

FP32_BYTE = Dtype.FP32.byte
WIDE_BITS = 16  # of frozen weights that need no widening
BYTE_BITS = 8


class MatrixStack(NamedTuple):
    """Weights that are ``number`` matrices of equal size."""

    number: int
    rows: int
    columns: int
    is_expert: bool  # one matrix for each expert, of which a GPU may hold a single one


@dataclass(frozen=True)
class SectionWork:
    """One repetition of a section: operators, exchanges between tensor-parallel GPUs, weights,
    bytes.
    """

    label: str
    repeat: int
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    # run again under full recomputation that ends with the last tensor needed
    again: tuple[Operator, ...]
    selective: tuple[Operator, ...]  # run again under selective recomputation
    forward_exchanges: tuple[Collective, ...]
    backward_exchanges: tuple[Collective, ...]
    trained: int  # weights with a gradient
    frozen: int
    expert_trained: int  # of these, weights of experts
    input_byte: int
    saved_byte: int
    product_byte: int  # of what is saved, results of products
    peak_byte: int
    token_byte: int = 0  # tokens that go to experts, each once
    chosen: int = 0  # experts that a token visits
    key_byte: int = 0  # keys and values
    matrices: tuple[MatrixStack, ...] = ()  # trained ones

    @property
    def is_layer(self) -> bool:
        """Whether a pipeline shares it out, unlike embedding and head."""
        return self.repeat > 1 or "layers" in self.label

    @property
    def weights(self) -> int:
        """All weights of one repetition."""
        return self.trained + self.frozen

    def kept_byte(self, recompute: Recompute) -> int:
        """Activations of one repetition that wait for the backward pass."""
        if recompute is Recompute.NONE:
            return self.saved_byte
        if recompute is Recompute.SELECTIVE:
            return min(self.product_byte + self.input_byte, self.saved_byte)
        return min(self.input_byte, self.saved_byte)


@dataclass(frozen=True)
class MicrobatchWork:
    """The sections of one micro-batch: what comes before the layers, the layers, and the head."""

    sections: tuple[SectionWork, ...]
    # model arithmetic of products for each token, forward and backward, nothing recomputed
    flop_per_token: float

    @property
    def layers(self) -> tuple[SectionWork, ...]:
        """Sections that a pipeline shares out."""
        return tuple(section for section in self.sections if section.is_layer)

    @property
    def trained(self) -> int:
        """Trained weights of all sections."""
        return sum(section.trained * section.repeat for section in self.sections)


@lru_cache(maxsize=512)
def trace_microbatch(
    model: ModelSpec,
    recipe: TrainingRecipe,
    micro_batch: int,
    seq: int,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = True,
) -> MicrobatchWork:
    """Trace the training pass of ``micro_batch`` sequences of ``seq`` tokens on one of
    ``tp``·``cp``·``ep`` GPUs.

    Under sequence parallelism tensor-parallel GPUs share the tokens wherever a layer works on whole
    hidden vectors [Korthikanti2022]. Context-parallel GPUs compute ``seq / cp`` tokens each and
    attend to all of them; a causal mask, balanced over GPUs, keeps half of the keys.
    Expert-parallel GPUs hold ``experts / ep`` experts, which get the tokens of all."""
    if model.kind is not ModelKind.LANGUAGE and cp > 1:
        raise bad_value("cp", "1: only language models share a sequence", cp)
    if seq % cp:
        raise bad_value("cp", f"a divisor of seq={seq}", cp)
    dims: Any = model.dims
    if ep > 1:
        dims = _share_experts(dims, tp, ep)
    tokens = micro_batch * (seq // cp)
    sections = _trace_sections(model, dims, recipe, (micro_batch, seq, tp, cp))
    if getattr(dims, "experts", 0):
        sections = [
            _join_experts(
                section,
                dims,
                recipe,
                tokens,
                ep,
            )
            if section.expert_trained
            else section
            for section in sections
        ]
    if "rotary" in getattr(dims, "multipliers", ()) and recipe.stack is SoftwareStack.COMPILED:
        sections = [_turn_in_steps(section, recipe) for section in sections]
    if tp > 1 and sequence_parallel:
        whole = trace_microbatch(
            model,
            recipe,
            micro_batch,
            seq,
            1,
            cp,
            ep,
        )
        pairs = zip(sections, whole.sections, strict=True)
        sections = [_share_tokens(section, unshared, tp) for section, unshared in pairs]
    flop: float = 0
    for section in sections:
        products = [op for op in (*section.forward, *section.backward) if op.is_product]
        flop += section.repeat * sum(op.flop * op.count for op in products)
    return MicrobatchWork(tuple(sections), flop * tp / tokens)


def _share_experts(
    dims: Any,
    tp: int,
    ep: int,
) -> Any:
    """Return the sizes of a model whose experts lie on ``ep`` GPUs."""
    experts = getattr(dims, "experts", 0)
    if not experts or experts % ep:
        expected = f"a divisor of the model's {experts} experts" if experts else "1: no experts"
        raise bad_value("ep", expected, ep)
    # tensor-parallel GPUs hold whole experts of their own: as many weights as halves of twice the
    # experts
    copies = tp if ep % tp == 0 else 1
    dims = replace(dims, experts=max(experts * copies // ep, 1))
    if hasattr(dims, "groups_chosen"):  # the router's groups are spread over the GPUs
        dims = replace(dims, groups=1, groups_chosen=1)
    return dims


def _trace_sections(
    model: ModelSpec,
    dims: Any,
    recipe: TrainingRecipe,
    sizes: tuple[int, int, int, int],
) -> list[SectionWork]:
    """Trace the pass; ``sizes`` are the micro-batch, the tokens of a sequence, ``tp`` and
    ``cp``.
    """
    micro_batch, seq, tp, cp = sizes
    is_vision = model.kind is ModelKind.VISION
    is_compiled = recipe.stack is SoftwareStack.COMPILED
    settings = PassSettings(
        batch=micro_batch,
        length=seq // cp,
        cached=False,
        dtype=recipe.dtype,
        weight_dtype=recipe.dtype,
        attention=recipe.attention,
        head=OutputHead.NONE if is_vision else OutputHead.ALL,
        stack=SoftwareStack.EAGER,
        tp=tp,
        training=True,
        image=seq if is_vision else 0,
        adapter_rank=recipe.lora_rank,
        adapted_scope="attention" if recipe.lora_targets is LoraTargets.ATTENTION else "",
        fp8_products=recipe.narrow,
        fused_training=is_compiled and recipe.attention is AttentionMode.FLASH,
    )
    dims = _drop_windows(dims, recipe, seq, is_fused=settings.fused_training)
    program = trace_program(model.template.trace, dims, settings)
    program.differentiate()
    memories = [_section_bytes(section, recipe) for section in program.sections]
    if is_compiled:
        program.fuse()
    sections = []
    for section, memory in zip(program.sections, memories, strict=True):
        sections.append(
            _section_work(
                section,
                recipe,
                memory,
                cp,
                seq,
            )
        )
    program.release()
    return sections


def _drop_windows(
    dims: Any,
    recipe: TrainingRecipe,
    seq: int,
    is_fused: bool,
) -> Any:
    """Return the sizes of a model without the windows of attention that change nothing.

    Packed documents shorter than a window never reach its end. Fused attention that reads a mask of
    whole sequences skips nothing, whatever the window.
    """
    reads_all = is_fused and recipe.mask_padding
    if not isinstance(dims, DecoderDims) or not (reads_all or recipe.documents):
        return dims
    longest = 0.0 if reads_all else weigh_documents(recipe.documents, seq)
    groups = []
    for group in dims.layer_groups:
        is_useless = group.window >= longest
        groups.append(replace(group, window=0) if is_useless else group)
    window = 0 if dims.window >= longest else dims.window
    return replace(dims, groups=tuple(groups), window=window)


def _join_experts(
    section: SectionWork,
    dims: Any,
    recipe: TrainingRecipe,
    tokens: int,
    ep: int,
) -> SectionWork:
    """Return a section of experts with what frameworks do beside the model's own arithmetic.

    Rows arrive from other GPUs in bf16 and are cast to fp8 then. NCCL's all-to-all delivers them in
    the order of senders: they are sorted by expert, and results back; for fp8 they are padded to
    whole blocks and cut. Of a gate with limits, both halves are clamped and joined again. The last
    bias b is added expert by expert to rows of weight p: b·p and the sum are fp32 [Megatron-LM,
    ``core/transformer/moe/experts.py`` and ``core/fusions/fused_bias_geglu.py``]. That needs the
    number of rows of each expert on the host, which a graph of the whole step does not have: there
    the grouped products add biases themselves. Fused experts clamp and activate inside them too."""
    picks = tokens * dims.experts_chosen
    extra = FrameworkKernels(recipe, picks * dims.hidden, picks * dims.expert_intermediate)
    moves = extra.move_rows() if ep > 1 else []
    forward = list(moves)
    backward = list(moves)
    clamps: list[Operator] = []
    is_fused = recipe.expert_kernels is ExpertKernels.FUSED
    if getattr(dims, "expert_clamp", False) and not is_fused:
        clamps = extra.clamp_gates()
        backward += extra.clamp_gate_gradients()
    if getattr(dims, "expert_bias", False) and not is_fused:
        forward += [] if recipe.graphs else extra.add_biases()
        backward += extra.sum_bias_gradients() if recipe.graphs else extra.add_bias_gradients()

    def select(ops: tuple[Operator, ...]) -> list[Operator]:
        return [op for op in ops if not (is_fused and _is_expert_activation(op))]

    return replace(
        section,
        token_byte=tokens * dims.hidden * recipe.dtype.byte,
        chosen=dims.experts_chosen,
        forward=(*select(section.forward), *clamps, *forward),
        backward=(*select(section.backward), *backward),
        again=(*select(section.again), *clamps, *forward),
        selective=(*select(section.selective), *clamps),
    )


def _turn_in_steps(section: SectionWork, recipe: TrainingRecipe) -> SectionWork:
    """Return a section whose rotary embedding, which has a factor, runs kernel by kernel."""
    kernels = FrameworkKernels(recipe, label="rotary")

    def split(ops: tuple[Operator, ...]) -> tuple[Operator, ...]:
        steps: list[Operator] = []
        for op in ops:
            if isinstance(op, Elementwise) and op.function == "rotary":
                steps += kernels.turn_rows(op.n)
            else:
                steps.append(op)
        return tuple(steps)

    backward = list(section.backward)
    for op in section.forward:
        if isinstance(op, Elementwise) and op.function == "rotary":
            backward += kernels.turn_row_gradients(op.n)
    return replace(
        section,
        forward=split(section.forward),
        backward=tuple(backward),
        again=split(section.again),
        selective=split(section.selective),
    )


def _is_expert_activation(op: Operator) -> bool:
    if not isinstance(op, Elementwise) or "experts" not in op.label:
        return False
    return op.function.endswith(_ACTIVATIONS)


_ACTIVATIONS = ("silu_mul", "gelu_mul", "silu_grad", "gelu_grad", "gelu_tanh_grad")


def _share_tokens(
    section: SectionWork,
    whole: SectionWork,
    tp: int,
) -> SectionWork:
    """Return a section as one of ``tp`` GPUs runs it that share the tokens wherever they do not
    share the width.

    Products are those of the tensor-parallel trace. Of all else, of what is kept as well, each GPU
    has its share of the ``whole`` section on one GPU."""

    def share(op: Operator) -> Operator:
        if isinstance(op, Elementwise):
            sizes = _divide_sizes(op, ("read", "write", "rows"), tp)
            smaller = {name: max(size, 1) for name, size in sizes.items()}
            return replace(
                op,
                n=max(op.n // tp, 1),
                run=None,
                **smaller,
            )
        if isinstance(op, RowReduction):
            smaller = _divide_sizes(op, ("read", "write"), tp)
            return replace(op, rows=max(op.rows // tp, 1), **smaller)
        return op

    def mix(parallel: tuple[Operator, ...], alone: tuple[Operator, ...]) -> tuple[Operator, ...]:
        products = [op for op in parallel if op.is_product]
        return (*products, *(share(op) for op in alone if not op.is_product))

    return replace(
        section,
        forward=mix(section.forward, whole.forward),
        backward=mix(section.backward, whole.backward),
        again=mix(section.again, whole.again),
        selective=tuple(map(share, whole.selective)),
        input_byte=whole.input_byte // tp,
        saved_byte=whole.saved_byte // tp,
        product_byte=whole.product_byte // tp,
        peak_byte=whole.peak_byte // tp,
    )


def _divide_sizes(
    op: Operator,
    names: Sequence[str],
    parts: int,
) -> dict[str, Any]:
    """Return a part of the sizes of an operator that are not left to their default."""
    sizes: dict[str, Any] = {}
    for name in names:
        size = getattr(op, name)
        if size:
            sizes[name] = size // parts
    return sizes


@dataclass(frozen=True)
class _SectionMemory:
    """Bytes of a section's inputs, of what it saves, of products among these, and its peak."""

    input_byte: int
    saved_byte: int
    product_byte: int
    peak_byte: int


def _section_bytes(section: ProgramSection, recipe: TrainingRecipe) -> _SectionMemory:
    """Measure the activations of a section.

    Fused pointwise kernels keep nothing but operands of products, so that is what a compiled layer
    saves.
    """
    written: set[int] = set()
    operands: set[int] = set()
    for entry in section.forward:
        if entry.op.is_product:
            written |= {id(tensor.storage) for tensor in entry.writes}
            operands |= {id(tensor.storage) for tensor in entry.reads}
    operands |= written
    is_compiled = recipe.stack is SoftwareStack.COMPILED and section.repeat > 1
    saved_byte = 0
    product_byte = 0
    for key, storage in section.tape.saved.items():
        if storage.resident or (is_compiled and key not in operands):
            continue
        saved_byte += storage.byte
        if key in written:
            product_byte += storage.byte
    if recipe.fused_loss and section.label == "head":
        peak_byte = section.peak_byte // TRAINING.loss_chunks
        return _SectionMemory(section.input_byte, section.input_byte, 0, peak_byte)
    return _SectionMemory(section.input_byte, saved_byte, product_byte, section.peak_byte)


def _section_work(
    section: ProgramSection,
    recipe: TrainingRecipe,
    memory: _SectionMemory,
    cp: int,
    seq: int,
) -> SectionWork:
    """Return one repetition of a traced section."""
    forward, forward_exchanges = _split_exchanges(section.forward, recipe, cp, seq)
    backward, backward_exchanges = _split_exchanges(section.backward, recipe, cp, seq)
    again, _ = _split_exchanges(_list_repeated(section), recipe, cp, seq)
    if recipe.fused_loss and section.label == "head":
        forward = [_fuse_loss(op) if isinstance(op, Softmax) else op for op in forward]
        backward = [op for op in backward if not isinstance(op, Softmax)]
    key_byte = 0
    for op in forward:
        if isinstance(op, Attention):
            keys = op.batch * op.kv_heads * (seq // cp) * op.head_dim
            key_byte += 2 * keys * op.dtype.byte
    widening = _widen_weights(section, recipe)
    casts = [
        *cast_to_fp8_anew(forward, recipe),
        *cast_to_fp4(section.forward, recipe),
        *cast_around_attention(forward, recipe),
    ]
    copies = _copy_adapted(forward, section, recipe)
    forward = [*widening, *casts, *copies, *_generate_kernels(forward, section, recipe)]
    again = [*widening, *casts, *copies, *_generate_kernels(again, section, recipe)]
    casts = [
        *cast_to_fp8_anew(backward, recipe),
        *cast_to_fp4(section.backward, recipe),
        *cast_around_attention(backward, recipe),
    ]
    backward = [*widening, *casts, *_generate_kernels(backward, section, recipe)]

    trained = [weight for weight in section.tape.parameters if weight.needs_grad]
    filters = _list_filters(section)
    experts = [weight for weight in trained if _is_expert(weight, filters)]
    frozen = [weight for weight in section.tape.parameters if not weight.needs_grad]
    return SectionWork(
        label=section.label,
        repeat=section.repeat,
        forward=tuple(forward),
        backward=tuple(backward),
        again=tuple(again),
        # operands in fp4 are kept in fp4, so that they are not cast again
        selective=tuple(op for op in again if not (op.is_product or op.label == FP4_CASTS)),
        forward_exchanges=forward_exchanges,
        backward_exchanges=backward_exchanges,
        trained=sum(weight.numel for weight in trained),
        frozen=sum(weight.numel for weight in frozen),
        expert_trained=sum(weight.numel for weight in experts),
        input_byte=memory.input_byte,
        saved_byte=memory.saved_byte,
        product_byte=memory.product_byte,
        peak_byte=memory.peak_byte,
        matrices=list_matrices(trained, filters),
        key_byte=key_byte,
    )


def _list_filters(section: ProgramSection) -> set[int]:
    """Return the storages of the weights of convolutions."""
    storages: set[int] = set()
    for entry in section.forward:
        if isinstance(entry.op, Conv2d):
            storages |= {id(tensor.storage) for tensor in entry.reads}
    return storages


def _is_expert(weight: Tensor, filters: set[int]) -> bool:
    """Whether a weight holds matrices of experts, which have the expert as first dimension."""
    return len(weight.shape) == 3 and id(weight.storage) not in filters


def list_matrices(weights: Sequence[Tensor], filters: set[int]) -> tuple[MatrixStack, ...]:
    """Return the matrices among the weights.

    The filters of a convolution are the rows of one matrix, as Muon flattens them [Jordan2024].
    """
    matrices = []
    for weight in weights:
        if len(weight.shape) < 2:
            continue
        is_expert = _is_expert(weight, filters)
        number = weight.shape[0] if is_expert else 1
        rows = weight.shape[1] if is_expert else weight.shape[0]
        columns = weight.numel // (number * rows)
        matrices.append(MatrixStack(number, rows, columns, is_expert))
    return tuple(matrices)


def _list_repeated(section: ProgramSection) -> Sequence[TapeEntry]:
    """Return the forward pass up to the last tensor that the backward pass needs."""
    saved = section.tape.saved
    last = 0
    for number, entry in enumerate(section.forward, 1):
        if any(id(tensor.storage) in saved for tensor in entry.writes):
            last = number
    return section.forward[:last]


def _widen_weights(section: ProgramSection, recipe: TrainingRecipe) -> list[Operator]:
    """Return the kernel that widens frozen weights before each use, if they are narrow."""
    if recipe.base_bits >= WIDE_BITS or section.repeat == 1:
        return []
    narrow = 0
    for weight in section.tape.parameters:
        if not weight.needs_grad and len(weight.shape) > 1:
            narrow += weight.numel
    if not narrow:
        return []
    read = TRAINING.widening * narrow * recipe.base_bits / BYTE_BITS
    return [
        Elementwise(
            "scale",
            narrow,
            dtype=recipe.dtype,
            read=int(read),
            write=int(TRAINING.widening * narrow * recipe.dtype.byte),
            label="dequantize",
        )
    ]


def _copy_adapted(
    ops: Sequence[Operator],
    section: ProgramSection,
    recipe: TrainingRecipe,
) -> list[Operator]:
    """Return the copies that PEFT makes of results of 4-bit layers before it adds to them.

    ``result.clone()`` in ``peft/tuners/lora/bnb.py``; products of adapters have their rank as N or
    K.
    """
    if recipe.base_bits >= WIDE_BITS or section.repeat == 1:
        return []
    results = 0
    for op in ops:
        if isinstance(op, Linear) and recipe.lora_rank not in (op.n, op.k):
            results += op.m * op.n * op.count
    return [Elementwise("copy", results, dtype=recipe.dtype, label="clone")] if results else []


def _generate_kernels(
    ops: Sequence[Operator],
    section: ProgramSection,
    recipe: TrainingRecipe,
) -> list[Operator]:
    """Return the kernels that a compiler generates; eager operators stay as they are."""
    if recipe.stack is not SoftwareStack.COMPILED:
        return list(ops)
    return [_as_generated(op, section.repeat > 1) for op in ops]


def _as_generated(op: Operator, is_inside_layer: bool) -> Operator:
    """Return an operator as the kernel that a compiler generates for it.

    It is bound by the bytes that it moves. Short rows share a block. Inside layers, rows that were
    picked sum their own gradients, without atomics.
    """
    if isinstance(op, RowReduction) and op.dim <= TRAINING.short_row:
        return Elementwise(
            "mul",
            op.rows * op.dim,
            dtype=op.dtype,
            count=op.count,
            label=op.label,
            read=int(op.read_byte),
            write=int(op.write_byte),
        )
    is_scattered = isinstance(op, Elementwise) and op.function == "scatter_add"
    if (
        isinstance(op, Elementwise)
        and is_scattered
        and is_inside_layer
        and op.dtype.byte <= Dtype.FP32.byte
    ):
        read = op.n * op.dtype.byte
        return Elementwise(
            "add",
            op.n,
            dtype=op.dtype,
            read=read,
            write=op.write,
            label=op.label,
        )
    return op


def _fuse_loss(op: Softmax) -> Operator:
    """Return the loss and its gradient as one kernel.

    It reads the logits twice and writes over them.
    """
    n = op.rows * op.dim
    byte = n * Dtype.BF16.byte
    return Elementwise(
        "exp",
        n,
        dtype=Dtype.BF16,
        read=2 * byte,
        write=byte,
        label=op.label,
    )


def weigh_documents(documents: tuple[float, ...], seq: int) -> float:
    """Return the length by which attention inside packed documents counts.

    A document of l tokens has l² scores, so that a token of it meets l others: the mean over
    tokens, not over documents. Documents longer than a sequence are cut.
    """
    lengths = [min(length, float(seq)) for length in documents]
    weighted = sum(length * length for length in lengths) / sum(lengths)
    if len(lengths) == 1:
        weighted *= 1.0 + TRAINING.document_spread**2
    return min(weighted, float(seq))


def _attend(
    op: Attention,
    recipe: TrainingRecipe,
    seq: int,
) -> Attention:
    """Return attention inside packed documents, or with a mask that hides padding from no
    kernel."""
    if recipe.mask_padding:
        return replace(op, causal=False)
    if not recipe.documents or not op.causal:
        return op
    tokens = op.batch * op.q_len
    length = round(weigh_documents(recipe.documents, seq))
    return replace(op, batch=max(round(tokens / length), 1), q_len=length, kv_len=length)


def _split_exchanges(
    entries: Sequence[TapeEntry],
    recipe: TrainingRecipe,
    cp: int,
    seq: int,
) -> tuple[list[Operator], tuple[Collective, ...]]:
    """Return the operators without collectives, and the collectives.

    Attention sees the keys of all ``cp`` GPUs.
    """
    ops: list[Operator] = []
    exchanges = []
    for entry in entries:
        op = entry.op
        if recipe.product_dtype is Dtype.FP4 and is_cast_alone(entry):
            continue  # `cast_to_fp4` counts it
        if isinstance(op, Collective):
            exchanges.append(op)
        elif cp > 1 and isinstance(op, Attention) and op.causal:
            ops.append(replace(op, kv_len=max(seq // 2, 1), causal=False))
        elif cp > 1 and isinstance(op, Attention):
            ops.append(replace(op, kv_len=seq))
        elif isinstance(op, Attention):
            ops.append(_attend(op, recipe, seq))
        else:
            ops.append(op)
    return ops, tuple(exchanges)


def copy_operators(
    section: SectionWork,
    recipe: TrainingRecipe,
    gathered: bool,
) -> tuple[Operator, ...]:
    """Return the copies of weights and gradients, for one repetition and micro-batch.

    Gradients are added to those of the micro-batch before, or into a buffer of ``gradient_byte``.
    Weights that are gathered for use are copied out of the gathered buffer twice, forward and
    backward, and their gradients into the buffer that is scattered.
    """
    weights = section.weights
    trained = section.trained
    copies: list[Operator] = []
    if gathered and weights:
        copy = Elementwise(
            "copy",
            weights,
            dtype=recipe.dtype,
            count=2,
            label="gathered weights",
        )
        copies.append(copy)
    if trained:
        sum_byte = 0 if gathered else recipe.gradient_byte
        add = Elementwise(
            "add",
            trained,
            dtype=recipe.dtype,
            read=trained * (recipe.dtype.byte + sum_byte),
            write=trained * recipe.gradient_byte,
            label="gradients",
        )
        copies.append(add)
    return tuple(copies)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the fullest GPU."""

    weight_byte: float
    gradient_byte: float
    optimiser_byte: float  # moments and master weights
    activation_byte: float  # kept for the backward pass, by all micro-batches in flight
    passing_byte: float  # alive inside one section, gathered weights included

    @property
    def total_byte(self) -> float:
        """Sum of all purposes."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


def measure_memory(
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
) -> TrainingMemory:
    """Return the memory of the fullest pipeline stage.

    Stage i of p keeps the activations of p - i micro-batches (1F1B) [Narayanan2021], a little more
    when stages are interleaved: p·(1 + (p-1)/(p·v)). Sharded bytes are divided by the data-parallel
    GPUs; weights that are gathered for use (ZeRO-3) are there for two repetitions at a time, the
    one that computes and the next.
    """
    stages = [_measure_stage(work, recipe, strategy, stage) for stage in {0, strategy.pp - 1}]
    return max(stages, key=lambda memory: memory.total_byte)


def _measure_stage(
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    stage: int,
) -> TrainingMemory:
    """Return the memory of a GPU of one pipeline stage."""
    flight = 1.0 * min(strategy.pp - stage, strategy.accumulation)
    if strategy.interleave > 1 and stage == 0:
        flight *= 1.0 + (strategy.pp - 1) / (strategy.pp * strategy.interleave)
    trained = 0.0
    experts = 0.0
    frozen = 0.0
    activation_byte = 0.0
    for section in work.sections:
        end = strategy.pp - 1 if section.label != "embedding" else 0
        times = section.repeat / strategy.pp if section.is_layer else float(stage == end)
        trained += section.trained * times
        experts += section.expert_trained * times
        frozen += section.frozen * times
        if section.is_layer:
            activation_byte += times * flight * section.kept_byte(strategy.recompute)
        else:
            activation_byte += times * section.saved_byte

    weights = _ShardedWeights(strategy, trained, experts)
    gradient_byte = weights.share(Sharding.ZERO2, Sharding.ZERO3) * recipe.gradient_byte
    same_format = recipe.gradient_byte == recipe.dtype.byte
    if strategy.accumulation == 1 and same_format and strategy.recompute is Recompute.NONE:
        # gradients come as activations go
        gradient_byte = max(gradient_byte - activation_byte, 0.0)
    stored_byte = recipe.dtype.byte + recipe.narrow_byte
    weight_byte = weights.share(Sharding.ZERO3) * stored_byte
    frozen_weights = _ShardedWeights(strategy, frozen, 0.0)
    weight_byte += frozen_weights.share(Sharding.ZERO3) * recipe.base_bits / BYTE_BITS
    optimiser_shards = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    return TrainingMemory(
        weight_byte,
        gradient_byte,
        weights.share(*optimiser_shards) * recipe.state_byte,
        activation_byte + _recomputed_byte(work, strategy),
        _passing_byte(work, recipe, strategy, stage),
    )


@dataclass(frozen=True)
class _ShardedWeights:
    """Weights that data-parallel GPUs share, those of experts among GPUs with the same experts."""

    strategy: TrainingStrategy
    weights: float
    experts: float

    def share(self, *stages: Sharding) -> float:
        """Return the weights that one GPU holds, if a sharding of ``stages`` shares them."""
        if self.strategy.sharding not in stages:
            return self.weights
        shards = self.strategy.dp * self.strategy.cp
        shared = (self.weights - self.experts) / shards
        return shared + self.experts / self.strategy.expert_dp


def _recomputed_byte(work: MicrobatchWork, strategy: TrainingStrategy) -> float:
    """Return the activations of the layer that is computed again, or comes back from the host."""
    if strategy.recompute is Recompute.NONE:
        return 0.0
    layer_byte = max((section.saved_byte for section in work.layers), default=0)
    # one layer computes, one travels
    return float(layer_byte * (2 if strategy.recompute is Recompute.OFFLOAD else 1))


def _passing_byte(
    work: MicrobatchWork,
    recipe: TrainingRecipe,
    strategy: TrainingStrategy,
    stage: int,
) -> float:
    """Return what is alive inside one section at most, gathered weights included."""
    passing_byte = 0
    for section in work.sections:
        if section.label == "head" and stage == 0 and strategy.pp > 1:
            continue
        # saved bytes are counted already
        inside_byte = max(section.peak_byte - section.saved_byte, section.input_byte)
        passing_byte = max(passing_byte, inside_byte)
    if strategy.sharding is not Sharding.ZERO3 or strategy.dp * strategy.cp <= 1:
        return passing_byte
    largest = max((layer.weights for layer in work.layers), default=0)
    return passing_byte + 2.0 * largest * recipe.dtype.byte
