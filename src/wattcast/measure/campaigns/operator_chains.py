"""Measure chains (short sequences of operators) and stacks (layers of made-up models) after their single operators.

A burst repeats one kernel; in a model every kernel follows a different one. A chain takes longer than the sum of
its members because of the gaps between dependent kernels and because of colder caches. Members are measured first,
in the same run, as ordinary burst rows. In a chain each member has operands of its own; in a stack each operator
hands its result to the next, and one layer is the difference between two depths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from wattcast.core.measured_rows import ChainRow, KernelRow, RowKind, read_lines
from wattcast.measure.campaigns import operator_rows
from wattcast.measure.campaigns.kernel_plan import OperatorSpec, read_transformers
from wattcast.measure.campaigns.model_runs import ModelDims
from wattcast.measure.campaigns.operator_rows import KernelCampaign, save_row
from wattcast.measure.campaigns.workload_specs import spec_from_operator

MODELS = ("gpt2", "llama3-8b")
TOKENS = (1, 16, 128, 2048)
Plain = dict[str, Any]


@dataclass(frozen=True)
class OperatorChain:
    """Operators one after another."""

    name: str
    members: tuple[OperatorSpec, ...]

    @property
    def spec(self) -> OperatorSpec:
        """The chain as one operator, for the builder."""
        members = [
            {"family": m.family, "operator": m.operator, "layout": m.layout, "rotated": m.rotated, "detail": m.detail}
            for m in self.members
        ]
        dtype = self.members[0].operator["dtype"]
        return OperatorSpec("chain", {"op": "chain", "dtype": dtype}, detail={"members": members}, chosen="models")


def make_chains() -> list[OperatorChain]:
    """Return parts of a layer at several numbers of tokens, small ones first."""
    found = []
    for tokens in TOKENS:
        for row in (row for row in read_transformers() if row["model"] in MODELS):
            sizes = {name: int(row[name]) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim")}
            for name, make in _PARTS.items():
                members = [spec_from_operator({"dtype": "bf16", **plain}) for plain in make(tokens, **sizes)]
                whole = tuple(_named(spec) for spec in members if spec is not None)
                assert len(whole) == len(members), f"a member of {name} cannot be run"
                found.append(OperatorChain(f"{name} {row['model']} {tokens}", whole))
    return found


def list_chain_members() -> list[OperatorSpec]:
    """List the operators of all chains, each once: a plan for the step that names their kernels."""
    return list({member.id: member for chain in make_chains() for member in chain.members}.values())


def _named(spec: OperatorSpec) -> OperatorSpec:
    return OperatorSpec(spec.family, spec.operator, spec.layout, spec.rotated, spec.detail, "models")


def _linear(m: int, n: int, k: int, **more: Any) -> Plain:
    return {"op": "linear", "m": m, "n": n, "k": k, **more}


def _norm(tokens: int, hidden: int, **_: int) -> list[Plain]:
    """An RMS norm spelled out, as Hugging Face's models run it: eight kernels over little data."""
    n, wide = tokens * hidden, {"dtype": "fp32"}
    by_row = {"layout": "broadcast", "rows": tokens, "read": 4 * (n + tokens), **wide}
    by_column = {"layout": "broadcast", "rows": tokens, "read": 2 * (n + hidden)}
    return [
        {"op": "cast", "n": n, "out_dtype": "fp32"},
        {"op": "square", "n": n, **wide},
        {"op": "mean", "n": n, "write": 4 * tokens, **wide},
        {"op": "shift", "n": tokens, **wide},
        {"op": "rsqrt", "n": tokens, **wide},
        {"op": "mul", "n": n, **(by_row if tokens > 1 else wide)},
        {"op": "cast", "n": n, "out_dtype": "bf16", **wide},
        {"op": "mul", "n": n, **(by_column if tokens > 1 else {})},
    ]


