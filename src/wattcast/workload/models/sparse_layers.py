"""Mixtures of experts, which only some decoders have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log, sqrt
from typing import Protocol, TypeAlias

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.engine_operators import FusedExperts
from wattcast.workload.engine_row_operators import Route
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import PassSettings
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    fill,
    pointwise,
    reduce,
)
from wattcast.workload.workload_coefficients import WORKLOADS

PickGroups: TypeAlias = list[tuple[int, int]]  # how many experts, and the rows of each of them
# Launches of a shared expert: the products in, their gate, the product out; eagerly gate and value
# are products and a multiplication apart.
_SHARED_LAUNCHES = WORKLOADS.shared_launches
_ENGINE_SHARED_LAUNCHES = WORKLOADS.engine_shared_launches


class ExpertDims(Protocol):
    """What is asked of the dimensions of a decoder with experts."""

    @property
    def hidden(self) -> int: ...  # width of the model

    @property
    def activation(self) -> str: ...  # of gate and value

    @property
    def experts(self) -> int: ...  # in all

    @property
    def experts_chosen(self) -> int: ...  # that a token visits

    @property
    def expert_intermediate(self) -> int: ...  # width of one

    @property
    def expert_bias(self) -> bool: ...  # added inside the products

    @property
    def router(self) -> str: ...  # how routing weights are made

    @property
    def router_wide(self) -> bool: ...  # routing weights stay fp32 until tokens are added up

    @property
    def router_renormalise(self) -> bool: ...  # weights of chosen experts add up to one

    @property
    def shared_intermediate(self) -> int: ...  # width of the expert every token visits

    @property
    def shared_gate(self) -> bool: ...  # it is weighed by a gate of its own


def mix_experts(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    groups: tuple[int, int],
) -> Tensor:
    """Send every token through its chosen experts and the shared one, weigh the results and sum
    them.

    ``groups`` are those of a grouped router: how many there are, and of how many experts are
    chosen."""
    batch, length, hidden = x.shape
    flat = functional.enter_parallel(x, run.tp).view(-1, hidden)
    with x.tape.scope("router"):
        weights = _route_tokens(dims, run, flat, groups)
    with x.tape.scope("experts"):
        if dims.expert_bias:  # added inside the products
            width = 2 * (dims.expert_intermediate // run.expert_width_share) + dims.hidden
            x.tape.parameter(dims.experts // run.ep, width, dtype=run.dtype)
        if run.expert_replicas > 1:
            return _send_to_experts(dims, run, flat).view(batch, length, hidden)
        out = _visit_experts(dims, run, flat, weights)
    if dims.shared_intermediate:
        with x.tape.scope("shared"):
            out = out + _run_shared_expert(dims, run, flat)
    return functional.leave_parallel(out.view(batch, length, hidden), run.tp)


def _run_shared_expert(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Return this GPU's part of the expert that every token visits; its result is summed later."""
    alone = replace(run, tp=1)
    width = dims.shared_intermediate // run.tp
    shared = layers.gated_feed_forward(alone, x, width, dims.activation)
    if not dims.shared_gate:
        return shared
    # Each token weighs it by a number (Qwen)
    score = layers.project(run, x, 1, wide=True)
    return functional.activation("sigmoid", score) * shared


