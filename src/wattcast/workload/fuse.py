"""What a compiler makes of eager operators: runs of pointwise work and row reductions become one kernel each.

Products, convolutions, fused attention, exchanges and sorting stay kernels of their own, as they do
in TorchInductor. Anything else joins the kernel that computed its inputs, when nothing in between
has to run first. A fused kernel reads what comes from outside and writes what is used outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wattcast.workload.elementwise import function_of
from wattcast.workload.graph import Elementwise, Layout, Operator, RmsNorm, RowReduction
from wattcast.workload.symbolic import Entry, Storage, Tensor

_ALONE = frozenset(["topk", "cumsum", "scatter_add", "pool_grad", "adamw"])


@dataclass
class _Group:
    entries: list[Entry] = field(default_factory=list)


def fuse(entries: Sequence[Entry], kept: Iterable[Storage] = (), *, keep_unread: bool = False) -> list[Entry]:
    """``entries`` with fusable neighbours merged; ``kept`` storages are used after the last of them.

    ``keep_unread``: results nobody reads here are wanted elsewhere (gradients), not dead.
    """
    readers: dict[int, set[int]] = {}
    for entry in entries:
        for tensor in entry.reads:
            readers.setdefault(id(tensor.storage), set()).add(id(entry))
    outside = {id(storage) for storage in kept}
    groups = _sunk(_grouped(entries), readers, outside, keep_unread)
    merged = (_merged(group, readers, outside, keep_unread) for group in groups)
    return [entry for entry in merged if entry is not None]


def _grouped(entries: Sequence[Entry]) -> list[_Group]:
    """Each entry in the group of its latest producer, where that group may still grow."""
    groups: list[_Group] = []
    home: dict[int, int] = {}  # storage -> index of the group that wrote it last
    seen: dict[int, int] = {}  # storage -> index of the last fusable group that read it
    for entry in entries:
        keys = [id(t.storage) for t in entry.reads]
        made = max((home[key] for key in keys if key in home), default=-1)
        beside = max((seen[key] for key in keys if key in seen), default=-1)
        if beside <= made or _size(groups[beside]) != _elements(entry.op):
            beside = made
        at = next((i for i in (beside, made) if _joins(groups, i, entry)), len(groups))
        if at == len(groups):
            groups.append(_Group())
        groups[at].entries.append(entry)
        home |= {id(tensor.storage): at for tensor in entry.writes}
        if _fusable(entry.op):
            seen |= dict.fromkeys(keys, at)
    return groups


def _joins(groups: Sequence[_Group], at: int, entry: Entry) -> bool:
    """Whether ``entry`` may join group ``at``: it made an input, or reads the same tensor after all were made."""
    return at >= 0 and _fusable(entry.op) and _fusable(groups[at].entries[0].op) and _fits(groups[at], entry)


def _sunk(groups: list[_Group], readers: dict[int, set[int]], outside: set[int], keep_unread: bool) -> list[_Group]:
    """Pointwise groups that only one later group reads are computed inside it, never written."""
    owner = {id(entry): index for index, group in enumerate(groups) for entry in group.entries}
    for index in range(len(groups) - 1, -1, -1):
        group = groups[index]
        if not all(_fusable(e.op) and not isinstance(e.op, RowReduction) for e in group.entries):
            continue
        keys = {id(t.storage) for e in group.entries for t in e.writes}
        users = {owner[reader] for key in keys for reader in readers.get(key, set())} - {index}
        wanted = keys & outside or (keep_unread and any(key not in readers for key in keys))
        if len(users) != 1 or wanted:
            continue
        target = groups[users.pop()]
        if all(_fusable(e.op) for e in target.entries) and all(_fits(target, e) for e in group.entries):
            target.entries[:0] = group.entries
            owner |= {id(e): owner[id(target.entries[-1])] for e in group.entries}
            group.entries = []
    return [group for group in groups if group.entries]


def _fusable(op: Operator) -> bool:
    return isinstance(op, RowReduction) or (isinstance(op, Elementwise) and op.function not in _ALONE)


def _fits(group: _Group, entry: Entry) -> bool:
    """One iteration space: as many elements, or a row's share of them; one row reduction of a kind."""
    size, here = _size(group), _elements(entry.op)
    if isinstance(entry.op, RowReduction) and any(isinstance(e.op, RowReduction) for e in group.entries):
        return False
    return here == 0 or size % here == 0 or here % size == 0