def _rotary(tokens: int, heads: int, head_dim: int, **_: int) -> list[Plain]:
    """Rotary embedding of the queries: x·cos + rotate_half(x)·sin."""
    n, rows = tokens * heads * head_dim, tokens * heads
    spread = {"op": "mul", "n": n, "layout": "broadcast", "rows": rows, "read": 2 * (n + tokens * head_dim)}
    return [
        spread,
        {"op": "neg", "n": n // 2, "layout": "strided", "rows": rows},
        {"op": "cat", "n": n, "layout": "strided", "rows": rows, "run": head_dim // 2},
        spread,
        {"op": "add", "n": n},
        {"op": "scale", "n": n},
    ]


def _mlp(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """Layer norm, two products with bias, gelu, residual."""
    return [
        {"op": "layernorm", "rows": tokens, "dim": hidden},
        _linear(tokens, intermediate, hidden, bias=True),
        {"op": "gelu", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate, bias=True),
        {"op": "add", "n": tokens * hidden},
        {"op": "layernorm", "rows": tokens, "dim": hidden},
    ]


def _gated(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """A gated feed-forward block."""
    return [
        {"op": "rmsnorm", "rows": tokens, "dim": hidden},
        _linear(tokens, intermediate, hidden),
        {"op": "silu", "n": tokens * intermediate},
        _linear(tokens, intermediate, hidden),
        {"op": "mul", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate),
        {"op": "add", "n": tokens * hidden},
    ]


def _attention(tokens: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **_: int) -> list[Plain]:
    """Projections and fused attention: of a prompt, or of one token each behind a cache of 512."""
    few = tokens < 64
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    length = {"batch": tokens, "q_len": 1, "kv_len": 512} if few else {"batch": 1, "q_len": tokens, "kv_len": tokens}
    kv = kv_heads * head_dim
    return [
        {"op": "rmsnorm", "rows": tokens, "dim": hidden},
        _linear(tokens, heads * head_dim, hidden),
        _linear(tokens, kv, hidden),
        _linear(tokens, kv, hidden),
        {"op": "attention", "causal": not few, **shape, **length},
        _linear(tokens, hidden, heads * head_dim),
        {"op": "add", "n": tokens * hidden},
    ]


def _backward(tokens: int, hidden: int, intermediate: int, **_: int) -> list[Plain]:
    """Gradients of a feed-forward block: products of both kinds, sums over rows, gelu's and the norm's."""
    bias = {"op": "sum", "n": tokens * hidden, "write": 2 * hidden, "layout": "transposed"}
    return [
        bias,
        _linear(tokens, intermediate, hidden),
        _linear(hidden, intermediate, tokens, turned=True),
        {"op": "gelu_grad", "n": tokens * intermediate},
        _linear(tokens, hidden, intermediate),
        _linear(intermediate, hidden, tokens, turned=True),
        {"op": "layernorm", "rows": tokens, "dim": hidden, "backward": True},
        {"op": "add", "n": tokens * hidden},
    ]


_PARTS: dict[str, Callable[..., list[Plain]]] = {
    "norm": _norm,
    "rotary": _rotary,
    "mlp": _mlp,
    "gated": _gated,
    "attention": _attention,
    "backward": _backward,
}


def chain_step(campaign: KernelCampaign) -> None:
    """Measure chains, each after those of its members that this process has not measured."""
    every = {chain.spec.id: chain for chain in make_chains()[: campaign.few or None]}
    for spec in campaign.within([chain.spec for chain in every.values()], 2.0, "chain"):
        _measure_chain(campaign, every[spec.id])


def _measure_chain(campaign: KernelCampaign, chain: OperatorChain) -> None:
    bench, spec = campaign.bench, chain.spec
    pattern = bench.gpu.operands.pattern
    names = {member.id: operator_rows.make_row_id(RowKind.BURST, member, pattern) for member in chain.members}
    for member in chain.members:
        save_row(campaign, RowKind.BURST, member)
    alone_s = {key: campaign.latency_s[name] for key, name in names.items() if name in campaign.latency_s}
    campaign.measure(
        RowKind.CHAIN,
        spec,
        make_chain_row(operator_rows.make_blank_row(bench, RowKind.CHAIN, spec), chain, {}),
        lambda: make_chain_row(operator_rows.measure_burst_row(bench, spec), chain, alone_s),
    )


def make_chain_row(row: KernelRow, chain: OperatorChain, alone_s: dict[str, float]) -> ChainRow:
    """Turn a measured burst of a chain into a chain row; ``alone_s`` are its members' latencies, where known."""
    known = all(member.id in alone_s for member in chain.members)
    return ChainRow(
        row.id.replace(f"{RowKind.BURST}-", f"{RowKind.CHAIN}-", 1),
        chain.name,
        specs=tuple(member.id for member in chain.members),
        alone_s=tuple(alone_s[member.id] for member in chain.members) if known else (),
        copies=row.copies,
        replays=row.replays,
        latency_s=row.latency_s,
        latency_spread_s=row.latency_spread_s,
        sm_clock_hz=row.sm_clock_hz,
        temperature_c=row.temperature_c,
        flags=row.flags,
        run=row.run,
        date=row.date,
    )


FEW, MANY = 2, 6  # layers of the two models whose difference is taken


@dataclass(frozen=True)
class LayerStack:
    """A made-up model at one size, and the operators of one of its layers, each as often as it is called."""

    name: str
    dims: ModelDims  # of one layer
    phase: str
    batch: int
    seq: int
    members: tuple[OperatorSpec, ...]
    operators: tuple[str, ...]  # the same as a workload file writes them, JSON

    def spec(self, layers: int) -> OperatorSpec:
        """So many of its layers as one operator, for the builder."""
        dims = asdict(replace(self.dims, layers=layers))
        detail = {"dims": dims, "phase": self.phase, "batch": self.batch, "seq": self.seq}
        return OperatorSpec("stack", {"op": "stack", "dtype": "bf16"}, detail=detail, chosen="models")


@cache
def read_stacks() -> tuple[LayerStack, ...]:
    """Read all shipped stacks in order."""
    return tuple(_read(Path(str(files("wattcast.measure.campaigns").joinpath("stacks.jsonl")))))


def _read(path: Path) -> Iterator[LayerStack]:
    for line in read_lines(path):
        sizes = line["phase"], line["batch"], line["seq"]
        calls = [({k: v for k, v in plain.items() if k != "count"}, plain["count"]) for plain in line["members"]]
        plain = [operator for operator, count in calls for _ in range(count)]
        members = tuple(_spec(operator) for operator in plain)
        yield LayerStack(line["name"], ModelDims(**line["dims"]), *sizes, members, tuple(map(json.dumps, plain)))


def _spec(operator: dict[str, Any]) -> OperatorSpec:
    spec = spec_from_operator(operator)
    assert spec is not None, f"{operator} cannot be run"
    return replace(spec, chosen="models")


def stack_step(campaign: KernelCampaign) -> None:
    """Measure stacks, each after those of its members that this process has not measured."""
    every = {stack.spec(MANY).id: stack for stack in read_stacks()[: campaign.few or None]}
    for spec in campaign.within([stack.spec(MANY) for stack in every.values()], 14.0, "stack"):
        _measure_stack(campaign, every[spec.id])


def _measure_stack(campaign: KernelCampaign, stack: LayerStack) -> None:
    bench, spec = campaign.bench, stack.spec(MANY)
    pattern = bench.gpu.operands.pattern
    names = {member.id: operator_rows.make_row_id(RowKind.BURST, member, pattern) for member in stack.members}
    for member in {member.id: member for member in stack.members}.values():
        save_row(campaign, RowKind.BURST, member)
    alone_s = {key: campaign.latency_s[name] for key, name in names.items() if name in campaign.latency_s}

    def measured() -> ChainRow:
        few = operator_rows.measure_burst_row(bench, stack.spec(FEW))
        return make_layer_row(few, operator_rows.measure_burst_row(bench, spec), stack, alone_s)

    blank = make_layer_row(None, operator_rows.make_blank_row(bench, RowKind.CHAIN, spec), stack, {})
    campaign.measure(RowKind.CHAIN, spec, blank, measured)


def make_layer_row(few: KernelRow | None, many: KernelRow, stack: LayerStack, alone_s: dict[str, float]) -> ChainRow:
    """Return one layer as a chain row, from the difference between two depths."""
    row = replace(
        make_chain_row(many, OperatorChain(stack.name, stack.members), alone_s),
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
