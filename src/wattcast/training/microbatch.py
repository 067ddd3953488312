"""What one micro-batch computes, sends and keeps on a GPU, section by section of the model, and the
memory of all.

A model's training pass is traced once (``workload.program``). Collectives are taken out of the
operators, because some of them overlap with compute; they are counted here and timed by
``step_time``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from wattcast.core import Dtype, bad_value
from wattcast.training.training_strategy import (
    ExpertKernels,
    Recompute,
    Sharding,
    TrainingRecipe,
    TrainingStrategy,
)
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import AttentionMode, OutputHead, SoftwareStack
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Collective,
    Elementwise,
    Layout,
    RowReduction,
    Softmax,
)
from wattcast.workload.program import PassSettings, ProgramSection, trace_program
from wattcast.workload.symbolic_tensor import TapeEntry

SHORT_ROW = 256  # elements of a row, of which a generated kernel reduces several in a block
FUSED_LOSS_CHUNKS = 8  # a fused loss holds the logits of an eighth of the tokens at a time


@dataclass(frozen=True)
class SectionWork:
    """One repetition of a section: operators, exchanges between tensor-parallel GPUs, weights,
    bytes.
    """

    label: str
    repeat: int
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    again: tuple[
        Operator, ...
    ]  # run again under full recomputation that ends with the last tensor needed
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
    matrices: tuple[tuple[int, int, int], ...] = ()  # trained ones: how many of which size

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
        kept = {
            Recompute.NONE: self.saved_byte,
            Recompute.SELECTIVE: self.product_byte + self.input_byte,
        }
        return min(kept.get(recompute, self.input_byte), self.saved_byte)


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
    model: ModelSpec, recipe: TrainingRecipe, micro_batch: int, seq: int, tp: int = 1, cp: int = 1, ep: int = 1,
    sequence_parallel: bool = True,
) -> MicrobatchWork:  # fmt: skip
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
        experts = getattr(dims, "experts", 0)
        if not experts or experts % ep:
            raise bad_value(
                "ep",
                f"a divisor of the model's {experts} experts" if experts else "1: no experts",
                ep,
            )
        # tensor-parallel GPUs hold whole experts of their own: as many weights as halves of twice
        # the experts
        dims = replace(dims, experts=max(experts * (tp if ep % tp == 0 else 1) // ep, 1))
        if hasattr(dims, "groups_chosen"):
            dims = replace(
                dims, groups=1, groups_chosen=1
            )  # the router's groups are spread over the GPUs
    run = PassSettings(
        batch=micro_batch,
        length=seq // cp,
        cached=False,
        dtype=recipe.dtype,
        weight_dtype=recipe.dtype,
        attention=recipe.attention,
        head=OutputHead.NONE if model.kind is ModelKind.VISION else OutputHead.ALL,
        stack=SoftwareStack.EAGER,
        tp=tp,
        training=True,
        image=seq if model.kind is ModelKind.VISION else 0,
        adapter_rank=recipe.lora_rank,
        fp8_products=recipe.narrow,
        fused_training=recipe.stack is SoftwareStack.COMPILED
        and recipe.attention is AttentionMode.FLASH,
    )
    program = trace_program(model.template.trace, dims, run)
    program.differentiate()
    tokens = micro_batch * (seq // cp)
    bytes_of = [_section_bytes(section, recipe) for section in program.sections]
    if recipe.stack is SoftwareStack.COMPILED:
        program.fuse()
    sections = tuple(
        _section_work(section, recipe, kept, cp, seq)
        for section, kept in zip(program.sections, bytes_of, strict=True)
    )
    if getattr(dims, "experts", 0):
        sections = tuple(
            _join_experts(s, dims, recipe, tokens, ep) if s.expert_trained else s for s in sections
        )
    if tp > 1 and sequence_parallel:
        whole = trace_microbatch(model, recipe, micro_batch, seq, 1, cp, ep)
        sections = tuple(
            _share_tokens(*pair, tp) for pair in zip(sections, whole.sections, strict=True)
        )
    flop = sum(
        section.repeat
        * sum(op.flop * op.count for op in (*section.forward, *section.backward) if op.is_product)
        for section in sections
    )
    program.release()
    return MicrobatchWork(sections, flop * tp / tokens)


def _join_experts(
    section: SectionWork, dims: Any, recipe: TrainingRecipe, tokens: int, ep: int
) -> SectionWork:
    """Return a section of experts with what frameworks do beside the model's own arithmetic.

    Rows arrive from other GPUs in bf16 and are cast to fp8 then. NCCL's all-to-all delivers them in
    the order of senders: they are sorted by expert, and results back; for fp8 they are padded to
    whole blocks and cut. Of a gate with limits, both halves are clamped and joined again. The last
    bias b is added expert by expert to rows of weight p: b·p and the sum are fp32 [Megatron-LM,
    ``core/transformer/moe/experts.py`` and ``core/fusions/fused_bias_geglu.py``]. Fused experts
    clamp, activate and add biases inside the grouped products."""
    picks = tokens * dims.experts_chosen
    byte = recipe.dtype.byte
    fp8 = recipe.narrow
    rows = picks * dims.hidden
    inner = picks * dims.expert_intermediate
    forward = []
    backward = []
    clamps = []

    def walk(
        function: str, n: int, read: float, write: float, times: int = 1, layout: str = "contiguous"
    ) -> Operator:
        dtype = Dtype.FP32 if max(read, write) > byte else recipe.dtype
        return Elementwise(
            function, n, dtype=dtype, layout=Layout(layout), read=int(n * read), write=int(n * write), count=times,
            label="experts",
        )  # fmt: skip

    if ep > 1 and (fp8 or recipe.expert_copies):
        moves = walk("copy", rows, byte, byte, fp8 + (2 + 2 * fp8) * recipe.expert_copies)
        forward = [moves]
        backward = [moves]
    fused = recipe.expert_kernels is ExpertKernels.FUSED
    if getattr(dims, "expert_clamp", False) and not fused:
        clamps = [
            walk("scale", inner, byte, byte, 2, "strided"),
            walk("cat", 2 * inner, byte, byte),
        ]
        backward += [
            walk("relu_grad", inner, 2 * byte, byte, 2, "strided"),
            walk("cat", 2 * inner, byte, byte),
        ]
    if getattr(dims, "expert_bias", False) and not fused:
        forward += [
            walk("mul", rows, 0, 4, 1, "broadcast"),
            walk("add", rows, byte + 4, 4),
            walk("cat", rows, 4, 4),
        ]
        forward.append(walk("cast", rows, 4, byte))
        backward += [
            walk("cast", rows, byte, 4),
            walk("cast", rows, 4, byte),
            walk("cat", rows, byte, byte),
        ]
        backward += [
            walk("mul", rows, 4, 4, 2, "broadcast"),
            walk("scale", rows, 4, 0, 2),
        ]  # gradients of b and p

    def keep(ops: tuple[Operator, ...]) -> tuple[Operator, ...]:
        named = (
            (op, op.function if isinstance(op, Elementwise) and "experts" in op.label else "")
            for op in ops
        )
        return tuple(op for op, name in named if not (fused and name.endswith(_ACTIVATIONS)))

    return replace(
        section,
        token_byte=tokens * dims.hidden * byte,
        chosen=dims.experts_chosen,
        forward=(*keep(section.forward), *clamps, *forward),
        backward=(*keep(section.backward), *backward),
        again=(*keep(section.again), *clamps, *forward),
        selective=(*keep(section.selective), *clamps),
    )


_ACTIVATIONS = ("silu_mul", "gelu_mul", "silu_grad", "gelu_grad", "gelu_tanh_grad")


def _share_tokens(section: SectionWork, whole: SectionWork, tp: int) -> SectionWork:
    """Return a section as one of ``tp`` GPUs runs it that share the tokens wherever they do not
    share the width.

    Products are those of the tensor-parallel trace. Of all else, of what is kept as well, each GPU
    has its share of the ``whole`` section on one GPU."""

    def share(op: Operator) -> Operator:
        if isinstance(op, Elementwise):
            smaller = {
                name: max(size // tp, 1)
                for name in ("read", "write", "rows")
                if (size := getattr(op, name))
            }
            return replace(op, n=max(op.n // tp, 1), run=None, **smaller)
        if isinstance(op, RowReduction):
            smaller = {
                name: size // tp for name in ("read", "write") if (size := getattr(op, name))
            }
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


def _section_bytes(section: ProgramSection, recipe: TrainingRecipe) -> dict[str, int]:
    """Return bytes of inputs, of all saved activations, of those that products wrote, and the peak
    of passing ones.

    Fused pointwise kernels keep nothing but operands of products, so that is what a compiled layer
    saves."""
    products = [entry for entry in section.forward if entry.op.is_product]
    written = {id(t.storage) for entry in products for t in entry.writes}
    operands = written | {id(t.storage) for entry in products for t in entry.reads}
    compiled = recipe.stack is SoftwareStack.COMPILED and section.repeat > 1
    saved = {
        key: s.byte
        for key, s in section.tape.saved.items()
        if not s.resident and (key in operands or not compiled)
    }
    everything = sum(saved.values())
    product_byte = sum(byte for key, byte in saved.items() if key in written)
    input_byte = section.input_byte
    peak = section.peak_byte
    if recipe.fused_loss and section.label == "head":
        everything = input_byte
        product_byte = 0
        peak = peak // FUSED_LOSS_CHUNKS
    return {
        "input_byte": input_byte,
        "saved_byte": everything,
        "product_byte": product_byte,
        "peak_byte": peak,
    }


def _section_work(
    section: ProgramSection,
    recipe: TrainingRecipe,
    bytes_of: dict[str, int],
    cp: int,
    seq: int,
) -> SectionWork:
    forward, forward_exchanges = _split_exchanges(section.forward, cp, seq)
    backward, backward_exchanges = _split_exchanges(section.backward, cp, seq)
    if recipe.fused_loss and section.label == "head":
        forward = tuple(_fuse_loss(op) if isinstance(op, Softmax) else op for op in forward)
        backward = tuple(op for op in backward if not isinstance(op, Softmax))
    saved = section.tape.saved
    needed = [
        i
        for i, entry in enumerate(section.forward, 1)
        if any(id(t.storage) in saved for t in entry.writes)
    ]
    again, _ = _split_exchanges(section.forward[: max(needed, default=0)], cp, seq)
    if recipe.stack is SoftwareStack.COMPILED:
        forward, backward, again = (
            tuple(_as_generated(op, section.repeat > 1) for op in ops)
            for ops in (forward, backward, again)
        )
    trained = [p for p in section.tape.parameters if p.needs_grad]
    frozen = [p for p in section.tape.parameters if not p.needs_grad]
    shapes = [(1, *p.shape)[-3:] for p in trained if len(p.shape) > 1]
    attention = [op for op in forward if isinstance(op, Attention)]
    if recipe.base_bits < 16:
        narrow = sum(p.numel for p in frozen if len(p.shape) > 1 and section.repeat > 1)
        if narrow:  # frozen weights are widened before each use
            byte = recipe.dtype.byte
            widen = Elementwise(
                "scale", narrow, dtype=recipe.dtype, read=narrow * recipe.base_bits // 8, write=narrow * byte,
                label="dequantize",
            )  # fmt: skip
            forward = (widen, *forward)
            backward = (widen, *backward)
            again = (widen, *again)
    return SectionWork(
        label=section.label,
        repeat=section.repeat,
        forward=forward,
        backward=backward,
        again=again,
        selective=tuple(op for op in again if not op.is_product),
        forward_exchanges=forward_exchanges,
        backward_exchanges=backward_exchanges,
        trained=sum(p.numel for p in trained),
        frozen=sum(p.numel for p in frozen),
        expert_trained=sum(p.numel for p in trained if len(p.shape) == 3),
        **bytes_of,
        matrices=tuple((many, rows, columns) for many, rows, columns in shapes),
        key_byte=sum(
            2 * op.batch * op.kv_heads * (seq // cp) * op.head_dim * op.dtype.byte
            for op in attention
        ),
    )


def _as_generated(op: Operator, inside_layer: bool) -> Operator:
    """Return an operator as the kernel that a compiler generates for it, bound by the bytes that it
    moves.

    Short rows share a block. Inside layers, rows that were picked sum their own gradients, without
    atomics."""
    if isinstance(op, RowReduction) and op.dim <= SHORT_ROW:
        moved: dict[str, Any] = {"read": int(op.read_byte), "write": int(op.write_byte)}
        return Elementwise(
            "mul", op.rows * op.dim, dtype=op.dtype, count=op.count, label=op.label, **moved
        )
    if (
        inside_layer
        and isinstance(op, Elementwise)
        and op.function == "scatter_add"
        and op.dtype.byte <= 4
    ):
        return Elementwise(
            "add", op.n, dtype=op.dtype, read=op.n * op.dtype.byte, write=op.write, label=op.label
        )
    return op


def _fuse_loss(op: Softmax) -> Operator:
    """Return the loss and its gradient as one kernel: it reads the logits twice and writes over
    them.
    """
    n = op.rows * op.dim
    byte = Dtype.BF16.byte
    return Elementwise(
        "exp", n, dtype=Dtype.BF16, read=2 * n * byte, write=n * byte, label=op.label
    )


def _split_exchanges(
    entries: Sequence[TapeEntry], cp: int, seq: int
) -> tuple[tuple[Operator, ...], tuple[Collective, ...]]:
    """Return the operators without collectives, and the collectives; attention sees the keys of all
    ``cp`` GPUs.
    """
    ops = []
    exchanges = []
    for entry in entries:
        op = entry.op
        if isinstance(op, Collective):
            exchanges.append(op)
            continue
        if cp > 1 and isinstance(op, Attention):
            op = (
                replace(op, kv_len=max(seq // 2, 1), causal=False)
                if op.causal
                else replace(op, kv_len=seq)
            )
        ops.append(op)
    return tuple(ops), tuple(exchanges)


def copy_operators(
    section: SectionWork, recipe: TrainingRecipe, gathered: bool
) -> tuple[Operator, ...]:
    """Return the copies of weights and gradients beside the model's own kernels, for one repetition
    and micro-batch.

    Gradients are added to those of the micro-batch before, or into a buffer of ``gradient_byte``.
    Weights that are gathered for use are copied out of the gathered buffer twice, forward and
    backward, and their gradients into the buffer that is scattered."""
    byte = recipe.dtype.byte
    weights = section.weights
    trained = section.trained
    copies = []
    if gathered and weights:
        copies.append(
            Elementwise("copy", weights, dtype=recipe.dtype, count=2, label="gathered weights")
        )
    if trained:
        read = trained * (byte + (0 if gathered else recipe.gradient_byte))
        copies.append(
            Elementwise(
                "add",
                trained,
                dtype=recipe.dtype,
                read=read,
                write=trained * recipe.gradient_byte,
                label="gradients",
            )
        )
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
    work: MicrobatchWork, recipe: TrainingRecipe, strategy: TrainingStrategy
) -> TrainingMemory:
    """Return the memory of the fullest pipeline stage.

    Stage i of p keeps the activations of p - i micro-batches (1F1B) [Narayanan2021], a little more
    when stages are interleaved: p·(1 + (p-1)/(p·v)). Sharded bytes are divided by the data-parallel
    GPUs; weights that are gathered for use (ZeRO-3) are there for two repetitions at a time, the
    one that computes and the next."""
    zero = strategy.sharding
    shards = strategy.dp * strategy.cp

    def share(weights: float, experts: float, *stages: Sharding) -> float:
        if zero not in stages:
            return weights
        return (weights - experts) / shards + experts / strategy.expert_dp

    found = []
    for stage in {0, strategy.pp - 1}:
        flight = 1.0 * min(strategy.pp - stage, strategy.accumulation)
        if strategy.interleave > 1 and stage == 0:
            flight *= 1.0 + (strategy.pp - 1) / (strategy.pp * strategy.interleave)
        trained = experts = frozen = kept = 0.0
        for section in work.sections:
            last = strategy.pp - 1 if section.label != "embedding" else 0
            times = section.repeat / strategy.pp if section.is_layer else float(stage == last)
            trained += section.trained * times
            experts += section.expert_trained * times
            frozen += section.frozen * times
            waiting = times * flight * section.kept_byte(strategy.recompute)
            kept += waiting if section.is_layer else times * section.saved_byte
        again = max((section.saved_byte for section in work.layers), default=0)
        again *= (
            2 if strategy.recompute is Recompute.OFFLOAD else 1
        )  # one layer computes, one travels
        here = [s for s in work.sections if stage or s.label != "head" or strategy.pp == 1]
        passing = max(
            max(s.peak_byte - s.saved_byte, s.input_byte) for s in here
        )  # saved bytes are counted already
        gathered = 0.0
        if zero is Sharding.ZERO3 and shards > 1:
            gathered = (
                2.0 * max((layer.weights for layer in work.layers), default=0) * recipe.dtype.byte
            )
        gradient_byte = (
            share(trained, experts, Sharding.ZERO2, Sharding.ZERO3) * recipe.gradient_byte
        )
        plain = recipe.gradient_byte == recipe.dtype.byte and strategy.recompute is Recompute.NONE
        if strategy.accumulation == 1 and plain:
            gradient_byte = max(gradient_byte - kept, 0.0)  # gradients come as activations go
        stored_byte = recipe.dtype.byte + recipe.narrow_byte
        weight_byte = share(trained, experts, Sharding.ZERO3) * stored_byte
        weight_byte += share(frozen, 0.0, Sharding.ZERO3) * recipe.base_bits / 8
        optimiser_byte = share(trained, experts, *list(Sharding)[1:]) * recipe.state_byte
        kept += again if strategy.recompute is not Recompute.NONE else 0
        found.append(
            TrainingMemory(weight_byte, gradient_byte, optimiser_byte, kept, passing + gathered)
        )
    return max(found, key=lambda memory: memory.total_byte)
