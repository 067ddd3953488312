"""A workload as blocks of operators in issue order, and sums over all of it. Nothing here depends
on a GPU.

A ``Graph`` is a sequence of blocks, each of which repeats (a transformer's layer), so that a model
of eighty layers takes as little memory as one of two."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass

from wattcast.core import bad_value
from wattcast.workload.engine_schedule import EngineStep
from wattcast.workload.operator_base import (
    MOST_CALLS,
    Operator,
    OperatorColumns,
)
from wattcast.workload.picture_pipeline import PicturePart

MOST_LAYER_HOST = 100.0  # times what a layer usually costs the host


@dataclass(frozen=True)
class Block:
    """Operators issued in order; the whole sequence runs ``repeat`` times.

    Neighbouring blocks with the same ``step`` are one step of an inference engine.
    """

    ops: Sequence[Operator]  # a tuple; many lie in columns
    repeat: int = 1
    label: str = ""
    step: EngineStep | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.repeat <= MOST_CALLS:
            raise bad_value("block.repeat", f"a whole number from 1 to {MOST_CALLS:,}", self.repeat)


@dataclass(frozen=True)
class Graph:
    """A workload: blocks of operators in issue order, and the memory it needs."""

    name: str
    blocks: tuple[Block, ...]
    memory_byte: float | None = None  # weights, cache, activations, optimiser; None: unknown
    assumptions: tuple[str, ...] = ()  # every default taken on the way here
    stack: str = ""  # the software that issues the operators; "": not known
    phase: str = ""  # of a model: prefill, decode, generate, train, forward
    tokens: int | None = None  # of one run on all GPUs together; None: the workload has no tokens
    items: int | None = None  # pictures, audio clips ... of one run on all GPUs together
    item: str = ""  # the word for one of them
    parts: tuple[PicturePart, ...] = ()  # of a picture: text encoders, denoiser, decoder
    gpu_count: int = 1  # that run this graph at the same time
    # cold: from device memory, warm: in L2 where they fit; "": as the operators before leave them
    operands: str = ""
    layer_host: float = 1.0  # what a layer costs the host besides its operators, over the usual

    def __post_init__(self) -> None:
        if not any(block.ops for block in self.blocks):
            raise bad_value(self.name or "workload", "at least one operator", "none")
        if not 0.0 <= self.layer_host <= MOST_LAYER_HOST:
            expected = f"a factor from 0 to {MOST_LAYER_HOST:g}"
            raise bad_value(f"{self.name}: layer_host", expected, self.layer_host)

    @property
    def unit(self) -> tuple[str, int]:
        """What speed and energy are counted in, and how many of them one run makes on all GPUs.

        That is a token, else a picture or another item, else the run itself.
        """
        if self.tokens is not None:
            return "token", self.tokens
        if self.items is not None:
            return self.item or "item", self.items
        return "run", 1

    @classmethod
    def from_operators(
        cls,
        name: str,
        ops: Iterable[Operator],
    ) -> Graph:
        """Make a graph of one block."""
        return cls(name, (Block(tuple(ops)),))

    def calls(self) -> Iterator[tuple[Operator, int]]:
        """Yield each operator with the number of its runs; equal operators are not merged."""
        for block in self.blocks:
            for op in block.ops:
                yield op, op.count * block.repeat

    def stack_forms(self) -> Iterator[Operator]:
        """Yield each operator; where there are many, one for all that differ in sizes alone, which
        are arrays.
        """
        for block in self.blocks:
            yield from (
                block.ops.stack_forms() if isinstance(block.ops, OperatorColumns) else block.ops
            )

    @property
    def flop(self) -> float:
        """Floating-point operations of the whole workload."""
        return sum(op.flop * calls for op, calls in self.calls())

    @property
    def byte(self) -> float:
        """Bytes read and written by all operators when nothing is cached."""
        return sum((op.read_byte + op.write_byte) * calls for op, calls in self.calls())


@dataclass(frozen=True)
class GraphTotals:
    """Work of a whole graph. Products are matrix products, convolutions and attention.

    ``product_flop`` leaves out what a causal mask skips; ``product_flop_dense`` counts it, as
    PyTorch does."""

    calls: int
    flop: float
    product_flop: float
    product_flop_dense: float
    byte: float


def count_operators(graph: Graph) -> dict[Operator, int]:
    """Return how often each distinct operator is called, in order of first use."""
    count: dict[Operator, int] = {}
    for op, calls in graph.calls():
        count[op] = count.get(op, 0) + calls
    return count


def compute_totals(graph: Graph) -> GraphTotals:
    """Sum calls, arithmetic and bytes over the whole graph."""
    count = count_operators(graph)
    products = [(op, calls) for op, calls in count.items() if op.is_product]
    return GraphTotals(
        calls=sum(count.values()),
        flop=graph.flop,
        product_flop=sum(op.flop * calls for op, calls in products),
        product_flop_dense=sum(op.flop_dense * calls for op, calls in products),
        byte=graph.byte,
    )
