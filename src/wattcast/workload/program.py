"""A whole model as sections of operators: forward, the backward pass that follows from it, the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil

from wattcast.dtypes import Dtype
from wattcast.workload.functional import add_into, fill
from wattcast.workload.fuse import fuse
from wattcast.workload.graph import Block, Collective, Elementwise, Operator
from wattcast.workload.sizes import largest
from wattcast.workload.symbolic import Entry, Storage, Tape, Tensor

# torch.optim's fused AdamW hands at most 320 chunks to one launch
_CHUNK = 65_536
ADAMW_ELEMENTS_PER_LAUNCH = 320 * _CHUNK
ALIGNED = 1024  # elements: tensors of parameters are whole vectors long, and a launch of several chunks takes such


@dataclass
class Section:
    """A stretch of the model that runs ``repeat`` times in a row: the embedding, the layers, the head."""

    label: str
    repeat: int
    tape: Tape
    inputs: list[Tensor]
    outputs: list[Tensor]
    forward: list[Entry]
    backward: list[Entry] = field(default_factory=list)

    @property
    def parameter_byte(self) -> int:
        """Weights of one repetition."""
        return sum([p.storage.byte for p in self.tape.parameters])

    @property
    def parameter_count(self) -> int:
        return sum([p.numel for p in self.tape.parameters])

    @property
    def saved_byte(self) -> int:
        """Activations of one repetition that wait for the backward pass."""
        return sum(s.byte for s in self.tape.saved.values() if not s.resident)

    @property
    def input_byte(self) -> int:
        """What one repetition is given and would need to run again."""
        return sum(t.storage.byte for t in self.inputs if t.needs_grad)

    @property
    def peak_byte(self) -> int:
        """Most bytes of passing tensors alive at once while one repetition runs forward."""
        last: dict[Storage, int] = {}
        born: list[tuple[int, Storage]] = []
        for index, entry in enumerate(self.forward):
            for touched in (entry.reads, entry.writes):
                for tensor in touched:
                    storage = tensor.storage
                    if storage not in last:
                        born.append((index, storage))
                    last[storage] = index
        end = len(self.forward)
        last.update([(tensor.storage, end) for tensor in self.outputs])
        given = {tensor.storage for tensor in self.inputs}
        coming, going = [0] * end, [0] * (end + 1)  # what is put out goes after the end
        for index, storage in born:
            if not storage.resident and storage not in given:
                coming[index] += storage.byte
                going[last[storage]] += storage.byte
        more = [byte - gone for byte, gone in zip(coming, [0, *going], strict=False)]
        return largest(list(accumulate(more, initial=sum([storage.byte for storage in given]))))


@dataclass
class Program:
    """Sections in issue order."""

    training: bool = False
    tf32: bool = False
    sections: list[Section] = field(default_factory=list)

    def section(
        self, label: str, body: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor, repeat: int = 1
    ) -> list[Tensor]:
        """Run ``body(tape, *inputs)`` once, as a stretch that repeats; its results enter the next one."""
        tape = Tape(self.training, self.tf32, label=label)
        leaves = [tape.leaf(t) for t in inputs]
        result = body(tape, *leaves)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if repeat:
            self.sections.append(Section(label, repeat, tape, leaves, outputs, tape.entries))
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
                seeds = {id(t): _seed(t) for t in section.outputs if t.needs_grad}
            for leaf, grad in zip(section.inputs, flow_back(tape, section, seeds), strict=True):
                if grad is not None:
                    waiting[id(leaf.storage)] = grad
            section.backward, tape.entries = tape.entries, section.forward

    def blocks(self, recompute: bool = False) -> list[Block]:
        """Forward sections, then backward ones in reverse, each with its repeat count."""
        result = [Block(_ops(s.forward), s.repeat, s.label) for s in self.sections if s.forward]
        for section in reversed(self.sections):
            ops = _ops(section.backward)
            if recompute and section.repeat > 1:
                ops = _ops(section.forward) + ops
            if ops:
                result.append(Block(ops, section.repeat, f"{section.label}.backward"))
        return result

    def fuse(self) -> None:
        """Merge what a compiler would; see :mod:`wattcast.workload.fuse`."""
        for section in self.sections:
            kept = [t.storage for t in section.outputs] + list(section.tape.saved.values())
            section.forward = fuse(section.forward, kept)
            section.backward = fuse(section.backward, keep_unread=True)

    def release(self) -> None:
        """Let go of tensors and tapes, which hold one another and would wait for the garbage collector."""
        for section in self.sections:
            section.tape.clear()
        self.sections.clear()

    @property
    def cache_byte(self) -> int:
        """Keys and values kept for later."""
        return sum(s.tape.cache_byte * s.repeat for s in self.sections)

    @property
    def parameter_count(self) -> int:
        return sum(s.parameter_count * s.repeat for s in self.sections)

    @property
    def parameter_byte(self) -> int:
        return sum(s.parameter_byte * s.repeat for s in self.sections)


def flow_back(tape: Tape, section: Section, seeds: dict[int, Tensor]) -> list[Tensor | None]:
    """Walk the nodes last first, as autograd does; a second gradient of a tensor is added to the first."""
    grads = {key: _onto(tape, grad) for key, grad in seeds.items()}
    for node in reversed(tape.nodes):
        given = [grads.pop(id(out), None) for out in node.outputs]
        if given.count(None) == len(given):
            continue
        tape.label = f"{node.label}.backward"
        for tensor, grad in zip(node.inputs, node.rule(*given), strict=True):
            if tensor is None or grad is None or not tensor.needs_grad:
                continue
            key = id(tensor)
            known = grads.get(key)
            grads[key] = grad if known is None else add_into(known, grad)
    for weight in tape.tied:
        if id(weight) in grads:
            add_into(grads[id(weight)], grads[id(weight)])
    return [grads.get(id(leaf)) for leaf in section.inputs]


def optimiser(parameters: int, dtype: Dtype) -> Block:
    """One fused AdamW step: reads parameter, gradient and two moments, writes all but the gradient."""
    launches = max(ceil(parameters / ADAMW_ELEMENTS_PER_LAUNCH), 1)
    n = ceil(parameters / launches)
    n = ceil(n / ALIGNED) * ALIGNED if n > _CHUNK else n
    op = Elementwise("adamw", n, dtype=dtype, write=3 * n * dtype.byte, count=launches, label="optimiser")
    return Block((op,), 1, "optimiser")


def gradient_exchange(parameters: int, dtype: Dtype, gpus: int) -> Block:
    """Data parallel: gradients are summed over the replicas once a step."""
    op = Collective("all_reduce", parameters * dtype.byte, gpus, dtype=dtype, label="gradients")
    return Block((op,), 1, "gradients")


def _ops(entries: Sequence[Entry]) -> tuple[Operator, ...]:
    return tuple([entry.op for entry in entries])


def _seed(out: Tensor) -> Tensor:
    return fill(out.tape, out.shape, out.dtype)


def _onto(tape: Tape, grad: Tensor) -> Tensor:
    return Tensor(tape, grad.shape, grad.strides, grad.dtype, grad.storage)
