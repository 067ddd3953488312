"""A traced model as sections of operators: forward, the backward pass that follows from it, the
optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from itertools import accumulate
from math import ceil
from typing import Any, TypeAlias

from wattcast.core import Dtype
from wattcast.workload.graph import Block
from wattcast.workload.model_options import (
    AttentionMode,
    OutputHead,
    SoftwareStack,
    TokenSampling,
    WeightRecipe,
)
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_fusion import fuse_entries, recompute_pointwise
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.symbolic_tensor import (
    GradientNode,
    Storage,
    Tape,
    TapeEntry,
    Tensor,
    add_into,
    fill,
)
from wattcast.workload.workload_coefficients import WORKLOADS

_CHUNK = WORKLOADS.chunk
ADAMW_ELEMENTS_PER_LAUNCH = WORKLOADS.most_chunks * _CHUNK
# Elements: tensors of parameters are whole vectors long, and so is a launch of several chunks.
ADAMW_ALIGNMENT = 1024


@dataclass(frozen=True)
class PassSettings:
    """The settings of one pass as a model template sees them, with every default resolved."""

    batch: int
    length: int  # new tokens a sequence
    past: int = 0  # tokens a sequence already has in the cache
    source: int = 0  # tokens that an encoder reads before a decoder begins (T5)
    cached: bool = True  # keys and values are kept for later
    dtype: Dtype = Dtype.BF16  # of activations
    weight_dtype: Dtype = Dtype.BF16  # of the weights of linear layers
    attention: AttentionMode = AttentionMode.FLASH
    head: OutputHead = OutputHead.LAST
    stack: SoftwareStack = SoftwareStack.EAGER
    tp: int = 1
    ep: int = 1
    # GPUs that share a sequence: ``length`` counts the new tokens of one GPU, ``past`` and the
    # cache are those of all
    cp: int = 1
    training: bool = False
    skew: float = 0.0
    image: int = 0
    tf32: bool = False
    # LoRA: the model's weights are frozen, and each linear layer has an adapter of this rank
    adapter_rank: int = 0
    adapted_scope: str = ""  # the part of a layer whose linear layers have adapters; "": all
    fp8_products: bool = False  # training: linear layers multiply in fp8, weights stay in ``dtype``
    # windows and sinks are part of the attention kernel, as in training frameworks
    fused_training: bool = False
    recipe: WeightRecipe | None = None  # of an engine's weights; None: as ``weight_dtype``
    # the recipe is that of experts; other linear layers are as ``weight_dtype``
    experts_alone: bool = False
    kv_dtype: Dtype | None = None  # of an engine's cache; None: as activations
    sampling: TokenSampling | None = None  # of an engine; None: greedy
    served_rank: int = 0  # of the LoRA adapters that an engine serves; 0: it serves none
    served_adapters: int = 1  # of one step, which sequences take in turn
    wide_norms: bool = False  # training: batch norms keep weights in fp32, activations are in fp16
    channels_last: bool = False  # pictures lie in memory pixel by pixel

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
        sharing_gpus = self.cp if self.length > 1 else 1
        return self.past + self.length * sharing_gpus

    @property
    def expert_width_share(self) -> int:
        """GPUs that share the width of an expert.

        They are the tensor-parallel ones that do not hold other experts.
        """
        return max(self.tp // self.ep, 1)

    @property
    def expert_replicas(self) -> int:
        """Data-parallel replicas whose tokens meet at the same experts.

        1 means that a replica keeps its tokens.
        """
        return max(self.ep // self.tp, 1)


SectionBody: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]  # (tape, *inputs) -> outputs


@dataclass
class ProgramSection:
    """A part of the model that runs ``repeat`` times in a row, such as the layers."""

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
        saved = self.tape.saved.values()
        return sum(storage.byte for storage in saved if not storage.resident)

    @property
    def input_byte(self) -> int:
        """Bytes of the inputs that one repetition needs to run again."""
        return sum(tensor.storage.byte for tensor in self.inputs if tensor.needs_grad)

    @property
    def weight_count(self) -> int:
        """Weights of one repetition."""
        return sum([weight.numel for weight in self.tape.parameters])

    @property
    def weight_byte(self) -> int:
        """Bytes of the weights of one repetition."""
        return sum([weight.storage.byte for weight in self.tape.parameters])

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
        for tensor in self.outputs:
            last[tensor.storage] = end

        # Bytes that appear at an operator, less those last used by the one before
        inputs = {tensor.storage for tensor in self.inputs}
        change = [0] * (end + 2)
        for storage, index in first.items():
            if not storage.resident and storage not in inputs:
                change[index] += storage.byte
                change[last[storage] + 1] -= storage.byte
        input_byte = sum([storage.byte for storage in inputs])
        return max(accumulate(change[:end], initial=input_byte))

    def differentiate(self, waiting: dict[int, Tensor]) -> None:
        """Fill in the backward operators, as autograd runs them.

        ``waiting`` holds the gradients of tensors that later sections read, by the id of their
        storage. Those of this section's inputs are added to it."""
        tape = self.tape
        tape.entries = []
        tape.recording = False
        grads = self._seed_gradients(waiting)
        for node in reversed(tape.nodes):
            self._apply_rule(node, grads)
        for weight in tape.tied:
            if id(weight) in grads:
                add_into(grads[id(weight)], grads[id(weight)])
        for tensor in self.inputs:
            if id(tensor) in grads:
                waiting[id(tensor.storage)] = grads[id(tensor)]
        self.backward = tape.entries
        tape.entries = self.forward

    def _seed_gradients(self, waiting: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the gradients of the outputs, by the id of each tensor.

        The last section begins with ones.
        """
        tape = self.tape
        grads = {}
        for output in self.outputs:
            grad = waiting.get(id(output.storage))
            if grad is not None:
                grads[id(output)] = grad.on_tape(tape)
        if grads:
            return grads
        tape.label = f"{self.label}.backward"
        for output in self.outputs:
            if output.needs_grad:
                grads[id(output)] = fill(tape, output.shape, output.dtype)
        return grads

    def _apply_rule(
        self,
        node: GradientNode,
        grads: dict[int, Tensor],
    ) -> None:
        """Turn the gradients of a step's outputs into those of its inputs."""
        output_grads = [grads.pop(id(output), None) for output in node.outputs]
        if output_grads.count(None) == len(output_grads):
            return
        self.tape.label = f"{node.label}.backward"
        result = node.rule(*output_grads)
        input_grads = [result] if isinstance(result, Tensor) else result
        for tensor, grad in zip(node.inputs, input_grads, strict=True):
            if tensor is None or grad is None or not tensor.needs_grad:
                continue
            total = grads.get(id(tensor))
            grads[id(tensor)] = grad if total is None else add_into(total, grad)


@dataclass
class Program:
    """The sections of a model in issue order."""

    training: bool = False
    tf32: bool = False
    frozen: bool = False  # only adapters are trained
    wide_norms: bool = False  # batch norms keep weights in fp32 beside activations in fp16
    channels_last: bool = False  # pictures lie in memory pixel by pixel
    stages: int = 1  # of a pipeline; this is the one with the largest share of the layers
    sections: list[ProgramSection] = field(default_factory=list)

    def section(
        self,
        label: str,
        body: SectionBody,
        *inputs: Tensor,
        repeat: int = 1,
    ) -> list[Tensor]:
        """Trace ``body(tape, *inputs)`` once, as a part that repeats.

        Its results enter the next section. Stages of a pipeline share the repetitions.
        """
        tape = Tape(self.training, self.tf32, label=label, frozen=self.frozen)
        tape.wide_norms = self.wide_norms
        tape.channels_last = self.channels_last
        adopted = []
        for tensor in inputs:
            needs_grad = self.training and tensor.needs_grad
            adopted.append(replace(tensor, tape=tape, needs_grad=needs_grad))
        result = body(tape, *adopted)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if self.training and self.frozen and not inputs:
            outputs[0].needs_grad = True  # every layer but the first has trained adapters before it
        if repeat:
            stage_repeat = -(-repeat // self.stages)
            section = ProgramSection(
                label,
                stage_repeat,
                tape,
                adopted,
                outputs,
                tape.entries,
            )
            self.sections.append(section)
        return outputs

    def stack(
        self,
        embed: SectionBody,
        layer: SectionBody,
        head: SectionBody,
        repeat: int,
        head_inputs: int = 0,
    ) -> None:
        """Trace an embedding, ``repeat`` equal layers and a head.

        The head also gets the first ``head_inputs`` of the layers' further inputs.
        """
        embedded = self.section("embedding", embed)
        (x,) = self.section("layers", layer, *embedded, repeat=repeat)
        self.section("head", head, x, *embedded[1 : 1 + head_inputs])

    def differentiate(self) -> None:
        """Fill in every section's backward operators, last section first."""
        waiting: dict[int, Tensor] = {}
        for section in reversed(self.sections):
            section.differentiate(waiting)

    def blocks(self, recompute: bool = False) -> list[Block]:
        """Return the forward sections, then the backward ones in reverse.

        Each has its repeat count. ``recompute``: repeated sections run forward again before their
        backward operators.
        """
        blocks = []
        for section in self.sections:
            if section.forward:
                ops = _list_operators(section.forward)
                blocks.append(Block(ops, section.repeat, section.label))
        for section in reversed(self.sections):
            ops = _list_operators(section.backward)
            if recompute and section.repeat > 1:
                ops = _list_operators(section.forward) + ops
            if ops:
                blocks.append(Block(ops, section.repeat, f"{section.label}.backward"))
        return blocks

    def fuse(self) -> None:
        """Merge the operators that a compiler would merge."""
        for section in self.sections:
            saved = dict(section.tape.saved)
            section.backward = recompute_pointwise(section.forward, section.backward, saved)
            outputs = [tensor.storage for tensor in section.outputs]
            section.forward = fuse_entries(section.forward, [*outputs, *saved.values()])
            section.backward = fuse_entries(section.backward, keep_unread=True)

    def release(self) -> None:
        """Break the references between tensors and tapes.

        They would otherwise wait for the garbage collector.
        """
        for section in self.sections:
            section.tape.clear()
        self.sections.clear()

    @property
    def cache_byte(self) -> int:
        """Keys and values kept for later."""
        return sum(section.tape.cache_byte * section.repeat for section in self.sections)

    @property
    def parameter_count(self) -> int:
        """Weights of the model."""
        return sum(section.weight_count * section.repeat for section in self.sections)

    @property
    def weight_byte(self) -> int:
        """Bytes of the weights of the model."""
        return sum(section.weight_byte * section.repeat for section in self.sections)


def trace_program(
    trace: Callable[..., None],
    dims: Any,
    run: PassSettings,
    stages: int = 1,
) -> Program:
    """Trace one pass by the ``trace(dims, run, program)`` of a model's template."""
    program = Program(
        run.training,
        run.tf32,
        run.adapter_rank > 0,
        run.wide_norms,
        run.channels_last,
        stages,
    )
    trace(dims, run, program)
    return program


def _list_operators(entries: Sequence[TapeEntry]) -> tuple[Operator, ...]:
    return tuple([entry.op for entry in entries])


def optimiser_block(
    parameters: int,
    dtype: Dtype,
    read_byte: float = 0.0,
    written_byte: float = 0.0,
) -> Block:
    """Return one fused AdamW step.

    It reads parameter, gradient and two moments, and writes all but the gradient. Bytes read and
    written for each parameter are stated where formats differ from ``dtype``.
    """
    launches = max(ceil(parameters / ADAMW_ELEMENTS_PER_LAUNCH), 1)
    elements = ceil(parameters / launches)
    if elements > _CHUNK:
        elements = ceil(elements / ADAMW_ALIGNMENT) * ADAMW_ALIGNMENT
    op = Elementwise(
        "adamw",
        elements,
        dtype=dtype,
        read=int(elements * read_byte) or None,
        write=int(elements * written_byte) or 3 * elements * dtype.byte,
        count=launches,
        label="optimiser",
    )
    return Block((op,), 1, "optimiser")