def _size(group: _Group) -> int:
    return max(_elements(entry.op) for entry in group.entries)


def _elements(op: Operator) -> int:
    if isinstance(op, RowReduction):
        return op.rows * op.dim
    return op.n if isinstance(op, Elementwise) else 0


def _merged(group: _Group, readers: dict[int, set[int]], outside: set[int], keep_unread: bool) -> Entry | None:
    if not all(_fusable(entry.op) and entry.writes for entry in group.entries):
        return group.entries[0]
    members = {id(entry) for entry in group.entries}
    made: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    fetched: dict[int, float] = {}  # a lookup fetches a few rows of its table
    for entry in group.entries:
        for tensor in entry.reads:
            key, byte = id(tensor.storage), min(tensor.byte, entry.op.read_byte)
            if key not in made and byte >= fetched.get(key, 0.0):
                read[key], fetched[key] = tensor, byte
        made |= {id(t.storage): t for t in entry.writes}
    wanted = {
        key: tensor
        for key, tensor in made.items()
        if key in outside or readers.get(key, set()) - members or (keep_unread and key not in readers)
    }
    if not wanted or all(_constant(e) for e in group.entries):
        return None  # dead, or a constant that is folded into whoever reads it
    if len(group.entries) == 1:
        return group.entries[0]
    reads = tuple(t for t in read.values())
    writes = tuple(wanted.values())
    return Entry(_operator(group, reads, writes, int(sum(fetched.values()))), reads, writes)


def _constant(entry: Entry) -> bool:
    return isinstance(entry.op, Elementwise) and entry.op.function == "fill"


def _operator(group: _Group, reads: Sequence[Tensor], writes: Sequence[Tensor], read: int) -> Operator:
    ops = [entry.op for entry in group.entries]
    write = sum(t.byte for t in writes)
    rows = next((op for op in ops if isinstance(op, RowReduction)), None) or _spelled_norm(group)
    label = ops[0].label
    main = max(reads, key=lambda t: t.byte) if reads else writes[0]
    if rows is not None:
        kind = type(rows)
        return kind(
            rows.rows, rows.dim, backward=rows.backward, dtype=main.dtype, read=read, write=write, label=label
        )
    moved = any(isinstance(op, Elementwise) and op.layout is not Layout.CONTIGUOUS for op in ops)
    return Elementwise(
        _name(ops), _size(group), dtype=main.dtype, layout=Layout.STRIDED if moved else Layout.CONTIGUOUS,
        read=read, write=write, label=label,
    )  # fmt: skip


def _spelled_norm(group: _Group) -> RowReduction | None:
    """An RMS norm written out operator by operator."""
    functions = {e.op.function for e in group.entries if isinstance(e.op, Elementwise)}
    if not {"square", "mean", "rsqrt"} <= functions:
        return None
    mean = next(e for e in group.entries if isinstance(e.op, Elementwise) and e.op.function == "mean")
    n, rows = _elements(mean.op), mean.writes[0].numel
    return RmsNorm(rows, n // rows)


_IDIOMS = (
    ({"silu", "mul"}, "silu_mul"),
    ({"gelu", "mul"}, "gelu_mul"),
    ({"gelu_tanh", "mul"}, "gelu_mul"),
    ({"cube", "tanh"}, "gelu_tanh"),
    ({"neg", "cat", "mul"}, "rotary"),
)


def _name(ops: Sequence[Operator]) -> str:
    """The idiom the functions make together, or the costliest of them."""
    names = [op.function for op in ops if isinstance(op, Elementwise)]
    for idiom, name in _IDIOMS:
        if idiom <= set(names):
            return name
    return max(names, key=lambda n: function_of(n).flop + 4.0 * function_of(n).sfu_op)
