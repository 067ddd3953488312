"""compare: contributions add up exactly, whichever the sides; operators are paired as a person
would pair them.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wattcast
from wattcast.calibrate.whole_models import build_row_graph
from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import BadInput, UnknownName
from wattcast.core.measured_rows import ModelKernels, ModelRow
from wattcast.core.row_journals import Journal
from wattcast.report.comparison import (
    ALL,
    CLOCK,
    GAPS,
    GPUS,
    ONLY,
    POWER,
    WORK,
    RunComparison,
    RunPart,
    RunSummary,
    compare_runs,
    logarithmic_mean,
    split_difference,
)
from wattcast.report.comparison_report import comparison_to_plain, write_sentence
from wattcast.report.comparison_sides import (
    PredictionSpec,
    compare,
    group_kernels,
    parse_prediction_spec,
    read_pair,
)
from wattcast.report.prediction_figures import find_kernel_family

positive = st.floats(1e-6, 1e6)


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(list(argv), Environment(stdout=out, stderr=err, variables={}))
    return code, out.getvalue(), err.getvalue()


@given(positive, positive, positive)
def test_a_split_adds_up_and_turns_with_its_sides(a: float, b: float, share: float) -> None:
    ratios = {"x": share, "y": b / a / share}
    found = split_difference(a, b, ratios)
    assert sum(found.values()) == pytest.approx(b - a, rel=1e-12, abs=1e-12 * max(a, b))
    turned = split_difference(b, a, {name: 1.0 / ratio for name, ratio in ratios.items()})
    assert turned["x"] == pytest.approx(
        -found["x"], rel=1e-6, abs=1e-9 * max(a, b, logarithmic_mean(a, b) * abs(math.log(share)))
    )


def test_totals_of_several_gpus_lead(call: Any) -> None:
    """Eight GPUs in place of four were once said to take 43 % less energy: per GPU, without a word
    of it.

    Together they take 13 % more, and draw 64 % more.
    """
    argv = ("compare", "qwen3-32b@h100-sxm,phase=decode,batch=32,seq=4096,tp=4", ",tp=8")
    found = json.loads(call(*argv, "--json").out)
    four, eight = (
        wattcast.predict("qwen3-32b", "h100-sxm", phase="decode", batch=32, seq=4096, tp=n)
        for n in (4, 8)
    )
    for name in (
        "total_energy_j",
        "total_power_w",
        "energy_j_per_token",
        "tokens_per_s",
        "latency_s",
        "power_w",
    ):
        more = getattr(eight, name) - getattr(four, name)
        assert found["difference"][name] == pytest.approx(more, rel=1e-9)
        assert found["b"][name] == pytest.approx(getattr(eight, name), rel=1e-9)
    assert found["b"]["total_energy_j"] / found["a"]["total_energy_j"] == pytest.approx(
        1.13, abs=0.02
    )
    assert found["b"]["total_power_w"] / found["a"]["total_power_w"] == pytest.approx(
        1.64, abs=0.02
    )
    assert (found["a"]["gpu_count"], found["b"]["gpu_count"]) == (4, 8)
    for name in ("total_energy_j", "total_power_w"):
        assert found["terms"][name][GPUS] > 0.0
        assert sum(found["terms"][name].values()) == pytest.approx(
            found["difference"][name], rel=1e-9
        )
        assert sum(row[name] for row in found["modules"]) == pytest.approx(
            found["difference"][name], rel=1e-9
        )
    text = call(*argv).out
    sentence = text.split("B against A: ")[1]
    more_energy = eight.energy_j_per_token / four.energy_j_per_token - 1.0
    assert (
        sentence.index(f"energy per token {more_energy:+.1%}")
        < sentence.index("total power")
        < sentence.index("one GPU")
    )
    assert "power of one GPU" in text
    assert "energy of one GPU" in text


def test_one_gpu_on_both_sides_is_not_called_a_total(call: Any) -> None:
    text = call("compare", "gpt2@h200,batch=1", ",batch=2").out
    assert "total" not in text
    assert "number of GPUs" not in text


def adds_up(found: RunComparison) -> None:
    a, b = found.a, found.b
    for column in ("latency_s", "total_energy_j", "total_power_w"):
        scale = getattr(b, column)
        wanted = getattr(b, column) - getattr(a, column)
        assert sum(getattr(found, column).values()) == pytest.approx(
            wanted, rel=1e-9, abs=1e-9 * scale
        )
    if found.operators:
        by_operator = sum(pair.total("latency_s") for pair in found.operators) + b.gap_s - a.gap_s
        assert by_operator == pytest.approx(
            b.latency_s - a.latency_s, rel=1e-9, abs=1e-9 * b.latency_s
        )
    if found.module_w:
        assert sum(found.module_w.values()) == pytest.approx(
            b.total_power_w - a.total_power_w, abs=1e-6
        )
        less_j = b.total_energy_j - a.total_energy_j
        assert sum(found.module_j.values()) == pytest.approx(less_j, abs=1e-9 * b.total_energy_j)


PAIRS = [
    ("gpt2@h200,batch=4,seq=256", "@h100-sxm"),
    ("gpt2@h200,batch=4,seq=256", ",batch=8"),
    ("gpt2@h200,batch=4,seq=256,attention=eager", ",attention=flash"),
    ("llama3-8b@h200,batch=4,seq=512", ",power-limit=450W"),
    ("gpt2@h200,batch=1,seq=64,stack=eager", ",host_launch=0us"),
    ("resnet50@h200,batch=8", "gpt2@h200,batch=1,seq=128"),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_contributions_add_up(a: str, b: str) -> None:
    adds_up(compare_runs(*read_pair(a, b)))


def test_equal_sides_differ_by_nothing() -> None:
    """In a notebook, one was said to take 0.0% shorter than the other."""
    found = compare_runs(*read_pair("gpt2@h200,batch=1,seq=64", "gpt2@h200,batch=1,seq=64"))
    assert all(
        value == 0.0
        for terms in (found.latency_s, found.total_energy_j, found.total_power_w)
        for value in terms.values()
    )
    assert write_sentence(found) == "Both sides are equal."
    assert "takes as long as" in found.summary_line


def test_a_power_limit_is_blamed_on_the_clock() -> None:
    found = compare_runs(*read_pair("llama3-8b@h200,batch=4,seq=512", ",power-limit=450W"))
    assert found.latency_s[CLOCK] > 0.9 * (found.b.latency_s - found.a.latency_s)
    assert found.module_w["static"] == pytest.approx(0.0, abs=1e-9)
    assert found.module_w["tensor"] < -20.0


def test_a_cuda_graph_is_blamed_on_the_gaps() -> None:
    found = compare_runs(*read_pair("gpt2@h200,batch=1,seq=64,stack=eager", ",host_launch=0us"))
    assert found.latency_s[GAPS] == pytest.approx(found.b.latency_s - found.a.latency_s, rel=1e-6)
    assert found.latency_s[GAPS] < 0.0


def test_operators_that_changed_shape_are_paired_at_their_place() -> None:
    """Four times the batch turns the keys' sizes into the queries' of before: pairing by size alone
    crossed them.
    """
    found = compare_runs(*read_pair("llama3-8b@h200,batch=1,seq=512,stack=eager", ",batch=4"))
    named = {pair.name for pair in found.operators}
    assert "add 524288 bf16 -> add 2097152 bf16" in named
    assert "add 2097152 bf16 -> add 8388608 bf16" in named
    assert ONLY not in found.latency_s


def test_fused_attention_takes_operators_away() -> None:
    found = compare_runs(
        *read_pair("gpt2@h200,batch=8,seq=512,attention=eager", ",attention=flash")
    )
    gone = [pair for pair in found.operators if pair.b is None]
    assert {"softmax", "gemm"} <= {pair.family for pair in gone}
    assert all("only in A" in pair.name for pair in gone)
    assert found.latency_s[ONLY] < 0.0


def test_saved_predictions_say_the_same_as_fresh_ones(tmp_path: Path) -> None:
    for name, batch in (("a.json", "2"), ("b.json", "4")):
        code, out, _ = run(
            "predict", "gpt2", "--gpu", "h200", "--batch", batch, "--seq", "128", "--json"
        )
        assert code == 0
        (tmp_path / name).write_text(out)
    saved = compare_runs(*read_pair(str(tmp_path / "a.json"), str(tmp_path / "b.json")))
    fresh = compare_runs(*read_pair("gpt2@h200,batch=2,seq=128", ",batch=4"))
    adds_up(saved)
    assert saved.latency_s == pytest.approx(fresh.latency_s)
    assert saved.total_power_w == pytest.approx(fresh.total_power_w)
    assert {p.name for p in saved.operators} == {p.name for p in fresh.operators}


def measured_run(tmp_path: Path, **more: object) -> str:
    path = tmp_path / "run.json"
    plain_run = {
        "name": "python",
        "duration_s": 0.6,
        "power_w": 240.0,
        "energy_j": 144.0,
        "sm_clock_hz": 1.98e9,
    }
    path.write_text(json.dumps(plain_run | more))
    return str(path)


def test_a_measured_run_has_totals_alone(tmp_path: Path) -> None:
    path = measured_run(tmp_path)
    found = compare_runs(*read_pair("gpt2@h200,batch=1,seq=128", path, iterations=100))
    adds_up(found)
    assert found.b.latency_s == pytest.approx(0.006)
    assert found.operators == ()
    assert found.latency_s[ALL] == pytest.approx(found.b.latency_s - found.a.latency_s, rel=1e-6)
    assert any("totals only" in note for note in found.notes)


ROW = ModelRow(
    "model-x", "gpt2", "prefill", 8, "bf16", "flash", "eager", True, seq=512, head="last",
    latency_s=4e-3, power_w=500.0, sm_clock_hz=1.98e9, throttle=(), flags=("clock_drift",),
)  # fmt: skip


def database(tmp_path: Path, profile: bool) -> Path:
    Journal(tmp_path / "models.jsonl").append(ROW)
    if profile:
        names = (
            "nvjet_sm90_tst_128x64",
            "void at::native::vectorized_elementwise_kernel<4>",
            "flash_fwd_kernel",
        )
        kernels = ModelKernels("model-x", names, (0, 1, 2, 0), (1e-3, 5e-4, 2e-4, 3e-4))
        Journal(tmp_path / "model_kernels.jsonl").append(kernels)
    return tmp_path


def test_a_whole_model_row_beside_its_own_prediction(tmp_path: Path) -> None:
    found = compare_runs(*read_pair("predicted", f"{database(tmp_path, True)}#model-x"))
    adds_up(found)
    families_seen = {pair.family: pair for pair in found.operators}
    assert families_seen["gemm"].b is not None
    assert families_seen["gemm"].b.seconds == pytest.approx(
        4e-3 * 1.3 / 2.0
    )  # the graph's latency, by share
    assert WORK in families_seen["gemm"].latency_s
    assert POWER in found.total_energy_j
    assert any("clock_drift" in note for note in found.notes)
    assert any("by family" in note for note in found.notes)


def test_a_row_without_a_profile_still_explains_its_totals(tmp_path: Path) -> None:
    found = compare_runs(*read_pair("predicted", f"{database(tmp_path, False)}#model-x"))
    adds_up(found)
    assert found.operators == ()


def test_an_eager_row_keeps_its_gaps() -> None:
    profile = {"names": ["nvjet", "elementwise"], "order": [0, 1], "kernel_s": [1e-3, 1e-3]}
    eager = group_kernels(profile, replace(ROW, graph=False))
    assert sum(part.seconds for part in eager) == pytest.approx(2e-3)
    assert sum(part.seconds for part in group_kernels(profile, ROW)) == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward", "softmax"),
        ("void at::native::vectorized_layer_norm_kernel", "layernorm"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "conv2d"),
        ("void at::native::reduce_kernel<512, 1>", "elementwise"),
    ],
)
def test_kernels_are_told_by_name(kernel: str, family: str) -> None:
    assert find_kernel_family(kernel)["family"] == family
    assert find_kernel_family(kernel)["kind"] in ("GEMM-like", "reduction", "elementwise")


def test_sides_without_clocks_or_energy_still_add_up() -> None:
    part = RunPart("x", ("x",), ("x",), (), "gemm", 2.0, 1e-3)
    a = RunSummary("a", True, 2e-3, 100.0, None, None, (part,), {})
    b = RunSummary(
        "b", True, 5e-3, 150.0, None, None, (replace(part, seconds=3e-3, calls=3.0),), {}
    )
    found = compare_runs(a, b)
    adds_up(found)
    assert CLOCK not in found.latency_s


def test_text_json_and_figure(tmp_path: Path) -> None:
    code, out, err = run(
        "compare", "gpt2@h200,batch=1,seq=64", ",batch=2", "--plot", str(tmp_path / "f.png")
    )
    assert code == 0, err
    assert "together" in out
    assert (tmp_path / "f.png").stat().st_size > 10_000
    code, out, _ = run("compare", "gpt2@h200,batch=1,seq=64", ",batch=2", "--json")
    found = json.loads(out)
    assert sum(found["terms"]["total_energy_j"].values()) == pytest.approx(
        found["difference"]["total_energy_j"]
    )
    listed = sum(op["latency_s"] for op in found["operators"]) + found["idle_gaps"]["latency_s"]
    assert listed == pytest.approx(found["difference"]["latency_s"])
    assert "logarithmic mean" in found["rule"]


def test_plain_of_totals_has_no_gaps(tmp_path: Path) -> None:
    found = comparison_to_plain(
        compare_runs(
            *read_pair("gpt2@h200,batch=1,seq=128", measured_run(tmp_path), iterations=100)
        )
    )
    assert found["idle_gaps"] is None
    assert found["b"]["measured"] is True


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gpt2@h200,btch=1", "@h100-sxm"], "Closest: batch"),
        (["gpt2@h200,batch", "@h100-sxm"], "key=value"),
        (["gpt2@h200,batch=x", "@h100-sxm"], "whole number"),
        (["@h200", "gpt2@h200"], "MODEL@GPU"),
        (["nothing.json", "gpt2@h200"], "neither"),
        (["predicted", "gpt2@h200"], "whole-model row"),
        (["row:none", "gpt2@h200"], "unknown row of h200"),
        (["gpt2@h201", "gpt2@h200"], "h200"),
    ],
)
def test_mistakes_are_named(argv: list[str], said: str) -> None:
    code, _, err = run("compare", *argv)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"other": 1}')
    with pytest.raises(BadInput, match="other"):
        read_pair(str(tmp_path / "x.json"), "gpt2@h200")
    with pytest.raises(UnknownName, match="model-x"):
        read_pair("predicted", f"{database(tmp_path, False)}#model-y")


def test_a_spec_that_leans_keeps_what_it_does_not_change() -> None:
    common = PredictionSpec("", "", {})
    first = parse_prediction_spec("gpt2@h200,batch=2,seq=64", common)
    assert parse_prediction_spec(",seq=128", common, first).options == {"batch": 2, "seq": 128}
    assert parse_prediction_spec("@a10", common, first) == replace(first, gpu="a10")
    assert parse_prediction_spec("bert-base@h200,batch=4", common, first).options == {"batch": 4}
    every = parse_prediction_spec(
        "gpt2@h200,quantization=fp8,skew=0.5,recompute=yes,clock=1GHz", common
    ).options
    assert every == {"quantization": "fp8", "skew": 0.5, "recompute": True, "clock": "1GHz"}
    assert build_row_graph(ROW).name.startswith("gpt2 prefill b8 s512")


def test_options_hold_for_both_runs_unless_a_run_says_otherwise() -> None:
    short = compare("gpt2@h200,batch=4,seq=64,clock=1200MHz", "@h100-sxm,batch=2")
    assert compare("gpt2@h200", "@h100-sxm,batch=2", batch=4, seq=64, clock="1200MHz") == short
    named = compare("gpt2", "gpt2-medium", gpu="h200", batch=4, seq=64)
    assert named == compare("gpt2@h200,batch=4,seq=64", "gpt2-medium@h200,batch=4,seq=64")
    code, out, err = run(
        "compare", "gpt2", "gpt2-medium", "--gpu", "h200", "--batch", "4", "--seq", "64", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["b"]["latency_s"] == named.b.latency_s


def test_predictions_compare_with_each_other_and_with_texts() -> None:
    a, b = (wattcast.predict("gpt2", "h200", batch=batch, seq=64) for batch in (1, 2))
    assert compare(a, b).b == compare("gpt2@h200,seq=64", b).b
