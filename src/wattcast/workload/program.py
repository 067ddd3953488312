"""A traced model as sections of operators: forward, the backward pass that follows from it, the
optimiser.

A compiler fuses eager operators: runs of pointwise work and row reductions become one kernel each.
Products, convolutions, fused attention, exchanges and sorting stay kernels of their own, as they do
in TorchInductor. Anything else joins the kernel that computed its inputs, when nothing in between
has to run first. A fused kernel reads what comes from outside and writes what is used outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Any, TypeAlias

from wattcast.core import Dtype
from wattcast.workload.graph import Block
from wattcast.workload.model_options import AttentionMode, OutputHead, SoftwareStack, WeightRecipe
from wattcast.workload.operator_base import Operator, find_function
from wattcast.workload.operator_types import Elementwise, RmsNorm, RowReduction
from wattcast.workload.symbolic_tensor import Storage, Tape, TapeEntry, Tensor, add_into, fill

# torch.optim's fused AdamW hands at most 320 chunks to one launch
_CHUNK = 65_536
ADAMW_ELEMENTS_PER_LAUNCH = 320 * _CHUNK
# elements: tensors of parameters are whole vectors long, and so is a launch of several chunks
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
    # GPUs that share a sequence: ``length`` are one's own new tokens, ``past`` and the cache are
    # all
    cp: int = 1
    training: bool = False
    skew: float = 0.0
    image: int = 0
    tf32: bool = False
    adapter_rank: int = (
        0  # LoRA: the model's own weights are frozen, each linear layer has an adapter of this rank
    )
    fp8_products: bool = False  # training: linear layers multiply in fp8, weights stay in ``dtype``
    fused_training: bool = (
        False  # windows and sinks are part of the attention kernel, as in training frameworks
    )
    recipe: WeightRecipe | None = None  # of an engine's weights; None: as ``weight_dtype``
    experts_alone: bool = (
        False  # the recipe is that of experts; other linear layers are as ``weight_dtype``
    )
    kv_dtype: Dtype | None = None  # of an engine's cache; None: as activations

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
        """GPUs that share the width of an expert: the tensor-parallel ones that do not hold other
        experts.
        """
        return max(self.tp // self.ep, 1)

    @property
    def expert_replicas(self) -> int:
        """Data-parallel replicas whose tokens meet at the same experts; 1: a replica keeps its
        tokens.
        """
        return max(self.ep // self.tp, 1)


SectionBody: TypeAlias = Callable[..., Tensor | Sequence[Tensor]]  # (tape, *inputs) -> outputs


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
        change = [0] * (
            end + 2
        )  # bytes that appear at an operator, less those last used by the one before
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
    stages: int = 1  # of a pipeline; this is the one with the largest share of the layers
    sections: list[ProgramSection] = field(default_factory=list)

    def section(
        self, label: str, body: SectionBody, *inputs: Tensor, repeat: int = 1
    ) -> list[Tensor]:
        """Trace ``body(tape, *inputs)`` once, as a part that repeats; its results enter the next
        section.

        Stages of a pipeline share the repetitions.
        """
        tape = Tape(self.training, self.tf32, label=label, frozen=self.frozen)
        adopted = [replace(t, tape=tape, needs_grad=self.training and t.needs_grad) for t in inputs]
        result = body(tape, *adopted)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        if self.training and self.frozen and not inputs:
            outputs[0].needs_grad = True  # every layer but the first has trained adapters before it
        if repeat:
            here = -(-repeat // self.stages)
            self.sections.append(ProgramSection(label, here, tape, adopted, outputs, tape.entries))
        return outputs

    def stack(
        self, embed: SectionBody, layer: SectionBody, head: SectionBody, repeat: int, kept: int = 0
    ) -> None:
        """Trace an embedding, ``repeat`` equal layers and a head, which also gets ``kept`` of the
        layers' inputs.
        """
        given = self.section("embedding", embed)
        (x,) = self.section("layers", layer, *given, repeat=repeat)
        self.section("head", head, x, *given[1 : 1 + kept])

    def differentiate(self) -> None:
        """Fill in every section's backward operators, last section first."""
        waiting: dict[int, Tensor] = {}
        for section in reversed(self.sections):
            tape = section.tape
            tape.entries = []
            tape.recording = False
            seeds = {
                id(t): waiting[id(t.storage)] for t in section.outputs if id(t.storage) in waiting
            }
            if not seeds:
                tape.label = f"{section.label}.backward"
                seeds = {
                    id(t): fill(tape, t.shape, t.dtype) for t in section.outputs if t.needs_grad
                }
            grads = {
                key: Tensor(tape, g.shape, g.strides, g.dtype, g.storage)
                for key, g in seeds.items()
            }
            for node in reversed(
                tape.nodes
            ):  # as autograd does; a second gradient is added to the first
                given = [grads.pop(id(out), None) for out in node.outputs]
                if given.count(None) == len(given):
                    continue
                tape.label = f"{node.label}.backward"
                found = node.rule(*given)
                for tensor, grad in zip(
                    node.inputs, [found] if isinstance(found, Tensor) else found, strict=True
                ):
                    if tensor is None or grad is None or not tensor.needs_grad:
                        continue
                    known = grads.get(id(tensor))
                    grads[id(tensor)] = grad if known is None else add_into(known, grad)
            for weight in tape.tied:
                if id(weight) in grads:
                    add_into(grads[id(weight)], grads[id(weight)])
            waiting |= {id(t.storage): grads[id(t)] for t in section.inputs if id(t) in grads}
            section.backward = tape.entries
            tape.entries = section.forward

    def blocks(self, recompute: bool = False) -> list[Block]:
        """Return the forward sections, then the backward ones in reverse, each with its repeat
        count.
        """
        result = [
            Block(_list_operators(s.forward), s.repeat, s.label) for s in self.sections if s.forward
        ]
        for section in reversed(self.sections):
            ops = _list_operators(section.backward)
            if recompute and section.repeat > 1:
                ops = _list_operators(section.forward) + ops
            if ops:
                result.append(Block(ops, section.repeat, f"{section.label}.backward"))
        return result

    def fuse(self) -> None:
        """Merge the operators that a compiler would merge."""
        for section in self.sections:
            saved = dict(section.tape.saved)
            section.backward = recompute_pointwise(section.forward, section.backward, saved)
            kept = [t.storage for t in section.outputs] + list(saved.values())
            section.forward = fuse_entries(section.forward, kept)
            section.backward = fuse_entries(section.backward, keep_unread=True)

    def release(self) -> None:
        """Break the references between tensors and tapes, which would otherwise wait for the
        garbage collector.
        """
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


