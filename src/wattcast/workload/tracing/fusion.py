"""Fuse eager operators as a compiler does: runs of pointwise work and row reductions become one kernel each.

Products, convolutions, fused attention, exchanges and sorting stay kernels of their own, as they do in TorchInductor.
Anything else joins the kernel that computed its inputs, when nothing in between has to run first. A fused kernel
reads what comes from outside and writes what is used outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from wattcast.workload.operator_base import Operator, find_function
from wattcast.workload.operator_types import Elementwise, Layout, RmsNorm, RowReduction
from wattcast.workload.tracing.symbolic_tensor import Storage, TapeEntry, Tensor

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
    """Return backward entries that read what pointwise results were computed from, and take those out of ``saved``.

    A compiler keeps for the backward pass what products wrote or read and one number a row, and computes all else
    again inside the kernel that needs it (TorchInductor's min-cut partition).
    """
    makers = {id(t.storage): entry for entry in forward if _is_fusable(entry.op) for t in entry.writes}
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
    """Put each entry into the group of its latest producer or of a later reader of the same tensor, if it fits."""
    groups: list[_Group] = []
    written_by: dict[int, int] = {}  # storage -> index of the group that wrote it last
    read_by: dict[int, int] = {}  # storage -> index of the last fusable group that read it
    for entry in entries:
        keys = [id(t.storage) for t in entry.reads]
        producer = max((written_by[key] for key in keys if key in written_by), default=-1)
        reader = max((read_by[key] for key in keys if key in read_by), default=-1)
        if reader <= producer or _largest(groups[reader]) != _elements(entry.op):
            reader = producer
        fusable = _is_fusable(entry.op)
        at = len(groups)
        for index in (reader, producer):
            if fusable and index >= 0 and _is_fusable(groups[index][0].op) and _fits(groups[index], entry):
                at = index
                break
        if at == len(groups):
            groups.append([])
        groups[at].append(entry)
        written_by |= {id(tensor.storage): at for tensor in entry.writes}
        if fusable:
            read_by |= dict.fromkeys(keys, at)
    return groups


def _sink_groups(groups: list[_Group], readers: dict[int, set[int]], wanted: set[int]) -> list[_Group]:
    """Move pointwise groups that only one later group reads into it, so that they are never written."""
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
        if all(_is_fusable(e.op) for e in target) and all(_fits(target, e) for e in group):
            target[:0] = group
            owner |= {id(e): user for e in group}
            groups[index] = []
    return [group for group in groups if group]


def _is_fusable(op: Operator) -> bool:
    return isinstance(op, RowReduction) or (isinstance(op, Elementwise) and op.function not in _ALONE)


def _fits(group: _Group, entry: TapeEntry) -> bool:
    """Tell whether an entry shares the iteration space: as many elements or a row's share; one row reduction.

    A concatenation that mostly copies what neither computed (a cache that grows by a token) is a copy of its own:
    fused with the rotary embedding of the new token it would be priced as one over the whole cache.
    """
    if isinstance(entry.op, RowReduction) and any(isinstance(e.op, RowReduction) for e in group):
        return False
    made = {id(t.storage) for e in (*group, entry) for t in e.writes}
    if any(_mostly_copies(e, made) for e in (*group, entry)):
        return False
    size, here = _largest(group), _elements(entry.op)
    return here == 0 or size % here == 0 or here % size == 0


def _mostly_copies(entry: TapeEntry, made: set[int]) -> bool:
    if not isinstance(entry.op, Elementwise) or entry.op.function != "cat":
        return False
    joined = sum(t.byte for t in entry.reads if id(t.storage) in made)
    return 0 < 2 * joined < sum(t.byte for t in entry.reads)


def _largest(group: _Group) -> int:
    return max(_elements(entry.op) for entry in group)


def _elements(op: Operator) -> int:
    if isinstance(op, RowReduction):
        return op.rows * op.dim
    return op.n if isinstance(op, Elementwise) else 0


def _merge_group(group: _Group, readers: dict[int, set[int]], wanted: set[int]) -> TapeEntry | None:
    """Return a group as one entry, or None where its results are dead or constants that its readers fold in."""
    if not all(_is_fusable(entry.op) and entry.writes for entry in group):
        return group[0]
    members = {id(entry) for entry in group}
    made: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    fetched: dict[int, float] = {}  # a lookup fetches a few rows of its table
    for entry in group:
        for tensor in entry.reads:
            key, byte = id(tensor.storage), min(tensor.byte, entry.op.read_byte)
            if key not in made and byte >= fetched.get(key, 0.0):
                read[key], fetched[key] = tensor, byte
        made |= {id(t.storage): t for t in entry.writes}
    writes = tuple(t for key, t in made.items() if key in wanted or readers.get(key, set()) - members)
    if not writes or all(isinstance(e.op, Elementwise) and e.op.function == "fill" for e in group):
        return None
    if len(group) == 1:
        return group[0]
    reads = tuple(read.values())
    return TapeEntry(_fused_operator(group, reads, writes, int(sum(fetched.values()))), reads, writes)


def _fused_operator(group: _Group, reads: Sequence[Tensor], writes: Sequence[Tensor], read: int) -> Operator:
    ops = [entry.op for entry in group]
    write, label = sum(t.byte for t in writes), ops[0].label
    main = max(reads, key=lambda t: t.byte) if reads else writes[0]
    rows = next((op for op in ops if isinstance(op, RowReduction)), None) or _find_written_norm(group)
    if rows is not None:
        return type(rows)(
            rows.rows, rows.dim, backward=rows.backward, dtype=main.dtype, read=read, write=write, label=label
        )
    pointwise = [op for op in ops if isinstance(op, Elementwise)]
    # a sum over rows that is fused with what computes them reads them in order
    moved = any(op.layout is not Layout.CONTIGUOUS and op.function != "sum" for op in pointwise)
    return Elementwise(
        _name_function([op.function for op in pointwise]), _largest(group), dtype=main.dtype, read=read, write=write,
        layout=Layout.STRIDED if moved else Layout.CONTIGUOUS, label=label,
    )  # fmt: skip


def _find_written_norm(group: _Group) -> RowReduction | None:
    """Return the RMS norm that a group computes operator by operator, if it does."""
    found = {e.op.function: e for e in reversed(group) if isinstance(e.op, Elementwise)}
    if not {"square", "mean", "rsqrt"} <= set(found):
        return None
    rows = found["mean"].writes[0].numel
    return RmsNorm(rows, _elements(found["mean"].op) // rows)


def _name_function(names: list[str]) -> str:
    """Return the idiom the functions make together, or the costliest of them."""
    for idiom, name in _IDIOMS:
        if idiom <= set(names):
            return name
    return max(names, key=lambda n: find_function(n).flop + 4.0 * find_function(n).sfu_op)
