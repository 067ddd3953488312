"""A traced model as sections of operators: forward, the backward pass that follows from it, the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil

from wattcast.core.units import Dtype
from wattcast.workload.graph import Block
from wattcast.workload.model_options import AttentionMode, OutputHead, SoftwareStack, WeightRecipe
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Collective, Elementwise
from wattcast.workload.tracing.fusion import fuse_entries, recompute_pointwise
from wattcast.workload.tracing.symbolic_tensor import Storage, Tape, TapeEntry, Tensor, add_into, fill

# torch.optim's fused AdamW hands at most 320 chunks to one launch
_CHUNK = 65_536
ADAMW_ELEMENTS_PER_LAUNCH = 320 * _CHUNK
ADAMW_ALIGNMENT = 1024  # elements: tensors of parameters are whole vectors long, and so is a launch of several chunks


@dataclass(frozen=True)
class PassSettings:
    """The settings of one pass as a model template sees them, with every default resolved."""

    batch: int
    length: int  # new tokens a sequence
    past: int = 0  # tokens a sequence already has in the cache
    cached: bool = True  # keys and values are kept for later
    dtype: Dtype = Dtype.BF16  # of activations
    weight_dtype: Dtype = Dtype.BF16  # of the weights of linear layers
    attention: AttentionMode = AttentionMode.FLASH
    head: OutputHead = OutputHead.LAST
    stack: SoftwareStack = SoftwareStack.EAGER
    tp: int = 1
    ep: int = 1
    cp: int = 1  # GPUs that share a sequence: ``length`` are one's own new tokens, ``past`` and the cache are all
    training: bool = False
    skew: float = 0.0
    image: int = 0
    tf32: bool = False
    adapter_rank: int = 0  # LoRA: the model's own weights are frozen, each linear layer has an adapter of this rank
    fp8_products: bool = False  # training: linear layers multiply in fp8, weights stay in ``dtype``
    fused_training: bool = False  # windows and sinks are part of the attention kernel, as in training frameworks
    recipe: WeightRecipe | None = None  # of an engine's weights; None: as ``weight_dtype``
    kv_dtype: Dtype | None = None  # of an engine's cache; None: as activations

    def new_program(self) -> Program:
        """Begin the program of a pass with these settings."""
        return Program(self.training, self.tf32, frozen=self.adapter_rank > 0)

    @property
    def cache_dtype(self) -> Dtype:
        """Format of cached keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def served(self) -> bool:
        """Whether an engine runs the model by its own kernels, which are for half precision."""
        return self.engine and self.dtype in (Dtype.BF16, Dtype.FP16)

    @property
    def flash(self) -> bool:
        """Whether attention is one fused kernel."""
        return self.attention is AttentionMode.FLASH

    @property
    def engine(self) -> bool:
        """Whether an inference engine runs the model."""
        return self.stack is SoftwareStack.ENGINE

    @property
    def context(self) -> int:
        """Keys each new token may look at."""
        return self.past + self.length * (self.cp if self.length > 1 else 1)

    @property
    def expert_width_share(self) -> int:
        """GPUs that share the width of an expert: the tensor-parallel ones that do not hold other experts."""
        return max(self.tp // self.ep, 1)

    @property
    def expert_replicas(self) -> int:
        """Data-parallel replicas whose tokens meet at the same experts; 1: a replica keeps its tokens."""
        return max(self.ep // self.tp, 1)


@dataclass
class ProgramSection:
    """A part of the model that runs ``repeat`` times in a row: the embedding, the layers, the head."""

    label: str
    repeat: int
    tape: Tape
    inputs: list[Tensor]
    outputs: list[Tensor]
    forward: list[TapeEntry]
    backward: list[TapeEntry] = field(default_factory=list)

    @property
    def saved_byte(self) -> int:
        """Activations of one repetition that wait for the backward pass."""
        return sum(s.byte for s in self.tape.saved.values() if not s.resident)

    @property
    def input_byte(self) -> int:
        """Bytes of the inputs that one repetition needs to run again."""
        return sum(t.storage.byte for t in self.inputs if t.needs_grad)

    @property
    def peak_byte(self) -> int:
        """Most bytes of passing tensors alive at once while one repetition runs forward."""
        first: dict[Storage, int] = {}
        last: dict[Storage, int] = {}
        for index, entry in enumerate(self.forward):
            for tensor in (*entry.reads, *entry.writes):
                first.setdefault(tensor.storage, index)
                last[tensor.storage] = index
        end = len(self.forward)
        last.update([(tensor.storage, end) for tensor in self.outputs])
        given = {tensor.storage for tensor in self.inputs}
        change = [0] * (end + 2)  # bytes that appear at an operator, less those last used by the one before
        for storage, index in first.items():
            if not storage.resident and storage not in given:
                change[index] += storage.byte
                change[last[storage] + 1] -= storage.byte
        return max(accumulate(change[:end], initial=sum([storage.byte for storage in given])))


@dataclass
class Program:
    """The sections of a model in issue order."""

    training: bool = False
    tf32: bool = False
    frozen: bool = False  # only adapters are trained
    sections: list[ProgramSection] = field(default_factory=list)

    def section(
        self, label: str, body: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor, repeat: int = 1
    ) -> list[Tensor]:
        """Trace ``body(tape, *inputs)`` once, as a part that repeats; its results enter the next section."""
        tape = Tape(self.training, self.tf32, label=label, frozen=self.frozen)
        adopted = [tape.adopt(t) for t in inputs]
        result = body(tape, *adopted)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if self.training and self.frozen and not inputs:
            outputs[0].needs_grad = True  # every layer but the first has trained adapters before it
        if repeat:
            self.sections.append(ProgramSection(label, repeat, tape, adopted, outputs, tape.entries))
        return outputs

    def differentiate(self) -> None:
        """Fill in every section's backward operators, last section first."""
        waiting: dict[int, Tensor] = {}
        for section in reversed(self.sections):
            tape = section.tape
            tape.entries, tape.recording = [], False
            seeds = {id(t): waiting[id(t.storage)] for t in section.outputs if id(t.storage) in waiting}
            if not seeds:
                tape.label = f"{section.label}.backward"
                seeds = {id(t): fill(tape, t.shape, t.dtype) for t in section.outputs if t.needs_grad}
            for tensor, grad in zip(section.inputs, propagate_gradients(tape, section, seeds), strict=True):
                if grad is not None:
                    waiting[id(tensor.storage)] = grad
            section.backward, tape.entries = tape.entries, section.forward

    def blocks(self, recompute: bool = False) -> list[Block]:
        """Return the forward sections, then the backward ones in reverse, each with its repeat count."""
        result = [Block(_operators(s.forward), s.repeat, s.label) for s in self.sections if s.forward]
        for section in reversed(self.sections):
            ops = _operators(section.backward)
            if recompute and section.repeat > 1:
                ops = _operators(section.forward) + ops
            if ops:
                result.append(Block(ops, section.repeat, f"{section.label}.backward"))
        return result

    def fuse(self) -> None:
        """Merge the operators a compiler would merge; see ``workload.tracing.fusion``."""
        for section in self.sections:
            saved = dict(section.tape.saved)
            section.backward = recompute_pointwise(section.forward, section.backward, saved)
            kept = [t.storage for t in section.outputs] + list(saved.values())
            section.forward = fuse_entries(section.forward, kept)
            section.backward = fuse_entries(section.backward, keep_unread=True)

    def release(self) -> None:
        """Break the references between tensors and tapes, which would otherwise wait for the garbage collector."""
        for section in self.sections:
            section.tape.clear()
        self.sections.clear()

    @property
    def cache_byte(self) -> int:
        """Keys and values kept for later."""
        return sum(s.tape.cache_byte * s.repeat for s in self.sections)

    @property
    def parameter_count(self) -> int:
        """Weights of the model."""
        return sum(sum([p.numel for p in s.tape.parameters]) * s.repeat for s in self.sections)

    @property
    def parameter_byte(self) -> int:
        """Bytes of all weights."""
        return sum(sum([p.storage.byte for p in s.tape.parameters]) * s.repeat for s in self.sections)


def _operators(entries: Sequence[TapeEntry]) -> tuple[Operator, ...]:
    return tuple([entry.op for entry in entries])


def propagate_gradients(tape: Tape, section: ProgramSection, seeds: dict[int, Tensor]) -> list[Tensor | None]:
    """Emit the backward operators of a section and return the gradients of its inputs.

    Nodes are walked last first, as autograd does; a second gradient of a tensor is added to the first.
    """
    grads = {key: Tensor(tape, g.shape, g.strides, g.dtype, g.storage) for key, g in seeds.items()}
    for node in reversed(tape.nodes):
        given = [grads.pop(id(out), None) for out in node.outputs]
        if given.count(None) == len(given):
            continue
        tape.label = f"{node.label}.backward"
        for tensor, grad in zip(node.inputs, node.rule(*given), strict=True):
            if tensor is None or grad is None or not tensor.needs_grad:
                continue
            known = grads.get(id(tensor))
            grads[id(tensor)] = grad if known is None else add_into(known, grad)
    for weight in tape.tied:
        if id(weight) in grads:
            add_into(grads[id(weight)], grads[id(weight)])
    return [grads.get(id(tensor)) for tensor in section.inputs]


def optimiser_block(parameters: int, dtype: Dtype, read_byte: float = 0.0, written_byte: float = 0.0) -> Block:
    """Return one fused AdamW step, which reads parameter, gradient and two moments, and writes all but the gradient.

    Bytes read and written for each parameter are given where formats differ from ``dtype``.
    """
    launches = max(ceil(parameters / ADAMW_ELEMENTS_PER_LAUNCH), 1)
    n = ceil(parameters / launches)
    n = ceil(n / ADAMW_ALIGNMENT) * ADAMW_ALIGNMENT if n > _CHUNK else n
    read, write = int(n * read_byte) or None, int(n * written_byte) or 3 * n * dtype.byte
    op = Elementwise("adamw", n, dtype=dtype, read=read, write=write, count=launches, label="optimiser")
    return Block((op,), 1, "optimiser")


def gradient_exchange_block(parameters: int, dtype: Dtype, gpus: int, stride: int) -> Block:
    """Return the sum of gradients over data-parallel replicas, once a step; ``stride`` GPUs lie between two."""
    op = Collective("all_reduce", parameters * dtype.byte, gpus, stride=stride, dtype=dtype, label="gradients")
    return Block((op,), 1, "gradients")