def trace_program(
    trace: Callable[..., None], dims: Any, run: PassSettings, stages: int = 1
) -> Program:
    """Trace one pass by the ``trace(dims, run, program)`` of a model's template."""
    program = Program(run.training, run.tf32, run.adapter_rank > 0, stages)
    trace(dims, run, program)
    return program


def _list_operators(entries: Sequence[TapeEntry]) -> tuple[Operator, ...]:
    return tuple([entry.op for entry in entries])


def optimiser_block(
    parameters: int, dtype: Dtype, read_byte: float = 0.0, written_byte: float = 0.0
) -> Block:
    """Return one fused AdamW step, which reads parameter, gradient and two moments, and writes all
    but the gradient.

    Bytes read and written for each parameter are given where formats differ from ``dtype``.
    """
    launches = max(ceil(parameters / ADAMW_ELEMENTS_PER_LAUNCH), 1)
    n = ceil(parameters / launches)
    n = ceil(n / ADAMW_ALIGNMENT) * ADAMW_ALIGNMENT if n > _CHUNK else n
    read = int(n * read_byte) or None
    write = int(n * written_byte) or 3 * n * dtype.byte
    op = Elementwise(
        "adamw", n, dtype=dtype, read=read, write=write, count=launches, label="optimiser"
    )
    return Block((op,), 1, "optimiser")


_Group: TypeAlias = list[TapeEntry]
_ALONE = frozenset(["topk", "cumsum", "scatter_add", "pool_grad", "adamw"])
_SMALL = 64  # a tensor so many times smaller than another is kept beside it
_IDIOMS = (  # functions that together are one known function
    ({"silu", "mul"}, "silu_mul"),
    ({"gelu", "mul"}, "gelu_mul"),
    ({"gelu_tanh", "mul"}, "gelu_mul"),
    ({"cube", "tanh"}, "gelu_tanh"),
    ({"neg", "cat", "mul"}, "rotary"),
)