def _send_to_experts(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Visit experts that replicas share, on the GPU that gets most tokens.

    The shared expert runs meanwhile. Each of a replica's GPUs sends its part of the tokens to the
    GPUs of their experts (a token goes to a GPU once), gets the weighted sums back, and passes the
    result to its tensor-parallel peers.
    """
    tokens = x.shape[0]
    local_tokens = -(-tokens // run.tp)
    local = x if run.tp == 1 else x.slice(0, 0, local_tokens)
    picks = tokens * dims.experts_chosen * run.expert_replicas
    groups = busiest_picks(
        picks,
        dims.experts,
        dims.experts_chosen,
        run.skew,
        run.ep,
    )

    # GPUs that a token's choices fall on, by chance
    reached = run.ep * (1.0 - (1.0 - 1.0 / run.ep) ** dims.experts_chosen)
    sent = max(round(local_tokens * reached), 1)
    byte = sent * dims.hidden * x.dtype.byte
    width = dims.shared_intermediate
    overlaps = _count_shared_launches(run) if width else 0
    rows = functional.send_rows(
        local,
        sent,
        byte,
        run.ep,
        overlaps=overlaps,
    )

    shared = None
    if width:
        shared = layers.gated_feed_forward(replace(run, tp=1), local, width, dims.activation)
    if not run.served:
        rows = functional.pick_rows(rows, _count_rows(groups))
    partial_sums = _multiply_experts(
        dims,
        run,
        rows,
        groups,
        sent,
    )
    returned = functional.send_rows(partial_sums, sent, byte, run.ep)
    out = reduce("sum", returned, (local_tokens, dims.hidden), across=True)
    if shared is not None:
        out = out + shared
    if run.tp == 1:
        return out
    functional.gather_parts(out, run.tp)
    return x.tape.empty((tokens, dims.hidden), x.dtype)


def _count_shared_launches(run: PassSettings) -> int:
    """Count the operators of the shared expert, those that quantize its inputs included."""
    if not run.engine:
        return _SHARED_LAUNCHES
    if run.recipe is None or run.recipe.activations is None:
        return _ENGINE_SHARED_LAUNCHES
    quantizing = 2 if run.recipe.mode == "block" else 1
    return _ENGINE_SHARED_LAUNCHES + quantizing


def _count_rows(groups: PickGroups) -> int:
    return sum(experts * rows for experts, rows in groups)


def _route_tokens(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    groups: tuple[int, int],
) -> Tensor:
    """Turn scores of all experts into weights of the chosen ones, ``[tokens, chosen]``."""
    if dims.router == "grouped" and not run.engine:
        return _route_grouped(dims, run, x, *groups)
    scores = layers.project(
        run,
        x,
        dims.experts,
        dims.expert_bias,
        wide=True,
    )
    chosen = dims.experts_chosen
    if run.engine:
        if dims.router == "grouped":
            # The bias that balances experts is added inside the routing kernel
            x.tape.parameter(dims.experts, dtype=Dtype.FP32)
        if run.served:
            return _route_in_one_kernel(dims, run, scores)
        return _select_top(functional.softmax(scores), chosen, scores.dtype)
    if dims.router == "late":
        return functional.softmax(_select_top(scores, chosen, scores.dtype))
    weights = _select_top(functional.softmax(scores, wide=True), chosen, Dtype.FP32)
    if dims.router_renormalise:
        weights = functional.divide(weights, functional.reduce_last("sum", weights))
    return weights if dims.router_wide else weights.to(run.dtype)


def _route_in_one_kernel(
    dims: ExpertDims,
    run: PassSettings,
    scores: Tensor,
) -> Tensor:
    """Choose experts by one kernel of an engine."""
    tokens = scores.shape[0]
    op = Route(
        rows=tokens,
        dim=dims.experts,
        experts=dims.experts,
        top_k=dims.experts_chosen,
        mode="grouped" if dims.router == "grouped" else "softmax",
        dtype=run.dtype,
    )
    return scores.tape.launch(op, (scores,), (tokens, dims.experts_chosen), Dtype.FP32)


def _route_grouped(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    groups: int,
    groups_chosen: int,
) -> Tensor:
    """Route as DeepSeek-V3: fp32 sigmoid scores, best groups first, then their best experts."""
    tape = x.tape
    tokens = x.shape[0]
    chosen = dims.experts_chosen
    weight = tape.parameter(dims.experts, dims.hidden, dtype=run.dtype)
    logits = functional.linear(x.to(Dtype.FP32), weight.to(Dtype.FP32))
    scores = functional.activation("sigmoid", logits)
    bias = tape.parameter(dims.experts, dtype=Dtype.FP32)
    choice = pointwise("add", scores, bias)

    # The best groups, by the sum of their two best experts
    best = _select_top(choice.view(tokens * groups, -1), 2, Dtype.FP32)
    _select_top(reduce("sum", best, (tokens, groups)), groups_chosen, Dtype.FP32)

    # The mask of experts outside them
    mask = fill(tape, (tokens, groups), Dtype.FP32)
    picked = tokens * groups_chosen
    mark = Elementwise(
        "scatter_add",
        picked,
        dtype=Dtype.FP32,
        read=picked * 16,
        write=picked * 8,
    )
    tape.emit(mark, (mask,), (mask,))
    spread = mask.unsqueeze(-1).expand(tokens, groups, dims.experts // groups)
    is_inside = pointwise("cast", spread.reshape(tokens, dims.experts), out_dtype=Dtype.BOOL)
    is_outside = pointwise("compare", is_inside, out_dtype=Dtype.BOOL)
    masked = pointwise("masked_fill", choice, is_outside)

    # The best experts, and their scores as weights
    _select_top(masked, chosen, Dtype.FP32, differentiable=False)
    picks = tokens * chosen
    read = picks * (Dtype.FP32.byte + Dtype.INT64.byte)
    gather = Elementwise("gather", picks, dtype=Dtype.FP32, read=read)
    weights = tape.launch(gather, (scores,), (tokens, chosen), Dtype.FP32)
    weights = weights.with_gradient(
        lambda g: functional.scatter_gradient(g, scores, g.numel), scores
    )
    if dims.router_renormalise:
        weights = functional.divide(weights, functional.reduce_last("sum", weights) + 1e-20)
    return weights * 2.5


def _select_top(
    scores: Tensor,
    count: int,
    dtype: Dtype,
    *,
    differentiable: bool = True,
) -> Tensor:
    """Return the largest ``count`` of each row; the kernel writes values and int64 places."""
    rows = scores.shape[0]
    write = rows * count * (dtype.byte + Dtype.INT64.byte)
    op = Elementwise("topk", scores.numel, dtype=scores.dtype, write=write)
    out = scores.tape.launch(op, (scores,), (rows, count), dtype)
    if not differentiable:
        return out
    return out.with_gradient(lambda g: functional.scatter_gradient(g, scores, g.numel), scores)


def _visit_experts(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    weights: Tensor,
) -> Tensor:
    """Send tokens through the experts of this GPU and add up what the experts return."""
    tokens = x.shape[0]
    picks = tokens * dims.experts_chosen
    if run.ep > 1:  # a part of the experts, of whose tokens all others have a copy
        groups = busiest_picks(
            picks,
            dims.experts,
            dims.experts_chosen,
            run.skew,
            run.ep,
        )
        rows = x if run.served else functional.pick_rows(x, _count_rows(groups))
        return _multiply_experts(
            dims,
            run,
            rows,
            groups,
            tokens,
        )
    if run.served:
        choices = (tokens, dims.experts, dims.experts_chosen)
        return _fused_experts(
            dims,
            run,
            x,
            tokens,
            choices,
            run.skew,
        )
    groups = share_picks(picks, dims.experts, dims.experts_chosen, run.skew)
    if run.engine:
        rows = functional.pick_rows(x, picks)
        functional.pick_rows(weights.view(picks, 1), picks)
        return _multiply_experts(
            dims,
            run,
            rows,
            groups,
            tokens,
        )
    return _visit_eagerly(
        dims,
        run,
        x,
        weights,
        groups,
    )


def _visit_eagerly(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    weights: Tensor,
    groups: PickGroups,
) -> Tensor:
    """Sort tokens by expert, multiply group by group, weigh, put back in order and add up."""
    tape = x.tape
    tokens = x.shape[0]
    picks = tokens * dims.experts_chosen
    width = dims.expert_intermediate // run.tp

    _sort_choices(tape, picks)
    rows = functional.pick_rows(x, picks)
    row_weights = functional.pick_rows(weights.view(picks, 1), picks)
    _count_choices(dims, x, picks)

    # In fp8, rows are padded to whole blocks; in wider formats their number does not matter
    if run.fused_training:
        groups = [
            (size, -(-rows // WORKLOADS.trained_rows) * WORKLOADS.trained_rows)
            for size, rows in groups
        ]
    up = tape.parameter(dims.experts, 2 * width, dims.hidden, dtype=run.weight_dtype)
    down = tape.parameter(dims.experts, dims.hidden, width, dtype=run.weight_dtype)
    fp8 = run.fp8_products
    inner = functional.grouped_matmul(rows, up, groups, fp8=fp8)
    gate, value = inner.split(width, width)
    gated = functional.activation(dims.activation, gate) * value
    if run.fused_training:  # frameworks weigh the narrower side
        weighed = (gated * row_weights).to(x.dtype)
        out = functional.grouped_matmul(weighed, down, groups, fp8=fp8)
        return functional.sum_picked_rows(out, tokens)
    out = functional.grouped_matmul(gated, down, groups, fp8=fp8)
    weighed = out * row_weights

    _invert_order(tape, picks)
    ordered = functional.pick_rows(weighed, picks)
    return functional.sum_rows(ordered, tokens).to(x.dtype).view(tokens, dims.hidden)


def _sort_choices(tape: Tape, picks: int) -> None:
    """Sort the choices of all tokens by expert."""
    choice = tape.empty((picks,), Dtype.INT64)
    sort = Elementwise("topk", picks, dtype=Dtype.INT64, write=2 * picks * 8)
    tape.emit(sort, (choice,), (choice,))
    tape.emit(Elementwise("scale", picks, dtype=Dtype.INT64), (choice,), (choice,))


def _invert_order(tape: Tape, picks: int) -> None:
    """Work out which place each row had before it was sorted."""
    place = fill(tape, (picks,), Dtype.INT64)
    invert = Elementwise(
        "scatter_add",
        picks,
        dtype=Dtype.INT64,
        read=3 * picks * 8,
        write=picks * 8,
    )
    tape.emit(invert, (place,), (place,))


def _count_choices(
    dims: ExpertDims,
    x: Tensor,
    picks: int,
) -> None:
    """Count how often each expert was chosen, and sum the counts up."""
    tape = x.tape
    choice = tape.empty((picks,), Dtype.INT64)
    narrow = pointwise("cast", choice, out_dtype=Dtype.INT32)
    counts = tape.empty((dims.experts,), Dtype.INT32)
    op = Elementwise(
        "scatter_add",
        picks,
        dtype=Dtype.INT32,
        read=narrow.byte,
        write=counts.byte,
    )
    tape.emit(op, (narrow,), (counts,))
    pointwise("cumsum", counts)


def _multiply_experts(
    dims: ExpertDims,
    run: PassSettings,
    rows: Tensor,
    groups: PickGroups,
    tokens: int,
) -> Tensor:
    """Multiply rows by this GPU's experts and sum them token by token, as an engine does."""
    local_experts = dims.experts // run.ep
    if run.served:  # in one call, each pick as a token that visits one expert
        picks = _count_rows(groups)
        least = min(rows for _, rows in groups)
        busy, most = max(groups, key=lambda group: group[1])
        skew = min(busy * (most - least) / picks, 1.0)
        return _fused_experts(
            dims,
            run,
            rows,
            tokens,
            (picks, local_experts, 1),
            skew,
        )
    tape = rows.tape
    width = dims.expert_intermediate // run.expert_width_share
    up = tape.parameter(local_experts, 2 * width, dims.hidden, dtype=run.weight_dtype)
    down = tape.parameter(local_experts, dims.hidden, width, dtype=run.weight_dtype)
    inner = functional.grouped_matmul(rows, up, groups)
    gated = engine_layers.gate_in_one_kernel(run, inner, dims.activation)
    out = functional.grouped_matmul(gated, down, groups)
    return reduce("sum", out, (tokens, dims.hidden), across=True)


def _fused_experts(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    tokens: int,
    choices: tuple[int, int, int],
    skew: float,
) -> Tensor:
    """Run experts in one call of the engine, which sorts, quantizes, multiplies, gates and adds up.

    ``choices`` are the tokens it gets, its experts, and the experts that each token visits.
    """
    tape = x.tape
    visiting, experts, top_k = choices
    width = dims.expert_intermediate // run.expert_width_share
    recipe = run.recipe
    bit = 16.0 if recipe is None else recipe.bit
    up = engine_layers.narrow_parameter(tape, (experts, 2 * width, dims.hidden), run.dtype, bit)
    down = engine_layers.narrow_parameter(tape, (experts, dims.hidden, width), run.dtype, bit)
    # vLLM leaves DeepGEMM's experts where eight GPUs share a layer (its pull request 29346)
    shares = max(run.tp, run.ep)
    all_picks = tokens * dims.experts_chosen if shares < 8 else 0
    op = FusedExperts(
        tokens=visiting,
        experts=experts,
        top_k=top_k,
        hidden=dims.hidden,
        intermediate=width,
        weights="bf16" if recipe is None else recipe.weights,
        scales="none" if recipe is None else recipe.expert_scales or "tensor",
        kernel="",
        skew=skew,
        all_picks=all_picks,
        dtype=run.dtype if recipe is None else recipe.activations or run.dtype,
    )
    return tape.launch(op, (x, up, down), (tokens, dims.hidden))


def busiest_picks(
    picks: int,
    experts: int,
    chosen: int,
    skew: float,
    gpus: int,
) -> PickGroups:
    """Return groups of experts with equal numbers of rows on the GPU that gets most.

    A group is how many experts, and the rows of each. Everyone waits for that GPU. Of the picks
    that fall evenly, μ a GPU on average, chance gives the busiest of E GPUs about μ + √(2·μ·ln E)
    (the largest of E normal numbers); ``skew`` adds its share of the experts chosen always.

    >>> busiest_picks(4096, 64, 8, 0.0, 8), busiest_picks(4096, 64, 8, 0.5, 8)
    ([(6, 70), (2, 69)], [(1, 292), (1, 37), (6, 36)])
    """
    local_experts = experts // gpus
    hot = round(picks * skew)
    hot_experts = min(chosen, experts)
    local_hot_experts = min(-(-hot_experts // gpus), local_experts)

    even = picks - hot
    mean = even / gpus
    local = min(round(mean + sqrt(2.0 * mean * log(gpus))), even)
    rows_each, remainder = divmod(local, local_experts)
    rows: Counter[int] = Counter()
    for place in range(local_experts):
        count = rows_each
        if place >= local_experts - remainder:
            count += 1
        if place < local_hot_experts:
            count += round(hot / hot_experts)
        rows[count] += 1
    groups = [(size, count) for count, size in sorted(rows.items(), reverse=True) if count]
    return groups or [(1, 1)]


def share_picks(
    picks: int,
    experts: int,
    chosen: int,
    skew: float,
) -> PickGroups:
    """Return groups of experts with equal numbers of rows: how many experts, and the rows of each.

    Balanced, all experts share the picks evenly (as many experts as there are picks, when fewer).
    With ``skew`` s, a share s of the picks falls on the same ``chosen`` experts and the rest is
    even.

    >>> share_picks(512, 8, 2, 0.0), share_picks(512, 8, 2, 0.5), share_picks(6, 8, 2, 0.0)
    ([(8, 64)], [(2, 160), (6, 32)], [(6, 1)])
    """
    hot = round(picks * skew)
    hot_experts = min(chosen, experts)
    even_each, even_remainder = divmod(picks - hot, experts)
    hot_each, hot_remainder = divmod(hot, hot_experts)
    rows: Counter[int] = Counter()
    for place in range(experts):
        count = even_each
        if place < even_remainder:
            count += 1
        if place < hot_experts:
            count += hot_each
            if place < hot_remainder:
                count += 1
        rows[count] += 1
    return [(size, count) for count, size in rows.items() if count]
