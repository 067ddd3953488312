"""Many workloads in one pass say what each says by itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu
from wattcast.kernels import lowering
from wattcast.predictor import prediction
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import analyse_graph, analyse_graphs
from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.operator_base import OperatorColumns
from wattcast.workload.operator_types import Elementwise, Linear
from wattcast.workload.readers import from_json

NUMBERS = (
    "latency_s",
    "power_w",
    "energy_j",
    "clock_hz",
    "effective_clock_hz",
    "busy_s",
    "peak_power_w",
)
MIXED = [
    ("llama3-8b", {"phase": "prefill", "seq": 384}),
    ("llama3-8b", {"phase": "train", "seq": 384}),  # of which prefill is a part
    ("resnet50", {"phase": "train"}),
    ("bert-base", {"seq": 128}),
    ("qwen3-30b-a3b", {"phase": "decode", "seq": 512, "tp": 2}),
    ("vit-base", {"dtype": "fp16"}),
]


@pytest.mark.parametrize("gpu", ["h200", "a100-sxm-80gb"])
def test_many_equal_each_by_itself(gpu: str) -> None:
    many = wattcast.predict_many([(name, options | {"batch": 4}) for name, options in MIXED], gpu)
    for (name, options), found in zip(MIXED, many, strict=True):
        one = wattcast.predict(name, gpu, batch=4, **options)
        for number in NUMBERS:
            assert_allclose(
                getattr(found, number), getattr(one, number), rtol=1e-9, err_msg=f"{name} {number}"
            )
        assert (found.name, found.assumptions, found.support) == (
            one.name,
            one.assumptions,
            one.support,
        )
        assert_allclose(found.interval.energy_j, one.interval.energy_j, rtol=1e-9)
        for ours, theirs in zip(found.ops, one.ops, strict=True):
            assert (ours.op, ours.op.label, ours.count) == (
                theirs.op,
                theirs.op.label,
                theirs.count,
            )
            assert_allclose(ours.energy_j, theirs.energy_j, rtol=1e-9)


def test_options_of_a_workload_go_before_those_of_all() -> None:
    wide, narrow = wattcast.predict_many(
        ["bert-base", ("bert-base", {"batch": 1})], "h200", batch=64, seq=128
    )
    one = wattcast.predict("bert-base", "h200", batch=64, seq=128)
    assert_allclose(wide.latency_s, one.latency_s, rtol=1e-9)
    assert narrow.latency_s < wide.latency_s


def test_settings_hold_for_all_and_may_be_swept() -> None:
    clocks = np.array([1.2e9, 1.6e9])
    found = wattcast.predict_many(["bert-base", "vit-base"], "h200", clock=clocks, batch=2)
    for name, p in zip(("bert-base", "vit-base"), found, strict=True):
        assert_allclose(
            p.latency_s, wattcast.predict(name, "h200", clock=clocks, batch=2).latency_s, rtol=1e-12
        )
        assert p.latency_s[0] > p.latency_s[1]


def test_more_than_one_table_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["bert-base", "vit-base", "gpt2"]
    whole = wattcast.predict_many(names, "h200", batch=3)
    monkeypatch.setattr(prediction, "TOGETHER", 2)
    for one, other in zip(whole, wattcast.predict_many(names, "h200", batch=3), strict=True):
        assert_allclose(one.energy_j, other.energy_j, rtol=1e-12)
    assert wattcast.predict_many([], "h200") == []


def test_what_is_assumed_of_one_is_not_assumed_of_the_others() -> None:
    """Notes belong to kernels: an A100 has no fp8 unit, which is no business of a bf16 workload
    beside.
    """
    plain = Graph.from_operators("plain", [Linear(64, 64, 64)])
    narrow, usual = wattcast.predict_many(
        [("llama3-8b", {"dtype": "fp8", "seq": 64}), plain], "a100-sxm-80gb", force=True
    )
    assert any("has no fp8 unit" in note for note in narrow.assumptions)
    assert not any("has no fp8 unit" in note for note in usual.assumptions)


@pytest.mark.parametrize("gpu", ["h200", "a100-sxm-80gb", "b200"])
def test_columns_predict_what_objects_do(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long list stays in columns from its file to the prediction, and its kernels are counted in
    blocks.
    """
    ops = [entry for i in range(200) for entry in list_layer(37 * i)]
    ops += [{**entry, "label": "again", "count": 3} for entry in ops[:30]]
    for i in range(30):
        ops.append(
            {
                "op": "linear",
                "m": 1 + 9 * i,
                "n": 40 + i,
                "k": 77,
                "dtype": ("fp16", "fp32", "tf32")[i % 3],
            }
        )
        ops.append({"op": "bmm", "b": 1 + i % 3, "m": 5 + i, "n": 64, "k": 64})
        ops.append(
            {
                "op": "conv2d",
                "n": 1,
                "c": 64,
                "k": 64,
                "h": 9 + i,
                "w": 9,
                "r": 1 + i % 3,
                "s": 1 + i % 3,
            }
        )
        ops.append(
            {"op": "cat", "n": 4096 * (1 + i), "rows": 16, "run": 1 + i, "layout": "strided"}
        )
        ops.append(
            {"op": "sum", "n": 4096 * (1 + i), "rows": 1 + i % 16, "write": 2 * (1 + i % 16)}
        )
        ops.append(
            {
                "op": "softmax",
                "rows": 1 + i,
                "dim": 1000 + 300 * i,
                "log": i % 2 > 0,
                "backward": i % 3 > 0,
            }
        )
    long = {"name": "long", "ops": ops}
    one = wattcast.predict(long, gpu)
    for module in (from_json, lowering):
        monkeypatch.setattr(module, "MANY_OPS", 16)
    monkeypatch.setattr(lowering, "_BLOCK_OPS", 100)
    found = wattcast.predict(long, gpu)
    assert isinstance(found.basis.timeline.kernels.ops, OperatorColumns)
    assert len(found.ops) > 1024  # so that nothing of the first prediction is kept
    for number in NUMBERS:
        assert_allclose(getattr(found, number), getattr(one, number), rtol=1e-9, err_msg=number)
    assert (found.assumptions, found.support) == (one.assumptions, one.support)
    assert_allclose(found.interval.power_w, one.interval.power_w, rtol=1e-9)
    assert [share.op for share in found.rank_ops(50)] == [share.op for share in one.rank_ops(50)]
    for ours, theirs in zip(found.ops, one.ops, strict=True):
        assert (ours.op, ours.op.label, ours.count) == (theirs.op, theirs.op.label, theirs.count)
        assert_allclose(
            [ours.latency_s, ours.energy_j], [theirs.latency_s, theirs.energy_j], rtol=1e-9
        )


