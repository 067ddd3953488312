"""Operators of the published whole-model runs: our templates as the software of those runs issued them.

The templates are of Hugging Face transformers 5. The runs' own operator lists [Lee2026, artifact] show an earlier
version 4: BERT adds a mask to its scores though nothing is padded; OPT scales its queries and not the scores again;
GPT-2 divides scores by a tensor, which it makes in every layer, as it does the mask's value. Version 4 keeps the
first keys and values of a cache as they are, where 5 copies them. The lists leave copies, casts of norms and
embeddings out, so they do not replace the templates; a test holds the operators on scores against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from wattcast.workload import source
from wattcast.workload.graph import Elementwise, Graph, Layout, Operator
from wattcast.workload.options import Options

DECODERS = ("gpt2", "opt-1.3b", "qwen2-1.5b")
_PACKING = "packing"  # transformers 5 looks for packed sequences where it keeps no cache
_SCORES = "attention.attention"  # what attention does between its projections


def run_graph(model: str, batch: int, seq: int | None, dtype: str) -> Graph:
    """The operators of one published run: base model, eager attention, no head."""
    given: dict[str, Any] = {"batch": batch, "dtype": dtype, "attention": "eager"}
    if seq is not None:
        given |= {"seq": seq, "head": "none"}
    if model in DECODERS:
        given["phase"] = "forward"  # no copies into a cache
    graph = source.load(model, Options(**given))
    issued = _ISSUED.get(model, _as_they_are)
    blocks = tuple(replace(b, ops=tuple(issued(_without_packing(b.ops), batch * (seq or 1)))) for b in graph.blocks)
    return replace(graph, blocks=blocks)


def on_scores(op: Operator) -> bool:
    """Whether an operator scales the scores of attention."""
    return isinstance(op, Elementwise) and op.function == "scale" and op.label.endswith(_SCORES)


def _without_packing(ops: Iterable[Operator]) -> Iterator[Operator]:
    return (op for op in ops if not op.label.endswith(_PACKING))


def _as_they_are(ops: Iterable[Operator], tokens: int) -> Iterator[Operator]:
    yield from ops


def _bert(ops: Iterable[Operator], tokens: int) -> Iterator[Operator]:
    """A mask of one row a sequence is added to the scores."""
    for op in ops:
        yield op
        if isinstance(op, Elementwise) and on_scores(op):
            read = (op.n + tokens) * op.dtype.byte
            yield replace(op, function="add", layout=Layout.BROADCAST, read=read)


def _gpt2(ops: Iterable[Operator], tokens: int) -> Iterator[Operator]:
    """The divisor and the mask's value are made on the device, a number each."""
    for op in ops:
        if on_scores(op):
            number = Elementwise("fill", 1, dtype=op.dtype, label=op.label)
            yield from (number, op, number)
        else:
            yield op


def _opt(ops: Iterable[Operator], tokens: int) -> Iterator[Operator]:
    """Queries were scaled; the scores are not."""
    return (op for op in ops if not on_scores(op))


_ISSUED: dict[str, Callable[[Iterable[Operator], int], Iterator[Operator]]] = {
    "bert-large": _bert,
    "gpt2": _gpt2,
    "opt-1.3b": _opt,
}
