"""Chains: short sequences of different operators in one graph, beside the rows of their members.

A burst repeats one kernel; in a model every kernel follows another one. What a chain takes beyond the sum of its
members is the time between different kernels that depend on one another, and what colder caches cost. A chain is
measured as a burst is; each member has operands of its own, so that a member finds in L2 what is left after the
others. Members are measured first, in the same run, as ordinary burst rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattcast.measure.kernels import rows
from wattcast.measure.kernels.campaign import Campaign, measure_burst
from wattcast.measure.kernels.from_workload import from_operator
from wattcast.measure.kernels.plan import transformers
from wattcast.measure.kernels.spec import Spec
from wattcast.records import ChainRow, KernelRow, RowKind

MODELS = ("gpt2", "llama3-8b")
TOKENS = (1, 16, 128, 2048)
Plain = dict[str, Any]


@dataclass(frozen=True)
class Chain:
    """Operators one after another."""

    name: str
    members: tuple[Spec, ...]

    @property
    def spec(self) -> Spec:
        """The chain as one operator, for the builder."""
        members = [
            {"family": m.family, "operator": m.operator, "layout": m.layout, "rotated": m.rotated, "detail": m.detail}
            for m in self.members
        ]
        dtype = self.members[0].operator["dtype"]
        return Spec("chain", {"op": "chain", "dtype": dtype}, detail={"members": members}, chosen="models")


def chains() -> list[Chain]:
    """Parts of a layer at several numbers of tokens, small ones first."""
    found = []
    for tokens in TOKENS:
        for row in (row for row in transformers() if row["model"] in MODELS):
            sizes = {name: int(row[name]) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim")}
            for name, make in _PARTS.items():
                members = [from_operator({"dtype": "bf16", **plain}) for plain in make(tokens, **sizes)]
                whole = tuple(_named(spec) for spec in members if spec is not None)
                assert len(whole) == len(members), f"a member of {name} cannot be run"
                found.append(Chain(f"{name} {row['model']} {tokens}", whole))
    return found


def members() -> list[Spec]:
    """Operators of all chains, none twice: a plan for the step that names their kernels."""
    return list({member.id: member for chain in chains() for member in chain.members}.values())


def _named(spec: Spec) -> Spec:
    return Spec(spec.family, spec.operator, spec.layout, spec.rotated, spec.detail, "models")


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


def chain_step(campaign: Campaign) -> None:
    """Chains, each after those of its members that this process has not measured."""
    every = {chain.spec.id: chain for chain in chains()[: campaign.few or None]}
    for spec in campaign.within([chain.spec for chain in every.values()], 2.0, "chain"):
        _measure(campaign, every[spec.id])


def _measure(campaign: Campaign, chain: Chain) -> None:
    bench, spec = campaign.bench, chain.spec
    pattern = bench.gpu.operands.pattern
    names = {member.id: rows.row_id(RowKind.BURST, member, pattern) for member in chain.members}
    for member in chain.members:
        measure_burst(campaign, member)
    alone_s = {key: campaign.latency_s[name] for key, name in names.items() if name in campaign.latency_s}
    campaign.measure(
        rows.row_id(RowKind.CHAIN, spec, pattern),
        RowKind.CHAIN,
        spec,
        lambda: chain_row(rows.burst(bench, spec), chain, alone_s),
        lambda: chain_row(rows.blank(bench, RowKind.CHAIN, spec), chain, {}),
    )


def chain_row(row: KernelRow, chain: Chain, alone_s: dict[str, float]) -> ChainRow:
    """A measured burst of a chain as a row of its own kind; ``alone_s``: its members' latencies, where known."""
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