@pytest.mark.slow
def test_distinct_operators_take_linear_time() -> None:
    """A million of such a mix took 200 s of processor time, with tables of products that grew with
    their square.
    """
    spent_s = []
    for count in (50_000, 200_000):
        ops = [entry for i in range(count // 5) for entry in list_layer(i)]
        begin = time.process_time()
        found = wattcast.predict({"name": "long", "ops": ops}, "h200")
        assert found.interval.latency_s[0] < found.latency_s
        spent_s.append(time.process_time() - begin)
    assert spent_s[1] < 5.0 * spent_s[0]
    assert spent_s[1] < 200_000 * 90e-6


def list_layer(i: int) -> list[dict[str, object]]:
    """Operators of a layer of whose sizes no two are equal."""
    rows, wide = 1 + i % 8192, 128 * (1 + i // 8192)
    return [
        {"op": "linear", "m": rows, "n": wide, "k": 64 * (1 + i % 61)},
        {
            "op": "attention",
            "batch": 1 + i % 32,
            "heads": 32,
            "kv_heads": 8,
            "q_len": 1 + i,
            "kv_len": 1 + i,
            "head_dim": 128,
        },
        {"op": "rmsnorm", "rows": rows, "dim": wide},
        {"op": "softmax", "rows": rows, "dim": wide},
        {"op": "silu", "n": 1024 + 8 * i},
    ]


def test_a_bad_one_is_named() -> None:
    with pytest.raises(BadInput, match="bert-bse"):
        wattcast.predict_many(["bert-base", "bert-bse"], "h200")


def test_a_timeline_of_many_has_the_rows_of_each() -> None:
    """Of a chip that is swept, too."""
    gpu = load_gpu("h200").sweep(
        memory__byte_per_s=np.array([3e12, 5e12]), sm_count=np.array([100.0, 132.0])
    )
    bundle = bundle_for(load_gpu("h200"))
    graphs = [
        build_graph("gpt2", ModelOptions.from_names(batch=2, seq=64)),
        Graph.from_operators(
            "two", [Linear(128, 256, 512), Elementwise("add", 1 << 20), Linear(128, 256, 512)]
        ),
    ]
    for graph, found in zip(graphs, analyse_graphs(graphs, gpu, bundle), strict=True):
        one = analyse_graph(graph, gpu, bundle)
        assert found.kernels.ops == one.kernels.ops
        assert_allclose(found.calls, one.calls)
        assert_allclose(found.weighted, one.weighted, rtol=1e-12)
        assert_allclose(found.active, one.active, rtol=1e-12)
        assert_allclose(found.tensor_cycles, one.tensor_cycles, rtol=1e-12)
        ours = {phase.name: phase for phase in found.phases}
        for phase in one.phases:
            if phase.cycles is not None:
                assert_allclose(ours[phase.name].cycles, phase.cycles, rtol=1e-9)


@pytest.mark.parametrize("limit", [None, 450.0])
@pytest.mark.parametrize("gpu", ["h200", "h100-sxm", "l40s"])
def test_power_intervals_end_at_the_limit(gpu: str, limit: float | None) -> None:
    """A capped run's interval once reached 1.28 times the limit that holds its clock down."""
    card_w = float(load_gpu(gpu).power.limit_w)
    limit_w = card_w if limit is None else min(limit, 0.7 * card_w)
    p = wattcast.predict("llama3-8b", gpu=gpu, batch=8, seq=1024, power_limit=limit_w)
    assert p.capped
    assert p.interval.power_w[1] <= 1.02 * limit_w * (1 + 1e-12)
    assert p.interval.power_w[0] < p.power_w <= p.interval.power_w[1]
    swept = wattcast.predict(
        "llama3-8b", gpu=gpu, batch=8, seq=1024, power_limit=np.array([limit_w, card_w])
    )
    assert_allclose(swept.interval.power_w[0], p.interval.power_w, rtol=1e-6)
