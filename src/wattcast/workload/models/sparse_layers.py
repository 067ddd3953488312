"""Layers that only some decoders have: mixtures of experts, and scans that carry a state along the
sequence.

A scan stands in place of attention: Mamba-2, the gated delta rule, lightning attention. It is one
call of a library (mamba-ssm, flash-linear-attention) on all stacks, which nobody measured here. Its
operator has the work; everything around it is products, a short convolution and a gated norm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import log, sqrt
from typing import TYPE_CHECKING, TypeAlias

from wattcast.core import Dtype, bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.engine_operators import FusedExperts
from wattcast.workload.engine_row_operators import Route
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import Elementwise, RmsNorm
from wattcast.workload.program import PassSettings
from wattcast.workload.scan_operators import CausalConv, StateScan
from wattcast.workload.symbolic_tensor import Tensor, fill, pointwise, reduce

if TYPE_CHECKING:
    from wattcast.workload.models.decoders import DecoderDims, LatentDims

ExpertDims: TypeAlias = "DecoderDims | LatentDims"
PickGroups: TypeAlias = list[tuple[int, int]]  # how many experts, and the rows of each of them
TRAINED_ROWS = 32  # rows of an expert come in multiples of this: a block of MXFP8


def mix_experts(dims: ExpertDims, run: PassSettings, x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Send every token through its chosen experts (and the shared one), weigh the results and sum
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
            # its result is summed later
            width = dims.shared_intermediate // run.tp
            alone = replace(run, tp=1)
            shared = layers.gated_feed_forward(alone, flat, width, dims.activation)
            if dims.shared_gate:  # each token weighs it by a number of its own (Qwen)
                shared = (
                    functional.activation("sigmoid", layers.project(run, flat, 1, wide=True))
                    * shared
                )
            out = out + shared
    return functional.leave_parallel(out.view(batch, length, hidden), run.tp)


def _send_to_experts(dims: ExpertDims, run: PassSettings, x: Tensor) -> Tensor:
    """Visit experts that replicas share, on the GPU that gets most tokens; the shared expert runs
    meanwhile.

    Each of a replica's GPUs sends its part of the tokens to the GPUs of their experts (a token goes
    to a GPU once), gets the weighted sums back, and gives the result to its tensor-parallel peers.
    """
    tokens = x.shape[0]
    own = -(-x.shape[0] // run.tp)
    picks = tokens * dims.experts_chosen * run.expert_replicas
    groups = busiest_picks(picks, dims.experts, dims.experts_chosen, run.skew, run.ep)
    # GPUs that a token's choices fall on, by chance
    reached = run.ep * (1.0 - (1.0 - 1.0 / run.ep) ** dims.experts_chosen)
    sent = max(round(own * reached), 1)
    byte = sent * dims.hidden * x.dtype.byte
    mine = x if run.tp == 1 else x.slice(0, 0, own)
    # beside it run the operators of the shared expert: the products in, their gate, the product
    # out, and quantizing
    quantized = run.recipe is not None and run.recipe.activations is not None
    beside = (
        3 + quantized * (2 if run.recipe is not None and run.recipe.mode == "block" else 1)
        if run.engine
        else 5
    )
    rows = functional.send_rows(
        mine, sent, byte, run.ep, overlaps=beside if dims.shared_intermediate else 0
    )
    alone = replace(run, tp=1)
    width = dims.shared_intermediate
    shared = layers.gated_feed_forward(alone, mine, width, dims.activation) if width else None
    if not run.served:
        rows = functional.pick_rows(rows, sum(size * count for size, count in groups))
    partial = _multiply_experts(dims, run, rows, groups, sent)
    out = reduce(
        "sum", functional.send_rows(partial, sent, byte, run.ep), (own, dims.hidden), across=True
    )
    out = out if shared is None else out + shared
    if run.tp == 1:
        return out
    functional.gather_parts(out, run.tp)
    return x.tape.empty((tokens, dims.hidden), x.dtype)


def _route_tokens(
    dims: ExpertDims, run: PassSettings, x: Tensor, groups: tuple[int, int]
) -> Tensor:
    """Turn scores of all experts into weights of the chosen ones, ``[tokens, chosen]``."""
    if dims.router == "grouped" and not run.engine:
        return _route_grouped(dims, run, x, *groups)
    scores = layers.project(run, x, dims.experts, dims.expert_bias, wide=True)
    if run.engine:
        if (
            dims.router == "grouped"
        ):  # the bias that balances experts, added inside the routing kernel
            x.tape.parameter(dims.experts, dtype=Dtype.FP32)
        if run.served:
            mode = "grouped" if dims.router == "grouped" else "softmax"
            op = Route(
                x.shape[0], dims.experts, dims.experts, dims.experts_chosen, mode, dtype=run.dtype
            )
            return x.tape.launch(op, (scores,), (x.shape[0], dims.experts_chosen), Dtype.FP32)
        return _select_top(functional.softmax(scores), dims.experts_chosen, scores.dtype)
    if dims.router == "late":
        return functional.softmax(_select_top(scores, dims.experts_chosen, scores.dtype))
    weights = _select_top(functional.softmax(scores, wide=True), dims.experts_chosen, Dtype.FP32)
    if dims.router_renormalise:
        weights = functional.divide(weights, functional.reduce_last("sum", weights))
    return weights if dims.router_wide else weights.to(run.dtype)


def _route_grouped(
    dims: ExpertDims, run: PassSettings, x: Tensor, groups: int, groups_chosen: int
) -> Tensor:
    """Route as DeepSeek-V3: fp32 sigmoid scores, best groups first, then the best experts inside
    them.
    """
    tokens = x.shape[0]
    weight = x.tape.parameter(dims.experts, dims.hidden, dtype=run.dtype)
    scores = functional.activation(
        "sigmoid", functional.linear(x.to(Dtype.FP32), weight.to(Dtype.FP32))
    )
    bias = x.tape.parameter(dims.experts, dtype=Dtype.FP32)
    choice = pointwise("add", scores, bias)
    best = _select_top(choice.view(tokens * groups, -1), 2, Dtype.FP32)
    _select_top(reduce("sum", best, (tokens, groups)), groups_chosen, Dtype.FP32)
    mask = fill(x.tape, (tokens, groups), Dtype.FP32)
    picked = tokens * groups_chosen
    op = Elementwise("scatter_add", picked, dtype=Dtype.FP32, read=picked * 16, write=picked * 8)
    x.tape.emit(op, (mask,), (mask,))
    spread = (
        mask.unsqueeze(-1)
        .expand(tokens, groups, dims.experts // groups)
        .reshape(tokens, dims.experts)
    )
    keep = pointwise("cast", spread, out_dtype=Dtype.BOOL)
    drop = pointwise("compare", keep, out_dtype=Dtype.BOOL)
    _select_top(
        pointwise("masked_fill", choice, drop),
        dims.experts_chosen,
        Dtype.FP32,
        differentiable=False,
    )
    shape = (tokens, dims.experts_chosen)
    n = tokens * dims.experts_chosen
    read = n * (Dtype.FP32.byte + Dtype.INT64.byte)
    weights = x.tape.launch(
        Elementwise("gather", n, dtype=Dtype.FP32, read=read), (scores,), shape, Dtype.FP32
    )
    weights = weights.with_gradient(
        lambda g: functional.scatter_gradient(g, scores, g.numel), scores
    )
    if dims.router_renormalise:
        weights = functional.divide(weights, functional.reduce_last("sum", weights) + 1e-20)
    return weights * 2.5


def _select_top(scores: Tensor, count: int, dtype: Dtype, *, differentiable: bool = True) -> Tensor:
    """Return the largest ``count`` of each row; the kernel writes values and int64 places."""
    shape = (scores.shape[0], count)
    write = scores.shape[0] * count * (dtype.byte + Dtype.INT64.byte)
    op = Elementwise("topk", scores.numel, dtype=scores.dtype, write=write)
    out = scores.tape.launch(op, (scores,), shape, dtype)
    if not differentiable:
        return out
    return out.with_gradient(lambda g: functional.scatter_gradient(g, scores, g.numel), scores)


def _visit_experts(dims: ExpertDims, run: PassSettings, x: Tensor, weights: Tensor) -> Tensor:
    """Sort tokens by expert, multiply group by group, weigh, put back in order and add up."""
    tokens = x.shape[0]
    picks = x.shape[0] * dims.experts_chosen
    tape = x.tape
    width = dims.expert_intermediate // run.tp
    if run.ep > 1:  # a part of the experts, of whose tokens all others have a copy
        groups = busiest_picks(picks, dims.experts, dims.experts_chosen, run.skew, run.ep)
        local = (
            x
            if run.served
            else functional.pick_rows(x, sum(size * count for size, count in groups))
        )
        return _multiply_experts(dims, run, local, groups, tokens)
    if run.served:
        return _fused_experts(
            dims, run, x, tokens, (tokens, dims.experts, dims.experts_chosen), run.skew
        )
    choice = tape.empty((picks,), Dtype.INT64)
    if not run.engine:  # sort the choices
        tape.emit(
            Elementwise("topk", picks, dtype=Dtype.INT64, write=2 * picks * 8), (choice,), (choice,)
        )
        tape.emit(Elementwise("scale", picks, dtype=Dtype.INT64), (choice,), (choice,))
    rows = functional.pick_rows(x, picks)
    order = functional.pick_rows(weights.view(picks, 1), picks)
    if not run.engine:  # count them by expert
        choice = tape.empty((picks,), Dtype.INT64)
        narrow = pointwise("cast", choice, out_dtype=Dtype.INT32)
        counts = tape.empty((dims.experts,), Dtype.INT32)
        op = Elementwise(
            "scatter_add", picks, dtype=Dtype.INT32, read=narrow.byte, write=counts.byte
        )
        tape.emit(op, (narrow,), (counts,))
        pointwise("cumsum", counts)
    groups = share_picks(picks, dims.experts, dims.experts_chosen, run.skew)
    if (
        run.fused_training
    ):  # padded to whole blocks in fp8; in wider formats the number of rows does not matter
        groups = [(size, -(-rows // TRAINED_ROWS) * TRAINED_ROWS) for size, rows in groups]
    if run.engine:
        return _multiply_experts(dims, run, rows, groups, tokens)
    up = tape.parameter(dims.experts, 2 * width, dims.hidden, dtype=run.weight_dtype)
    down = tape.parameter(dims.experts, dims.hidden, width, dtype=run.weight_dtype)
    inner = functional.grouped_matmul(rows, up, groups, fp8=run.fp8_products)
    gate, value = inner.split(width, width)
    gated = functional.activation(dims.activation, gate) * value
    if run.fused_training:  # frameworks weigh the narrower side
        out = functional.grouped_matmul(
            (gated * order).to(x.dtype), down, groups, fp8=run.fp8_products
        )
        return functional.sum_picked_rows(out, tokens)
    out = functional.grouped_matmul(gated, down, groups, fp8=run.fp8_products)
    weighed = out * order
    place = fill(tape, (picks,), Dtype.INT64)
    op = Elementwise("scatter_add", picks, dtype=Dtype.INT64, read=3 * picks * 8, write=picks * 8)
    tape.emit(op, (place,), (place,))
    ordered = functional.pick_rows(weighed, picks)
    return functional.sum_rows(ordered, tokens).to(x.dtype).view(tokens, dims.hidden)


def _multiply_experts(
    dims: ExpertDims, run: PassSettings, rows: Tensor, groups: PickGroups, tokens: int
) -> Tensor:
    """Multiply rows by this GPU's experts, group by group, and sum them token by token, as an
    engine does.
    """
    if run.served:  # in one call, each pick as a token that visits one expert
        picks = sum(size * count for size, count in groups)
        least = min(count for _, count in groups)
        size, most = max(groups, key=lambda group: group[1])
        skew = min(size * (most - least) / picks, 1.0)
        return _fused_experts(dims, run, rows, tokens, (picks, dims.experts // run.ep, 1), skew)
    tape = rows.tape
    width = dims.expert_intermediate // run.expert_width_share
    held = dims.experts // run.ep
    up = tape.parameter(held, 2 * width, dims.hidden, dtype=run.weight_dtype)
    down = tape.parameter(held, dims.hidden, width, dtype=run.weight_dtype)
    gated = engine_layers.gate_in_one_kernel(
        run, functional.grouped_matmul(rows, up, groups), dims.activation
    )
    return reduce(
        "sum", functional.grouped_matmul(gated, down, groups), (tokens, dims.hidden), across=True
    )


def _fused_experts(
    dims: ExpertDims,
    run: PassSettings,
    x: Tensor,
    tokens: int,
    choices: tuple[int, int, int],
    skew: float,
) -> Tensor:
    """Run experts in one call of the engine, which sorts, quantizes, multiplies, gates and adds up.

    ``choices`` are the tokens it gets, the experts held, and the experts that each token visits.
    """
    tape = x.tape
    width = dims.expert_intermediate // run.expert_width_share
    recipe = run.recipe
    shapes = ((choices[1], 2 * width, dims.hidden), (choices[1], dims.hidden, width))
    bit = 16.0
    kept = ("bf16", "none")
    dtype = run.dtype
    if recipe is not None:
        kept = (recipe.weights, recipe.expert_scales or "tensor")
        bit = recipe.bit
        dtype = recipe.activations or run.dtype
    held = [engine_layers.narrow_parameter(tape, shape, run.dtype, bit) for shape in shapes]
    op = FusedExperts(*choices, dims.hidden, width, *kept, kernel="", skew=skew, dtype=dtype)
    return tape.launch(op, (x, *held), (tokens, dims.hidden))


def busiest_picks(picks: int, experts: int, chosen: int, skew: float, gpus: int) -> PickGroups:
    """Return groups of experts with equal numbers of rows on the GPU that gets most: (how many
    experts, rows each).

    Everyone waits for that GPU. Of the picks that fall evenly, μ a GPU on average, chance gives the
    busiest of E GPUs about μ + √(2·μ·ln E) (the largest of E normal numbers); ``skew`` adds its
    share of the experts chosen always.

    >>> busiest_picks(4096, 64, 8, 0.0, 8), busiest_picks(4096, 64, 8, 0.5, 8)
    ([(6, 70), (2, 69)], [(1, 292), (1, 37), (6, 36)])
    """
    hot = round(picks * skew)
    held = experts // gpus
    busy = min(chosen, experts)
    mean = (picks - hot) / gpus
    local = min(round(mean + sqrt(2.0 * mean * log(gpus))), picks - hot)
    hot_held = min(-(-busy // gpus), held)
    even, more = divmod(local, held)
    rows = Counter(
        even + (i >= held - more) + (round(hot / busy) if i < hot_held else 0) for i in range(held)
    )
    groups = [(size, count) for count, size in sorted(rows.items(), reverse=True) if count]
    return groups or [(1, 1)]


def share_picks(picks: int, experts: int, chosen: int, skew: float) -> PickGroups:
    """Return groups of experts with equal numbers of rows: (how many experts, rows each).

    Balanced, all experts share the picks evenly (as many experts as there are picks, when fewer).
    With ``skew`` s, a share s of the picks falls on the same ``chosen`` experts and the rest is
    even.

    >>> share_picks(512, 8, 2, 0.0), share_picks(512, 8, 2, 0.5), share_picks(6, 8, 2, 0.0)
    ([(8, 64)], [(2, 160), (6, 32)], [(6, 1)])
    """
    hot = round(picks * skew)
    busy = min(chosen, experts)
    even, more = divmod(picks - hot, experts)
    hot_each, hot_more = divmod(hot, busy)
    rows = Counter(
        even + (i < more) + (hot_each + (i < hot_more) if i < busy else 0) for i in range(experts)
    )
    return [(size, count) for count, size in rows.items() if count]


def scan_sequence(dims: layers.StateDims, rule: str, run: PassSettings, x: Tensor) -> Tensor:
    """Project, convolve, scan, norm by a gate, and project back.

    ``rule`` is mamba, mamba2, delta, lightning, or conv: a short convolution between two gates and
    no scan (LFM2)."""
    if run.training:
        raise bad_value(
            "phase",
            "prefill, decode or generate: gradients of sequence scans are not known",
            "train",
        )
    tape, (batch, length, hidden) = x.tape, x.shape
    x = functional.enter_parallel(x, run.tp)
    heads = dims.heads // run.tp
    groups = max(dims.key_heads // run.tp, 1)
    inner = heads * dims.value_dim
    keys = groups * dims.key_dim
    if (
        rule == "lightning"
    ):  # keys and queries are as many as values, through an activation; the gate comes apart
        mixed = pointwise("silu", layers.project(run, x, 3 * inner, dims.bias))
        gate = layers.project(run, x, inner, dims.bias)
    elif rule == "conv":
        first, gate, values = layers.project(run, x, 3 * inner, dims.bias).split(
            inner, inner, inner
        )
        mixed = _convolve_tokens(dims, run, pointwise("mul", first, values))
    elif rule == "mamba":
        wide = layers.project(run, x, 2 * inner, dims.bias)
        mixed = _convolve_tokens(dims, run, wide.slice(-1, 0, inner))
        gate = wide.slice(-1, inner, 2 * inner)
        low = functional.leave_parallel(
            layers.project(run, mixed, dims.step_rank + 2 * dims.key_dim), run.tp
        )
        parts = low.split(dims.step_rank, dims.key_dim, dims.key_dim)
        step, *_ = [layers.rms_norm(run, part) for part in parts] if dims.norm else parts
        layers.project(run, step, inner)
        tape.parameter(
            inner, dims.key_dim + 2, dtype=run.dtype
        )  # decay, skip, and the offset of the step
    else:
        numbers = (
            heads if rule == "mamba2" else 2 * heads
        )  # a step of each head; the delta rule's decay and strength
        if rule == "mamba2":
            wide = layers.project(run, x, 2 * inner + 2 * keys + numbers, dims.bias)
        else:
            wide = layers.project(run, x, 2 * inner + 2 * keys, dims.bias)
            layers.project(run, x, numbers, dims.bias)
        gate = wide.slice(-1, 0, inner)
        mixed = wide.slice(-1, inner, 2 * inner + 2 * keys)
        for _ in range(
            3 if rule == "mamba2" else 2
        ):  # decay, its step's offset, and Mamba-2's skip
            tape.parameter(heads, dtype=run.dtype)
        mixed = _convolve_tokens(dims, run, mixed) if dims.kernel else mixed
    if rule == "conv":
        out = pointwise("mul", gate, mixed)
        return functional.leave_parallel(layers.project(run, out, hidden, dims.bias), run.tp)
    # the state of each head is carried along the tokens and stays in the cache
    fp32 = dims.wide_state and run.engine
    width = 4 if fp32 else x.dtype.byte
    tape.cache_byte += batch * heads * dims.key_dim * dims.value_dim * width if run.cached else 0
    sizes = batch, length, heads, groups, dims.key_dim, dims.value_dim, min(dims.chunk, length)
    scan = StateScan(*sizes, rule, resumed=run.past > 0, wide_state=fp32, dtype=mixed.dtype)
    out = tape.launch(scan, (mixed,), (batch, length, heads * dims.value_dim))
    if dims.norm and rule != "mamba":
        dim = dims.value_dim if rule == "delta" else inner
        tape.parameter(dim, dtype=run.dtype)
        byte = out.numel * x.dtype.byte
        op = RmsNorm(out.numel // dim, dim, dtype=x.dtype, read=2 * byte)
        out = tape.launch(op, (out, gate), out.shape, x.dtype)
    elif rule != "mamba":  # Mamba's kernel multiplies by the gate itself
        out = pointwise("mul", out, pointwise("silu", gate))
    return functional.leave_parallel(layers.project(run, out, hidden, dims.bias), run.tp)


def _convolve_tokens(dims: layers.StateDims, run: PassSettings, x: Tensor) -> Tensor:
    """Convolve each channel over its last tokens, which stay in the cache."""
    tape, (batch, length, channels) = x.tape, x.shape
    weights = [tape.parameter(channels, dims.kernel, dtype=run.dtype)]
    weights += [tape.parameter(channels, dtype=run.dtype)] if dims.conv_bias else []
    tape.cache_byte += batch * channels * dims.kernel * x.dtype.byte if run.cached else 0
    return tape.launch(
        CausalConv(batch, length, channels, dims.kernel, dtype=x.dtype), (x, *weights), x.shape
    )
