"""Merge the operators of a traced model that a compiler would merge.

Runs of pointwise work and row reductions become one kernel each. Products, convolutions, fused
attention, exchanges and sorting stay kernels of their own, as they do in TorchInductor. Anything
else joins the kernel that computed its inputs, when nothing in between has to run first. A fused
kernel reads what comes from outside and writes what is used outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from wattcast.workload.operator_base import Operator, find_function
from wattcast.workload.operator_types import (
    Elementwise,
    RmsNorm,
    RowReduction,
)
from wattcast.workload.symbolic_tensor import (
    Storage,
    TapeEntry,
    Tensor,
)
from wattcast.workload.workload_coefficients import WORKLOADS

_Group: TypeAlias = list[TapeEntry]
_StorageId: TypeAlias = int
_ReadersOf: TypeAlias = dict[_StorageId, set[int]]  # the entries that read a storage, by their id

_ALONE = frozenset(["topk", "cumsum", "scatter_add", "pool_grad", "adamw"])
_SMALL = WORKLOADS.small_tensor
# Functions that together are one that we know by name.
_IDIOMS = (
    ({"silu", "mul"}, "silu_mul"),
    ({"gelu", "mul"}, "gelu_mul"),
    ({"gelu_tanh", "mul"}, "gelu_mul"),
    ({"cube", "tanh"}, "gelu_tanh"),
    ({"neg", "cat", "mul"}, "rotary"),
)
_RMS_NORM_IDIOM = {"square", "mean", "rsqrt"}
_FLOP_PER_SFU_OP = WORKLOADS.special_operations


def fuse_entries(
    entries: Sequence[TapeEntry],
    kept: Iterable[Storage] = (),
    *,
    keep_unread: bool = False,
) -> list[TapeEntry]:
    """Merge fusable neighbours; ``kept`` storages are used after the last entry.

    ``keep_unread``: results that no entry reads are used elsewhere (gradients), not dead.
    """
    readers: _ReadersOf = {}
    for entry in entries:
        for tensor in entry.reads:
            readers.setdefault(id(tensor.storage), set()).add(id(entry))

    live_after = {id(storage) for storage in kept}
    if keep_unread:
        for entry in entries:
            live_after.update([key for key in _written_ids(entry) if key not in readers])

    groups = _sink_groups(_group_entries(entries), readers, live_after)
    merged = [_merge_group(group, readers, live_after) for group in groups]
    return [entry for entry in merged if entry is not None]


def recompute_pointwise(
    forward: Sequence[TapeEntry],
    backward: Sequence[TapeEntry],
    saved: dict[_StorageId, Storage],
) -> list[TapeEntry]:
    """Return backward entries that read what pointwise results were computed from.

    Those results are taken out of ``saved``. A compiler keeps for the backward pass what products
    wrote or read and one number a row, and computes all else again inside the kernel that needs it
    (TorchInductor's min-cut partition)."""
    roots = _RootFinder.from_forward(forward)
    entries = []
    for entry in backward:
        reads: dict[_StorageId, Tensor] = {}
        for tensor in entry.reads:
            is_saved = id(tensor.storage) in saved
            sources = roots.find(tensor, tensor.byte) if is_saved else (tensor,)
            reads.update((id(source.storage), source) for source in sources)
        entries.append(TapeEntry(entry.op, tuple(reads.values()), entry.writes))

    for key in roots.recomputed & saved.keys():
        del saved[key]
    for entry in entries:
        for tensor in entry.reads:
            key = id(tensor.storage)
            if key in roots.makers:
                saved[key] = tensor.storage
    return entries


@dataclass
class _RootFinder:
    """Which tensors a pointwise result can be computed from again."""

    makers: dict[_StorageId, TapeEntry]  # the fusable entry that wrote each storage
    stays: set[_StorageId]  # storages that an entry which cannot be fused reads
    roots: dict[_StorageId, tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def from_forward(cls, forward: Sequence[TapeEntry]) -> _RootFinder:
        makers = {}
        stays: set[_StorageId] = set()
        for entry in forward:
            if _is_fusable(entry.op):
                makers.update(dict.fromkeys(_written_ids(entry), entry))
            else:
                stays.update(id(tensor.storage) for tensor in entry.reads)
        return cls(makers, stays)

    @property
    def recomputed(self) -> set[_StorageId]:
        """Storages whose values are computed again."""
        return set(self.roots)

    def find(
        self,
        tensor: Tensor,
        byte: int,
    ) -> tuple[Tensor, ...]:
        """Return what a tensor, needed beside others of ``byte``, is computed from."""
        key = id(tensor.storage)
        is_small = _SMALL * tensor.byte <= byte
        if key not in self.makers or key in self.stays or is_small:
            return (tensor,)
        if key not in self.roots:
            self.roots[key] = ()  # an entry that writes where it reads
            roots: list[Tensor] = []
            for source in self.makers[key].reads:
                roots += self.find(source, byte)
            self.roots[key] = tuple(roots)
        return self.roots[key]


def _written_ids(entry: TapeEntry) -> set[_StorageId]:
    return {id(tensor.storage) for tensor in entry.writes}


def _group_entries(entries: Sequence[TapeEntry]) -> list[_Group]:
    """Put each entry into the group of its latest producer, if it fits.

    A later group that reads one of its tensors and is as large is tried before.
    """
    groups: list[_Group] = []
    written_by: dict[_StorageId, int] = {}  # index of the group that wrote a storage last
    read_by: dict[_StorageId, int] = {}  # index of the last fusable group that read it
    for entry in entries:
        keys = [id(tensor.storage) for tensor in entry.reads]
        producer = max([written_by[key] for key in keys if key in written_by], default=-1)
        reader = max([read_by[key] for key in keys if key in read_by], default=-1)
        reads_later = reader > producer
        if not reads_later or _largest_elements(groups[reader]) != _count_elements(entry.op):
            reader = producer

        is_fusable = _is_fusable(entry.op)
        place = -1
        if is_fusable:
            place = _find_place(groups, (reader, producer), entry)
        if place < 0:
            place = len(groups)
            groups.append([])
        groups[place].append(entry)

        written_by.update(dict.fromkeys(_written_ids(entry), place))
        if is_fusable:
            read_by.update(dict.fromkeys(keys, place))
    return groups


def _find_place(
    groups: Sequence[_Group],
    candidates: Iterable[int],
    entry: TapeEntry,
) -> int:
    """Return the first of some groups that an entry fits into; -1 where none does."""
    for index in candidates:
        if index < 0:
            continue
        group = groups[index]
        if _is_fusable(group[0].op) and _fits_group(group, entry):
            return index
    return -1


def _sink_groups(
    groups: list[_Group],
    readers: _ReadersOf,
    live_after: set[_StorageId],
) -> list[_Group]:
    """Move pointwise groups that only one later group reads into it.

    Their results are then never written.
    """
    group_of: dict[int, int] = {}  # the group of each entry, by the entry's id
    for index, group in enumerate(groups):
        group_of.update((id(entry), index) for entry in group)

    for index in range(len(groups) - 1, -1, -1):
        group = groups[index]
        if not all(_is_pointwise(entry.op) for entry in group):
            continue
        keys: set[_StorageId] = set()
        for entry in group:
            keys |= _written_ids(entry)
        user = _find_only_user(index, keys, readers, group_of)
        if user is None or keys & live_after:
            continue
        target = groups[user]
        if not all(_is_fusable(entry.op) for entry in target):
            continue
        if all(_fits_group(target, entry) for entry in group):
            target[:0] = group
            group_of.update((id(entry), user) for entry in group)
            groups[index] = []
    return [group for group in groups if group]


def _find_only_user(
    index: int,
    keys: Iterable[_StorageId],
    readers: _ReadersOf,
    group_of: dict[int, int],
) -> int | None:
    """Return the only group other than ``index`` that reads some storages."""
    users: set[int] = set()
    for key in keys:
        users.update([group_of[reader] for reader in readers.get(key, ())])
    users.discard(index)
    return users.pop() if len(users) == 1 else None


def _is_pointwise(op: Operator) -> bool:
    return isinstance(op, Elementwise) and op.function not in _ALONE


def _is_fusable(op: Operator) -> bool:
    return isinstance(op, RowReduction) or _is_pointwise(op)


def _fits_group(group: _Group, entry: TapeEntry) -> bool:
    """Tell whether an entry shares the iteration space of a group.

    It does with as many elements or a row's share, and with one row reduction in all. A
    concatenation that mostly copies what neither computed (a cache that grows by a token) is a copy
    of its own: fused with the rotary embedding of the new token it would be priced as one over the
    whole cache."""
    size = _largest_elements(group)
    elements = _count_elements(entry.op)
    shares_space = elements == 0 or size % elements == 0 or elements % size == 0
    if not shares_space:
        return False
    if isinstance(entry.op, RowReduction) and _has_row_reduction(group):
        return False
    return not _mostly_copies([*group, entry])


def _has_row_reduction(group: _Group) -> bool:
    return any(isinstance(member.op, RowReduction) for member in group)


def _mostly_copies(members: Sequence[TapeEntry]) -> bool:
    """Tell whether a concatenation among members copies more than what they computed."""
    concatenations = [
        member
        for member in members
        if isinstance(member.op, Elementwise) and member.op.function == "cat"
    ]
    if not concatenations:
        return False
    computed: set[_StorageId] = set()
    for member in members:
        computed |= _written_ids(member)
    for member in concatenations:
        whole_byte = sum([tensor.byte for tensor in member.reads])
        computed_byte = sum(
            [tensor.byte for tensor in member.reads if id(tensor.storage) in computed]
        )
        if 0 < 2 * computed_byte < whole_byte:
            return True
    return False


def _largest_elements(group: _Group) -> int:
    return max([_count_elements(entry.op) for entry in group])


def _count_elements(op: Operator) -> int:
    if isinstance(op, RowReduction):
        return op.rows * op.dim
    return op.n if isinstance(op, Elementwise) else 0


@dataclass(frozen=True)
class _GroupTraffic:
    """What a fused kernel reads from outside and writes for others."""

    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    read_byte: int

    @classmethod
    def from_group(
        cls,
        group: _Group,
        readers: _ReadersOf,
        live_after: set[_StorageId],
    ) -> _GroupTraffic:
        members = {id(entry) for entry in group}
        written: dict[_StorageId, Tensor] = {}
        reads: dict[_StorageId, Tensor] = {}
        read_byte: dict[_StorageId, float] = {}
        for entry in group:
            for tensor in entry.reads:
                key = id(tensor.storage)
                byte = min(tensor.byte, entry.op.read_byte)  # a lookup reads a few rows of a table
                if key not in written and byte >= read_byte.get(key, 0.0):
                    reads[key] = tensor
                    read_byte[key] = byte
            for tensor in entry.writes:
                written[id(tensor.storage)] = tensor

        writes = []
        for key, tensor in written.items():
            has_outer_readers = bool(readers.get(key, set()) - members)
            if has_outer_readers or key in live_after:
                writes.append(tensor)
        return cls(tuple(reads.values()), tuple(writes), int(sum(read_byte.values())))

    @property
    def write_byte(self) -> int:
        return sum(tensor.byte for tensor in self.writes)

    @property
    def main(self) -> Tensor:
        """The largest tensor read, whose format the kernel computes in."""
        if self.reads:
            return max(self.reads, key=lambda tensor: tensor.byte)
        return self.writes[0]


def _merge_group(
    group: _Group,
    readers: _ReadersOf,
    live_after: set[_StorageId],
) -> TapeEntry | None:
    """Return a group as one entry.

    None stands for results that are dead, or constants that their readers fold in.
    """
    if not all(_is_fusable(entry.op) and entry.writes for entry in group):
        return group[0]
    traffic = _GroupTraffic.from_group(group, readers, live_after)
    ops = [entry.op for entry in group]
    functions = [op.function for op in ops if isinstance(op, Elementwise)]
    is_constant = len(functions) == len(ops) and set(functions) == {"fill"}
    if not traffic.writes or is_constant:
        return None
    if len(group) == 1:
        return group[0]

    norm = _find_row_reduction(group, functions)
    op: Operator
    if norm is not None:
        op = type(norm)(
            rows=norm.rows,
            dim=norm.dim,
            backward=norm.backward,
            read=traffic.read_byte,
            write=traffic.write_byte,
            dtype=traffic.main.dtype,
            label=ops[0].label,
        )
    else:
        # Generated code walks strided operands in whole rows, so that a fused kernel is as fast as
        # a contiguous one.
        op = Elementwise(
            _name_fused(functions),
            _largest_elements(group),
            dtype=traffic.main.dtype,
            read=traffic.read_byte,
            write=traffic.write_byte,
            label=ops[0].label,
        )
    return TapeEntry(op, traffic.reads, traffic.writes)


def _find_row_reduction(group: _Group, functions: Sequence[str]) -> RowReduction | None:
    """Return the row reduction of a group: one of its operators, or an RMS norm written out."""
    for entry in group:
        if isinstance(entry.op, RowReduction):
            return entry.op
    if not _RMS_NORM_IDIOM.issubset(functions):
        return None
    for entry in group:
        if isinstance(entry.op, Elementwise) and entry.op.function == "mean":
            rows = entry.writes[0].numel
            return RmsNorm(rows, _count_elements(entry.op) // rows)
    return None


def _name_fused(functions: Sequence[str]) -> str:
    """Return the function that some together are, else the costliest of them."""
    for idiom, name in _IDIOMS:
        if idiom.issubset(functions):
            return name
    return max(functions, key=_weigh_function)


def _weigh_function(name: str) -> float:
    function = find_function(name)
    return function.flop + _FLOP_PER_SFU_OP * function.sfu_op