def fuse_entries(
    entries: Sequence[TapeEntry], kept: Iterable[Storage] = (), *, keep_unread: bool = False
) -> list[TapeEntry]:
    """Merge fusable neighbours; ``kept`` storages are used after the last entry.

    ``keep_unread``: results that no entry reads are wanted elsewhere (gradients), not dead.
    """
    readers: dict[int, set[int]] = {}  # storage -> entries that read it
    for entry in entries:
        for tensor in entry.reads:
            readers.setdefault(id(tensor.storage), set()).add(id(entry))
    wanted = {id(storage) for storage in kept}
    if keep_unread:
        wanted |= {id(t.storage) for e in entries for t in e.writes if id(t.storage) not in readers}
    groups = _sink_groups(_group_entries(entries), readers, wanted)
    merged = (_merge_group(group, readers, wanted) for group in groups)
    return [entry for entry in merged if entry is not None]


def recompute_pointwise(
    forward: Sequence[TapeEntry], backward: Sequence[TapeEntry], saved: dict[int, Storage]
) -> list[TapeEntry]:
    """Return backward entries that read what pointwise results were computed from, and take those
    out of ``saved``.

    A compiler keeps for the backward pass what products wrote or read and one number a row, and
    computes all else again inside the kernel that needs it (TorchInductor's min-cut partition)."""
    makers = {
        id(t.storage): entry for entry in forward if _is_fusable(entry.op) for t in entry.writes
    }
    stays = {id(t.storage) for entry in forward if not _is_fusable(entry.op) for t in entry.reads}
    roots: dict[int, tuple[Tensor, ...]] = {}

    def find_roots(tensor: Tensor, byte: int) -> tuple[Tensor, ...]:
        key = id(tensor.storage)
        if key not in makers or key in stays or _SMALL * tensor.byte <= byte:
            return (tensor,)
        if key not in roots:
            roots[key] = ()  # an entry that writes where it reads
            roots[key] = tuple(root for t in makers[key].reads for root in find_roots(t, byte))
        return roots[key]

    found = []
    for entry in backward:
        reads: dict[int, Tensor] = {}
        for tensor in entry.reads:
            sources = find_roots(tensor, tensor.byte) if id(tensor.storage) in saved else (tensor,)
            reads |= {id(t.storage): t for t in sources}
        found.append(TapeEntry(entry.op, tuple(reads.values()), entry.writes))
    for key in [key for key in saved if key in roots]:
        del saved[key]
    for entry in found:
        saved |= {id(t.storage): t.storage for t in entry.reads if id(t.storage) in makers}
    return found


def _group_entries(entries: Sequence[TapeEntry]) -> list[_Group]:
    """Put each entry into the group of its latest producer or of a later reader of the same tensor,
    if it fits.
    """
    groups: list[_Group] = []
    written_by: dict[int, int] = {}  # storage -> index of the group that wrote it last
    read_by: dict[int, int] = {}  # storage -> index of the last fusable group that read it
    for entry in entries:
        keys = [id(t.storage) for t in entry.reads]
        producer = max((written_by[key] for key in keys if key in written_by), default=-1)
        reader = max((read_by[key] for key in keys if key in read_by), default=-1)
        if reader <= producer or _largest_elements(groups[reader]) != _count_elements(entry.op):
            reader = producer
        fusable = _is_fusable(entry.op)
        at = len(groups)
        for index in (reader, producer):
            if (
                fusable
                and index >= 0
                and _is_fusable(groups[index][0].op)
                and _fits_group(groups[index], entry)
            ):
                at = index
                break
        if at == len(groups):
            groups.append([])
        groups[at].append(entry)
        written_by |= {id(tensor.storage): at for tensor in entry.writes}
        if fusable:
            read_by |= dict.fromkeys(keys, at)
    return groups


def _sink_groups(
    groups: list[_Group], readers: dict[int, set[int]], wanted: set[int]
) -> list[_Group]:
    """Move pointwise groups that only one later group reads into it, so that they are never
    written.
    """
    owner = {id(entry): index for index, group in enumerate(groups) for entry in group}
    for index in range(len(groups) - 1, -1, -1):
        group = groups[index]
        if not all(_is_fusable(e.op) and not isinstance(e.op, RowReduction) for e in group):
            continue
        keys = {id(t.storage) for e in group for t in e.writes}
        users = {owner[reader] for key in keys for reader in readers.get(key, set())} - {index}
        if len(users) != 1 or keys & wanted:
            continue
        (user,) = users
        target = groups[user]
        if all(_is_fusable(e.op) for e in target) and all(_fits_group(target, e) for e in group):
            target[:0] = group
            owner |= {id(e): user for e in group}
            groups[index] = []
    return [group for group in groups if group]


