"""What was never measured: predictions say so, intervals widen by what was learned, and the
learning is right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import KernelRows
from wattcast.calibrate.latency_fit import one_thread
from wattcast.calibrate.row_prediction import conformal_ends
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.strict_files import convert_plain
from wattcast.core.units import Dtype
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.lab.fit import database_fit, held_out
from wattcast.lab.fit.database_fit import shipped_held_out
from wattcast.lab.fit.held_out import (
    LeftOutRows,
    fit_nearness,
    fit_nearness_line,
    fit_reason_widening,
    plan_rounds,
    scale_ratios,
)
from wattcast.lab.fit.kernel_fit import fit_idle_curve
from wattcast.lab.validate.kernel_checks import interval_rows
from wattcast.lab.validate.long_checks.never_measured import counted_rows
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.bundle.support_widening import (
    UNSCALED,
    OutsideReason,
    ReasonWidening,
    Widening,
    default_widening,
    nearness_scale,
)
from wattcast.predictor.prediction import Prediction, predict_graph
from wattcast.predictor.prediction_interval import widen_log_ends
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention, Conv2d, Elementwise, Linear, Softmax


def predicted(op: Operator, as_if_measured: bool = False) -> Prediction:
    """One operator on an H200; ``as_if_measured``: by a bundle that claims to have met its form as
    every kernel.
    """
    bundle = shipped_bundle("h200")
    assert bundle is not None
    if as_if_measured:
        seen = bundle.seen[op.kind]
        assert seen.forms is not None
        claimed = replace(
            seen, forms={group: (*names, op.form) for group, names in seen.forms.items()}
        )
        bundle = replace(bundle, seen={**bundle.seen, op.kind: claimed})
    return predict_graph(
        Graph.from_operators("one", [op]), load_gpu("h200"), OperatingPoint(), bundle
    )


def width(p: Prediction) -> float:
    low, high = p.interval.latency_s / p.latency_s
    return float(np.log(high / low))


def test_forms_tell_directions_functions_and_odd_kernels_apart() -> None:
    conv = Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1)
    ops = (
        conv,
        replace(conv, direction="wgrad"),
        replace(conv, groups=8),
        replace(conv, groups=64),
        replace(conv, dilation=2),
        Linear(64, 64, 64),
        Linear(64, 64, 64, turned=True),
        Linear(64, 64, 64, weight_dtype=Dtype.INT8),
        Attention(1, 8, 8, 64, 64, 64),
        Attention(1, 8, 8, 64, 64, 64, backward=True),
        Attention(1, 8, 8, 64, 64, 64, dropout=True),
        Attention(1, 8, 8, 64, 64, 64, v_head_dim=32),
        Softmax(64, 64),
        Softmax(64, 64, backward=True),
        Elementwise("add", 64),
        Elementwise("topk", 64),
    )
    assert len({op.form for op in ops}) == len(ops)
    assert replace(conv, n=16, stride=2).form == conv.form  # sizes do not make another form


def test_a_function_never_measured_says_so_and_is_wider() -> None:
    """``topk`` used to count as measured, since it is lowered as the reductions are."""
    op = Elementwise("topk", 1 << 24, rows=4096)
    known, unknown = predicted(op, as_if_measured=True), predicted(op)
    assert known.support.inside
    assert not unknown.support.inside
    assert "topk was never measured" in unknown.support.reason
    assert float(known.latency_s) == float(unknown.latency_s)
    for name in ("latency_s", "power_w", "energy_j"):
        (low, high), (own_low, own_high) = (getattr(p.interval, name) for p in (unknown, known))
        assert low <= own_low < own_high <= high
    assert width(unknown) > 0.9  # of logs: 0.48 at each side was learned


def test_a_plain_function_among_many_is_near_and_hardly_wider() -> None:
    """Left out, nine in ten rows of such functions are held by the ends that their distance gives
    them.
    """
    known, unknown = (
        predicted(Elementwise("log", 1 << 24), as_if_measured=True),
        predicted(Elementwise("log", 1 << 24)),
    )
    assert [d.word for d in unknown.support.distances if d.dimension == "kernels"] == ["near"]
    assert not [d for d in known.support.distances if d.dimension == "kernels"]
    assert unknown.support.inside
    assert "log was never measured" in unknown.support.reason
    assert width(known) <= width(unknown) < 0.5 * width(predicted(Elementwise("topk", 1 << 24)))


@pytest.mark.parametrize(
    "op",
    [
        Conv2d(32, 256, 256, 56, 56, 3, 3, padding=1, groups=32),
        Conv2d(32, 64, 64, 56, 56, 3, 3, padding=2, dilation=2),
        Linear(512, 4096, 4096, weight_dtype=Dtype.INT8),
    ],
)
def test_forms_of_products_that_nobody_measured_are_outside(op: Operator) -> None:
    p = predicted(op)
    assert not p.support.inside
    assert width(p) > 0.5


def test_a_measured_operator_has_a_narrower_interval_than_a_far_one() -> None:
    """Distance counts: both are inside, and the same family's ends serve both. The measured one is
    too long to wait for the host, whose spread would hide the distance."""
    measured = Linear(512, 24576, 4096, dtype=Dtype.FP32)
    assert measured in kernel_rows.load_kernel_rows("h200").ops
    near, far = predicted(measured), predicted(Linear(77, 40001, 333))
    assert near.support.inside
    assert far.support.inside
    assert width(near) < 0.7 * width(far)


def test_what_is_needed_puts_a_row_at_the_end() -> None:
    rng = np.random.default_rng(0)
    n = 200
    ends = np.column_stack([-rng.uniform(0.01, 0.3, n), rng.uniform(0.01, 0.3, n)])
    log_ratio = rng.normal(0, 0.5, n)
    nothing = np.full(n, np.nan)
    left = LeftOutRows(
        np.arange(n), ("a",) * n, ("kind",) * n, log_ratio, nothing, np.column_stack([ends, ends])
    )
    needed = left.needed("latency")
    moved = widen_log_ends(ends, needed[:, np.newaxis])
    beyond = (log_ratio < ends[:, 0]) | (log_ratio > ends[:, 1])
    assert (needed[~beyond] == 0.0).all()
    at = np.where(log_ratio > 0, moved[:, 1], moved[:, 0])
    np.testing.assert_allclose(at[beyond], log_ratio[beyond], rtol=1e-9)
    assert np.isnan(left.needed("power")).all()


def made(things: int, spread: float, seed: int, rows: int = 40) -> LeftOutRows:
    """Things left out, each off by something of its own, with ends too narrow for that."""
    rng = np.random.default_rng(seed)
    names = [f"elementwise: f{i}" for i in range(things) for _ in range(rows)]
    log_ratio = np.repeat(rng.normal(0, spread, things), rows) + rng.normal(0, 0.05, len(names))
    ends = np.tile([-0.08, 0.08, -0.05, 0.05], (len(names), 1))
    nothing = np.full(len(names), np.nan)
    return LeftOutRows(
        np.arange(len(names)), tuple(names), ("kind",) * len(names), log_ratio, nothing, ends
    )


def test_half_widths_are_those_of_another_thing() -> None:
    found = [
        fit_reason_widening(made(60, 0.4, seed))[OutsideReason.KIND].latency for seed in range(20)
    ]
    assert np.mean(found) == pytest.approx(1.645 * 0.4, rel=0.12)
    one = made(60, 0.4, 3)
    assert (
        fit_reason_widening(one)[OutsideReason.KIND].power
        == default_widening().apart[OutsideReason.KIND].power
    )  # no sustained row to learn from
    assert OutsideReason.FORM not in fit_reason_widening(one)


def test_a_thing_with_many_rows_counts_once() -> None:
    few = made(20, 0.3, 1)
    big = made(1, 0.0, 2, rows=5000)
    both = LeftOutRows(
        *(
            np.concatenate([getattr(few, name), getattr(big, name)])
            if name not in ("thing", "why")
            else value
            for name, value in (
                ("row", None),
                ("thing", (*few.thing, *("big",) * 5000)),
                ("why", (*few.why, *big.why)),
                ("latency", None),
                ("power", None),
                ("ends", None),
            )
        )
    )
    assert (
        fit_reason_widening(both)[OutsideReason.KIND].latency
        > 0.8 * fit_reason_widening(few)[OutsideReason.KIND].latency
    )


def test_the_ledger_judges_each_thing_by_the_others() -> None:
    """90 % of things that err alike are held; without what was learned, few are; nothing is judged
    by itself.
    """
    shares = [counted_rows("made", made(80, 0.4, seed, rows=10))[0] for seed in range(8)]
    assert 85.0 <= np.mean([one["coverage"] for one in shares]) <= 95.0
    assert np.mean([one["without_widening"] for one in shares]) < 40.0
    alike = made(8, 0.001, 0)
    odd = replace(
        alike, latency=np.where(np.array(alike.thing) == "elementwise: f0", 2.0, alike.latency)
    )
    (row,) = counted_rows("made", odd)
    assert row["half_width"] > 1.5  # it is one of eight, more than a tenth
    assert row["coverage"] <= 87.5  # and yet is not held by what the other seven say


@given(slope=st.floats(1.0, 10.0), seed=st.integers(0, 50))
def test_growth_with_distance_is_found_again(slope: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    near = rng.uniform(0.3, 1.0, 6000)
    family = np.where(rng.uniform(size=6000) < 0.5, "gemm", "softmax")
    log_ratio = (
        rng.normal(0, 0.05, 6000)
        * (1.0 + slope * (1.0 - near))
        * np.where(family == "gemm", 2.0, 1.0)
    )
    line = fit_nearness_line(log_ratio, family, near)
    a, b, most = line
    assert 0.95 < most < 1.0
    assert b / a == pytest.approx(slope, rel=0.4, abs=0.5)
    assert float(np.median(nearness_scale(near, line))) == pytest.approx(1.0)
    gemm = family == "gemm"
    low, high = np.log(conformal_ends(scale_ratios(np.exp(log_ratio[gemm]), near[gemm], line)))
    for part in (near[gemm] < 0.5, near[gemm] > 0.8):
        scale = nearness_scale(near[gemm], line)
        inside = (log_ratio[gemm] >= low * scale) & (log_ratio[gemm] <= high * scale)
        assert 0.85 < inside[part].mean() < 0.95


def test_few_rows_tell_nothing_of_distance() -> None:
    rng = np.random.default_rng(0)
    assert (
        fit_nearness_line(rng.normal(size=50), np.array(["gemm"] * 50), rng.uniform(size=50))
        == UNSCALED
    )
    assert (
        fit_nearness_line(rng.normal(size=5000), np.array(["gemm"] * 5000), np.full(5000, np.nan))
        == UNSCALED
    )
    assert default_widening().scale(None) is None
    found = (
        default_widening()
        .with_nearness(((0.5, 2.0, 0.9), UNSCALED))
        .scale(np.array([[1.0, 0.75, np.nan], [1.0, 0.75, np.nan]]))
    )
    assert found is not None
    np.testing.assert_allclose(found, [[0.7, 1.0, 1.0], [1.0, 1.0, 1.0]])


def test_held_out_rows_are_covered_at_every_distance() -> None:
    held = shipped_held_out("h200")
    assert held is not None
    assert all(b > a for a, b, _ in fit_nearness(held))
    rows = interval_rows(held, "h200")
    for row in rows:
        assert 85.0 <= row["coverage"] <= 95.0, row
    for quantity in ("latency", "power"):
        quarters = [
            row for row in rows if "quarter" in row["quantity"] and quantity in row["quantity"]
        ]
        assert len(quarters) == 4
        assert quarters[0]["width"] > 1.5 * quarters[-1]["width"]


def test_rounds_leave_out_little_of_a_family_and_nothing_twice() -> None:
    rows = kernel_rows.load_kernel_rows("h200")
    plan = plan_rounds(rows, load_gpu("h200"))
    assert len(plan) == sum(held_out.ROUNDS.values())
    counted = rows.is_kind("burst") & rows.fit
    for names in plan:
        for thing in set(names.tolist()) - {""}:
            family = thing.partition(":")[0]
            assert family in (
                "attention",
                "gemm",
                "conv2d",
                "depthwise",
                "elementwise",
                "softmax",
                "layernorm",
                "rmsnorm",
            )
            assert (names[counted] == thing).sum() >= 1
    forms = [set(names.tolist()) - {""} for names in plan[: held_out.ROUNDS["form"]]]
    assert sum(map(len, forms)) == len(set().union(*forms))
    assert "elementwise: topk" not in set().union(*forms)
    assert "elementwise: adamw" in set().union(*forms)


def some(rows: KernelRows) -> KernelRows:
    """Passes over data alone, a fourth of them."""
    at = np.array([op.kind == "elementwise" for op in rows.ops]) & (np.arange(len(rows)) % 4 == 0)
    return rows.where(at)


@pytest.mark.slow
def test_leaving_things_out_says_why_each_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "ROUNDS", {"form": 2, "kind": 2, "dtype": 1, "size": 1})
    rows, chip, shipped = (
        some(kernel_rows.load_kernel_rows("h200")),
        load_gpu("h200"),
        shipped_bundle("h200"),
    )
    assert shipped is not None
    with one_thread():
        idle = fit_idle_curve(kernel_rows.load_idle_rows("h200"), chip)
        left = held_out.predict_left_out(rows, chip, idle, shipped.residuals, (UNSCALED, UNSCALED))
    why = np.array(left.why)
    assert (why != "").mean() > 0.5
    assert {"kind", "dtype", "size"} <= set(why.tolist())
    of_forms = np.array([thing.startswith("elementwise: adamw") for thing in left.thing])
    assert (why[of_forms] == "kind").all()


def test_a_bundle_keeps_its_widening_and_forms(tmp_path: Path) -> None:
    shipped = shipped_bundle("h200")
    assert shipped is not None
    assert shipped.widening.near[1] > 0.0
    assert all(shipped.widening.apart[why].kinds > 3 for why in OutsideReason)
    assert (
        shipped.widening.apart[OutsideReason.KIND].latency
        > shipped.widening.apart[OutsideReason.FORM].latency
    )
    bundles.write_bundle(shipped, tmp_path / "bundle.json")
    again = bundles.read_bundle(tmp_path)
    assert again.widening == shipped.widening
    assert again.seen == shipped.seen
    plain = replace(shipped, widening=default_widening())
    bundles.write_bundle(plain, tmp_path / "bundle.json")
    assert bundles.read_bundle(tmp_path).widening == default_widening()


def test_errors_of_several_kernels_partly_cancel() -> None:
    """Layers say how far: their intervals once held 98 % at twice the width."""
    gpu, bundle = load_gpu("h200"), shipped_bundle("h200")
    assert bundle is not None
    ops = [Linear(4096, 4096, 4096), Softmax(65536, 1024), Elementwise("add", 1 << 26)]
    alone = [
        width(predict_graph(Graph.from_operators("one", [op]), gpu, OperatingPoint(), bundle))
        for op in ops
    ]
    graph = Graph.from_operators("all", ops)
    assert width(predict_graph(graph, gpu, OperatingPoint(), bundle)) < min(alone)
    clocks = OperatingPoint(clock_hz=np.linspace(1e9, 1.9e9, 3)[:, np.newaxis])
    swept = predict_graph(graph, gpu, clocks, bundle)
    assert swept.interval.latency_s.shape == (3, 2)


def test_a_widening_out_of_reason_is_refused() -> None:
    with pytest.raises(WattcastError, match="half-width"):
        ReasonWidening(-0.1, 0.0, 1, 1)
    with pytest.raises(WattcastError, match="every reason"):
        Widening(UNSCALED, {OutsideReason.KIND: ReasonWidening(0.1, 0.1, 1, 1)}, "")
    plain = {"near": UNSCALED, "apart": {"colour": {"latency": 0.1, "power": 0.1}}, "source": ""}
    with pytest.raises(WattcastError, match="colour"):
        convert_plain(plain, Widening, "widening.yaml")


def test_a_fit_takes_what_ships_unless_it_learns_anew() -> None:
    """Half-widths of what was never measured, and what layers cost; distance is always of the rows
    at hand.
    """
    near = ((0.5, 1.0, 0.9), (0.6, 0.8, 0.95))
    shipped = shipped_bundle("h200")
    assert shipped is not None
    found = database_fit._take_widening(shipped, near)
    assert (found.near, found.near_power) == near
    assert found.apart == shipped.widening.apart
    assert shipped_bundle("a100-pcie-40gb") is None
    assert database_fit._take_widening(None, near).apart == default_widening().apart


def test_leaving_out_of_a_fit_that_inherits_is_refused() -> None:
    with pytest.raises(BadInput, match="--alone"):
        database_fit.fit_kernel_database("h200", "h200", inherits=True, leaves_out=True)
