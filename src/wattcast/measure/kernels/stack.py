"""Stacks: equal layers of models nobody has, run as a model runs them, beside the rows of their operators.

Members of a chain read operands of their own; in a model each operator reads what the one before wrote, while weights
pass by that nobody read for a whole layer. A stack is a Hugging Face model of a made-up size with few layers and
one with many, in one graph each: the difference is what a layer takes, free of embedding, masks and head. Its
operators are measured first, in the same run, as ordinary burst rows. ``stacks.jsonl`` lists them, as Wattcast's own
front end spells the layers (``tests/measure/make_stacks.py`` writes it and a test holds it to that).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from wattcast.measure.kernels import rows
from wattcast.measure.kernels.campaign import Campaign, measure_burst
from wattcast.measure.kernels.chain import Chain, chain_row
from wattcast.measure.kernels.from_workload import from_operator
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.models.plan import Dims
from wattcast.records import ChainRow, KernelRow, RowKind, read_lines

FEW, MANY = 2, 6  # layers of the two models whose difference is taken


@dataclass(frozen=True)
class Stack:
    """A made-up model at one size, and the operators of one of its layers, each as often as it is called."""

    name: str
    dims: Dims  # of one layer
    phase: str
    batch: int
    seq: int
    members: tuple[Spec, ...]
    operators: tuple[str, ...]  # the same as a workload file writes them, JSON

    def spec(self, layers: int) -> Spec:
        """So many of its layers as one operator, for the builder."""
        dims = asdict(replace(self.dims, layers=layers))
        detail = {"dims": dims, "phase": self.phase, "batch": self.batch, "seq": self.seq}
        return Spec("stack", {"op": "stack", "dtype": "bf16"}, detail=detail, chosen="models")


@cache
def stacks() -> tuple[Stack, ...]:
    """All that ship, in order."""
    return tuple(_read(Path(str(files("wattcast.measure.kernels").joinpath("stacks.jsonl")))))


def _read(path: Path) -> Iterator[Stack]:
    for line in read_lines(path):
        sizes = line["phase"], line["batch"], line["seq"]
        calls = [({k: v for k, v in plain.items() if k != "count"}, plain["count"]) for plain in line["members"]]
        plain = [operator for operator, count in calls for _ in range(count)]
        members = tuple(_spec(operator) for operator in plain)
        yield Stack(line["name"], Dims(**line["dims"]), *sizes, members, tuple(map(json.dumps, plain)))


def _spec(operator: dict[str, Any]) -> Spec:
    spec = from_operator(operator)
    assert spec is not None, f"{operator} cannot be run"
    return replace(spec, chosen="models")


def stack_step(campaign: Campaign) -> None:
    """Stacks, each after those of its members that this process has not measured."""
    every = {stack.spec(MANY).id: stack for stack in stacks()[: campaign.few or None]}
    for spec in campaign.within([stack.spec(MANY) for stack in every.values()], 14.0, "stack"):
        _measure(campaign, every[spec.id])


def _measure(campaign: Campaign, stack: Stack) -> None:
    bench, spec = campaign.bench, stack.spec(MANY)
    pattern = bench.gpu.operands.pattern
    names = {member.id: rows.row_id(RowKind.BURST, member, pattern) for member in stack.members}
    for member in {member.id: member for member in stack.members}.values():
        measure_burst(campaign, member)
    alone_s = {key: campaign.latency_s[name] for key, name in names.items() if name in campaign.latency_s}

    def measured() -> ChainRow:
        few = rows.burst(bench, stack.spec(FEW))
        return layer_row(few, rows.burst(bench, spec), stack, alone_s)

    campaign.measure(
        rows.row_id(RowKind.CHAIN, spec, pattern),
        RowKind.CHAIN,
        spec,
        measured,
        lambda: layer_row(None, rows.blank(bench, RowKind.CHAIN, spec), stack, {}),
    )


def layer_row(few: KernelRow | None, many: KernelRow, stack: Stack, alone_s: dict[str, float]) -> ChainRow:
    """One layer as a chain: the difference of two depths; ``alone_s``: its members' latencies, where known."""
    row = replace(
        chain_row(many, Chain(stack.name, stack.members), alone_s),
        operators=stack.operators,
        handed_on=True,
        latency_s=None,
        latency_spread_s=None,
    )
    if few is None or not (few.latency_s and many.latency_s):
        return row
    spread_s = [one.latency_spread_s or 0.0 for one in (few, many)]
    return replace(
        row,
        latency_s=(many.latency_s - few.latency_s) / (MANY - FEW),
        latency_spread_s=(spread_s[0] ** 2 + spread_s[1] ** 2) ** 0.5 / (MANY - FEW),
        flags=tuple(dict.fromkeys([*few.flags, *many.flags])),
    )
