"""Mixtures of experts: routing, the experts' grouped products, and putting tokens back in order."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.dtypes import Dtype
from wattcast.workload import layers, products
from wattcast.workload.functional import activation, divide, fill, reduce, total_last
from wattcast.workload.graph import Elementwise
from wattcast.workload.pointwise import pointwise
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tensor


@dataclass(frozen=True)
class ExpertDims:
    """What a mixture layer needs to know of its model."""

    hidden: int
    experts: int
    chosen: int  # experts a token visits
    intermediate: int  # width of one expert
    shared: int = 0  # width of the expert every token visits
    router: str = "softmax"  # softmax then top-k; or "grouped": DeepSeek-V3's sigmoid with groups
    groups: int = 1
    groups_chosen: int = 1
    renormalise: bool = True
    wide_weights: bool = True  # routing weights stay fp32 until tokens are added up
    activation: str = "silu"


def mixture(dims: ExpertDims, run: Run, x: Tensor) -> Tensor:
    """Every token through its chosen experts (and the shared one), weighted and summed."""
    batch, length, hidden = x.shape
    flat = products.enter_parallel(x, run.tp).view(-1, hidden)
    with x.tape.at("router"):
        weights = route(dims, run, flat)
    with x.tape.at("experts"):
        out = visit(dims, run, flat, weights)
    if dims.shared:
        with x.tape.at("shared"):
            out = out + shared_expert(dims, run, flat)
    return products.leave_parallel(out.view(batch, length, hidden), run.tp)


def shared_expert(dims: ExpertDims, run: Run, x: Tensor) -> Tensor:
    """The gated feed-forward layer that all tokens pass."""
    width = dims.shared // run.tp
    gate = activation(dims.activation, layers.project(run, x, width))
    return layers.project(run, gate * layers.project(run, x, width), dims.hidden)


def route(dims: ExpertDims, run: Run, x: Tensor) -> Tensor:
    """Scores of all experts -> weights of the chosen ones, ``[tokens, chosen]``."""
    if run.engine:
        scores = layers.project(run, x, dims.experts, wide=True)
        if dims.router == "grouped":  # the bias that balances experts, added inside the routing kernel
            x.tape.parameter(dims.experts, dtype=Dtype.FP32)
        return _top(products.softmax(scores), dims.chosen, scores.dtype)
    if dims.router == "grouped":
        return _route_grouped(dims, run, x)
    scores = layers.project(run, x, dims.experts, wide=True)
    weights = _top(products.softmax(scores, wide=True), dims.chosen, Dtype.FP32)
    if dims.renormalise:
        weights = divide(weights, total_last(weights))
    return weights if dims.wide_weights else weights.to(run.dtype)


def _route_grouped(dims: ExpertDims, run: Run, x: Tensor) -> Tensor:
    """DeepSeek-V3: fp32 sigmoid scores, best groups first, then the best experts inside them."""
    tokens = x.shape[0]
    weight = x.tape.parameter(dims.experts, dims.hidden, dtype=run.dtype)
    scores = products.linear(x.to(Dtype.FP32), weight.to(Dtype.FP32))
    scores = activation("sigmoid", scores)
    bias = x.tape.parameter(dims.experts, dtype=Dtype.FP32)
    choice = pointwise("add", scores, bias)
    best = _top(choice.view(tokens * dims.groups, -1), 2, Dtype.FP32)
    group = reduce("sum", best, (tokens, dims.groups))
    _top(group, dims.groups_chosen, Dtype.FP32)
    mask = fill(x.tape, (tokens, dims.groups), Dtype.FP32)
    picked = tokens * dims.groups_chosen
    op = Elementwise("scatter_add", picked, dtype=Dtype.FP32, read=picked * 16, write=picked * 8)
    x.tape.emit(op, (mask,), (mask,))
    spread = mask.unsqueeze(-1).expand(tokens, dims.groups, dims.experts // dims.groups).reshape(tokens, dims.experts)
    keep = pointwise("cast", spread, out_dtype=Dtype.BOOL)
    drop = pointwise("compare", keep, out_dtype=Dtype.BOOL)
    _top(pointwise("masked_fill", choice, drop), dims.chosen, Dtype.FP32, values=False)
    weights = _picked(scores, dims.chosen)
    if dims.renormalise:
        weights = divide(weights, total_last(weights) + 1e-20)
    return weights * 2.5


def _top(scores: Tensor, count: int, dtype: Dtype, *, values: bool = True) -> Tensor:
    """Largest ``count`` of each row: values and int64 places."""
    rows = scores.shape[0]
    out = scores.tape.empty((rows, count), dtype)
    write = out.numel * (dtype.byte + Dtype.INT64.byte)
    scores.tape.emit(Elementwise("topk", scores.numel, dtype=scores.dtype, write=write), (scores,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        return (_spread(g, scores),)

    if values:
        scores.tape.record((out,), (scores,), back)
    return out


def _picked(scores: Tensor, count: int) -> Tensor:
    out = scores.tape.empty((scores.shape[0], count), scores.dtype)
    read = out.numel * (scores.dtype.byte + Dtype.INT64.byte)
    scores.tape.emit(Elementwise("gather", out.numel, dtype=scores.dtype, read=read), (scores,), (out,))
    scores.tape.record((out,), (scores,), lambda g: (_spread(g, scores),))
    return out


def _spread(g: Tensor, like: Tensor) -> Tensor:
    """The gradient of picking: zeros, with values put back in their places."""
    out = fill(g.tape, like.shape, like.dtype)
    read = 2 * g.byte + g.numel * Dtype.INT64.byte
    g.tape.emit(Elementwise("scatter_add", g.numel, dtype=g.dtype, read=read, write=g.byte), (g,), (out,))
    return out


def visit(dims: ExpertDims, run: Run, x: Tensor, weights: Tensor) -> Tensor:
    """Sort tokens by expert, multiply group by group, weigh, put back in order and add up."""
    tokens, picks = x.shape[0], x.shape[0] * dims.chosen
    tape, width = x.tape, dims.intermediate // run.tp
    if not run.engine:
        _sort_by_expert(tape.empty((picks,), Dtype.INT64))
    rows = products.pick_rows(x, picks)
    order = products.pick_rows(weights.view(picks, 1), picks)
    if not run.engine:
        _count_by_expert(tape.empty((picks,), Dtype.INT64), dims.experts)
    groups = shares(picks, dims.experts, dims.chosen, run.skew)
    up = tape.parameter(dims.experts, 2 * width, dims.hidden, dtype=run.weight_dtype)
    down = tape.parameter(dims.experts, dims.hidden, width, dtype=run.weight_dtype)
    inner = products.grouped(rows, up, groups)
    if run.engine:
        gated = layers.gate_fused(inner, dims.activation)
        return reduce("sum", products.grouped(gated, down, groups), (tokens, dims.hidden), across=True)
    gate, value = inner.split(width, width)
    out = products.grouped(activation(dims.activation, gate) * value, down, groups)
    return _put_back(out, order, tokens, x.dtype)


def _sort_by_expert(choice: Tensor) -> None:
    n = choice.numel
    choice.tape.emit(Elementwise("topk", n, dtype=Dtype.INT64, write=2 * n * 8), (choice,), (choice,))
    choice.tape.emit(Elementwise("scale", n, dtype=Dtype.INT64), (choice,), (choice,))


def _count_by_expert(choice: Tensor, experts: int) -> None:
    n = choice.numel
    narrow = pointwise("cast", choice, out_dtype=Dtype.INT32)
    counts = choice.tape.empty((experts,), Dtype.INT32)
    op = Elementwise("scatter_add", n, dtype=Dtype.INT32, read=narrow.byte, write=counts.byte)
    choice.tape.emit(op, (narrow,), (counts,))
    pointwise("cumsum", counts)


def _put_back(out: Tensor, weights: Tensor, tokens: int, dtype: Dtype) -> Tensor:
    """Weighted rows in token order, summed over each token's experts."""
    picks, hidden = out.shape
    weighed = out * weights
    place = fill(out.tape, (picks,), Dtype.INT64)
    op = Elementwise("scatter_add", picks, dtype=Dtype.INT64, read=3 * picks * 8, write=picks * 8)
    out.tape.emit(op, (place,), (place,))
    ordered = products.pick_rows(weighed, picks)
    return products.sum_rows(ordered, tokens).to(dtype).view(tokens, hidden)