def _is_fusable(op: Operator) -> bool:
    return isinstance(op, RowReduction) or (
        isinstance(op, Elementwise) and op.function not in _ALONE
    )


def _fits_group(group: _Group, entry: TapeEntry) -> bool:
    """Tell whether an entry shares the iteration space: as many elements or a row's share; one row
    reduction.

    A concatenation that mostly copies what neither computed (a cache that grows by a token) is a
    copy of its own: fused with the rotary embedding of the new token it would be priced as one over
    the whole cache."""
    if isinstance(entry.op, RowReduction) and any(isinstance(e.op, RowReduction) for e in group):
        return False
    made = {id(t.storage) for e in (*group, entry) for t in e.writes}
    for e in (*group, entry):
        if isinstance(e.op, Elementwise) and e.op.function == "cat":
            joined = sum(t.byte for t in e.reads if id(t.storage) in made)
            if 0 < 2 * joined < sum(t.byte for t in e.reads):
                return False
    size = _largest_elements(group)
    here = _count_elements(entry.op)
    return here == 0 or size % here == 0 or here % size == 0


def _largest_elements(group: _Group) -> int:
    return max(_count_elements(entry.op) for entry in group)


def _count_elements(op: Operator) -> int:
    if isinstance(op, RowReduction):
        return op.rows * op.dim
    return op.n if isinstance(op, Elementwise) else 0


def _merge_group(group: _Group, readers: dict[int, set[int]], wanted: set[int]) -> TapeEntry | None:
    """Return a group as one entry, or None where its results are dead or constants that its readers
    fold in.
    """
    if not all(_is_fusable(entry.op) and entry.writes for entry in group):
        return group[0]
    members = {id(entry) for entry in group}
    made: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    fetched: dict[int, float] = {}  # a lookup fetches a few rows of its table
    for entry in group:
        for tensor in entry.reads:
            key = id(tensor.storage)
            byte = min(tensor.byte, entry.op.read_byte)
            if key not in made and byte >= fetched.get(key, 0.0):
                read[key], fetched[key] = tensor, byte
        made |= {id(t.storage): t for t in entry.writes}
    writes = tuple(
        t for key, t in made.items() if key in wanted or readers.get(key, set()) - members
    )
    if not writes or all(isinstance(e.op, Elementwise) and e.op.function == "fill" for e in group):
        return None
    if len(group) == 1:
        return group[0]
    reads = tuple(read.values())
    ops = [entry.op for entry in group]
    label = ops[0].label
    moved = (int(sum(fetched.values())), sum(t.byte for t in writes))
    main = max(reads, key=lambda t: t.byte) if reads else writes[0]
    pointwise = [op for op in ops if isinstance(op, Elementwise)]
    rows = next((op for op in ops if isinstance(op, RowReduction)), None)
    if rows is None and {"square", "mean", "rsqrt"} <= {
        op.function for op in pointwise
    }:  # written out: an RMS norm
        mean = next(e for e in group if isinstance(e.op, Elementwise) and e.op.function == "mean")
        count = mean.writes[0].numel
        rows = RmsNorm(count, _count_elements(mean.op) // count)
    if rows is not None:
        sizes = rows.rows, rows.dim, None, rows.backward
        return TapeEntry(type(rows)(*sizes, *moved, dtype=main.dtype, label=label), reads, writes)
    names = [op.function for op in pointwise]
    costliest = max(names, key=lambda n: find_function(n).flop + 4.0 * find_function(n).sfu_op)
    function = next((name for idiom, name in _IDIOMS if idiom <= set(names)), costliest)
    # generated code walks strided operands in whole rows, so that a fused kernel is as fast as a
    # contiguous one
    n = _largest_elements(group)
    op = Elementwise(function, n, dtype=main.dtype, read=moved[0], write=moved[1], label=label)
    return TapeEntry(op, reads, writes)