def shares(picks: int, experts: int, chosen: int, skew: float) -> list[tuple[int, int]]:
    """Groups of experts with equal numbers of rows: (how many experts, rows each).

    Balanced, all experts share the picks evenly (as many experts as there are picks, when fewer).
    With ``skew`` s, a share s of the picks falls on the same ``chosen`` experts and the rest is even.

    >>> shares(512, 8, 2, 0.0), shares(512, 8, 2, 0.5), shares(6, 8, 2, 0.0)
    ([(8, 64)], [(2, 160), (6, 32)], [(6, 1)])
    """
    if not skew and picks < experts:
        return [(picks, 1)]
    if not skew:
        each, more = picks // experts, picks % experts
        shared = [(more, each + 1), (experts - more, each)]
        return [(size, rows) for size, rows in shared if size and rows]
    hot = round(picks * skew)
    even = _spread_evenly(picks - hot, experts)
    busy = min(chosen, experts)
    rows = [count + (hot // busy + (i < hot % busy) if i < busy else 0) for i, count in enumerate(even)]
    found: dict[int, int] = {}
    for count in rows:
        if count:
            found[count] = found.get(count, 0) + 1
    return [(size, count) for count, size in found.items()]


def _spread_evenly(picks: int, experts: int) -> list[int]:
    return [picks // experts + (i < picks % experts) for i in range(experts)]
