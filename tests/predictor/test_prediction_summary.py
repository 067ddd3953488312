"""The answers of a prediction: tokens, items, all GPUs, money, and the words they are said in."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from rich.console import Console

import wattcast
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import FitStatus
from wattcast.predictor.answer_lines import judge_confidence, rank_assumptions
from wattcast.report.text_tables import print_predictions
from wattcast.workload.model_catalogue import ModelKind

DECODE = {"phase": "decode", "batch": 16, "seq": 512}


@pytest.mark.parametrize(
    ("model", "options", "tokens", "items", "gpus"),
    [
        ("llama3-8b", {"phase": "prefill", "batch": 4, "seq": 512}, 4 * 512, None, 1),
        ("llama3-8b", {"phase": "decode", "batch": 4, "seq": 512, "tp": 2}, 4, None, 2),
        (
            "llama3-8b",
            {"phase": "decode", "batch": 4, "seq": 512, "tp": 2, "dp": 3},
            4 * 3,
            None,
            6,
        ),
        ("gpt2", {"phase": "generate", "batch": 4, "seq": 64, "tokens": 32}, 4 * 32, None, 1),
        ("gpt2", {"phase": "train", "batch": 4, "seq": 64, "dp": 2}, 4 * 64 * 2, None, 2),
        ("bert-base", {"batch": 4, "seq": 64}, 4 * 64, None, 1),
        ("resnet50", {"batch": 8}, None, 8, 1),
        ("sd1.5-unet", {"batch": 2}, None, 2, 1),
        ("whisper-tiny", {"phase": "generate", "batch": 3, "seq": 4, "tokens": 8}, 24, 3, 1),
        ("whisper-tiny", {"phase": "decode", "batch": 3, "seq": 4}, 3, None, 1),
    ],
)
def test_tokens_items_and_gpus(
    model: str, options: dict, tokens: int | None, items: int | None, gpus: int
) -> None:
    p = wattcast.predict(model, "h200", **options)
    assert (p.tokens, p.items, p.gpu_count) == (tokens, items, gpus)
    assert p.total_power_w == p.power_w * gpus
    assert p.total_energy_j == p.energy_j * gpus
    for count, speed, joule in (
        (tokens, p.tokens_per_s, p.energy_j_per_token),
        (items, p.items_per_s, p.energy_j_per_item),
    ):
        if count is None:
            assert speed is None
            assert joule is None
        else:
            assert_allclose(speed * p.latency_s, count)
            assert_allclose(
                joule * speed, p.total_power_w
            )  # joules per token times tokens per second are watts


def test_one_configuration_is_plain_floats() -> None:
    p = wattcast.predict("gpt2", "h200", **DECODE)
    for name in (
        "latency_s",
        "power_w",
        "energy_j",
        "clock_hz",
        "tokens_per_s",
        "total_power_w",
        "peak_power_w",
    ):
        assert type(getattr(p, name)) is float, name
    assert type(p.capped) is bool
    assert type(p.ops[0].latency_s) is float
    assert type(p.modules[0].power_w) is float


def test_a_sweep_is_arrays_everywhere() -> None:
    clocks = np.array([9e8, 1.2e9, 1.5e9])
    p = wattcast.predict("gpt2", "h200", clock=clocks, electricity="0.36/kWh", **DECODE)
    assert p.tokens_per_s.shape == p.total_energy_j.shape == p.cost.shape == (3,)
    assert_allclose(p.cost, p.total_energy_j * 1e-7)
    assert p.to_frame().height == 3
    assert json.loads(p.to_json())["clock_hz"] == clocks.tolist()
    assert "\n" not in repr(p)
    assert "<p>" in p._repr_html_()


def test_money_and_carbon_by_hand() -> None:
    p = wattcast.predict(
        "llama3-8b",
        "h200",
        tp=2,
        price="3.60USD/h",
        electricity="0.36/kWh",
        carbon="360g/kWh",
        **DECODE,
    )
    joules, seconds = 2 * p.energy_j, 2 * p.latency_s
    assert_allclose(p.cost, joules * 1e-7 + seconds * 1e-3)
    assert_allclose(p.cost_per_million_tokens, p.cost / 16 * 1e6)
    assert_allclose(p.carbon_g, joules * 1e-4)
    assert p.prices.currency == "USD"
    plain = wattcast.predict("gpt2", "h200", **DECODE)
    assert (plain.cost, plain.carbon_g) == (None, None)
    us = wattcast.predict("gpt2", "h200", carbon="us", **DECODE)
    assert_allclose(us.carbon_g, us.energy_j / 3.6e6 * 366)
    assert any("Energy Information Administration" in note for note in us.assumptions)


def test_plain_forms(call) -> None:
    p = wattcast.predict("gpt2", "h200", **DECODE)
    assert "\n" not in repr(p)
    assert "tokens/s" in repr(p)
    assert p._repr_html_().startswith("<table ")
    printed = call(
        "predict",
        "gpt2",
        "--gpu",
        "h200",
        "--phase",
        "decode",
        "--batch",
        "16",
        "--seq",
        "512",
        "--json",
    )
    assert json.loads(p.to_json()) == json.loads(printed.out)["predictions"][0]
    frame = p.to_frame()
    assert frame["tokens_per_s"].to_list() == [p.tokens_per_s]


@pytest.mark.parametrize("gpu", ["h200", "l40s"])
def test_the_first_ten_lines_answer(call, gpu: str) -> None:
    done = call(
        "predict",
        "llama3-8b",
        "--gpu",
        gpu,
        "--phase",
        "decode",
        "--batch",
        "8",
        "--tp",
        "2",
        "--price",
        "2.50/h",
    )
    first = "\n".join(done.out.splitlines()[:10])
    for word in (
        "tokens/s",
        "J/token",
        "total power",
        "2 GPUs",
        "latency",
        "fits",
        "per million tokens",
        "how sure",
    ):
        assert word in first, word
    assert len(done.out.splitlines()) <= 45
    assert "--details" in done.out
    whole = call(
        "predict",
        "llama3-8b",
        "--gpu",
        gpu,
        "--phase",
        "decode",
        "--batch",
        "8",
        "--tp",
        "2",
        "--details",
    )
    assert "effective clock" in whole.out
    assert len(whole.out.splitlines()) > len(done.out.splitlines())


@pytest.mark.parametrize(
    ("gpu", "step"),
    [
        ("h200", 6),
        ("l40s", 16),
        ("mi300x", 16),
        *(pytest.param(gpu, 1, marks=pytest.mark.slow) for gpu in ("h200", "l40s", "mi300x")),
    ],
)
def test_any_decode_answers_in_the_first_ten_lines_of_a_narrow_terminal(
    gpu: str, step: int
) -> None:
    """Language models of the catalogue, whether they fit one card or not; every one of them with
    ``-m slow``.
    """
    names = [model.name for model in wattcast.models() if model.kind is ModelKind.LANGUAGE]
    assert len(names) >= 40
    for p in wattcast.predict_many(
        names[::step], gpu, phase="decode", batch=4, seq=256, force=True
    ):
        console = Console(file=io.StringIO(), width=80)
        print_predictions(console, [p], False)
        first = "\n".join(console.file.getvalue().splitlines()[:10])
        for pattern in (
            r"throughput +[\d,.]+ tokens/s",
            r"energy +[\d,.]+ m?J/token",
            r"total power +[\d,.]+ k?W",
        ):
            assert re.search(pattern, first), first


def test_how_sure_is_one_word_with_a_reason() -> None:
    measured = wattcast.predict(
        "llama3-8b", "h200", batch=8, seq=1024, host_launch=0.0, stack="eager"
    )
    forecast = wattcast.predict("llama3-8b", "a40", batch=8, seq=1024, host_launch=0.0)
    waiting = wattcast.predict("gpt2", "h200", batch=1, seq=64, stack="eager")
    assert measured.status is FitStatus.MEASURED
    assert judge_confidence(measured).value == "good"
    assert judge_confidence(forecast).value != "good"
    assert "forecast" in judge_confidence(forecast).remark
    assert judge_confidence(waiting).value == "rough"
    assert "host" in judge_confidence(waiting).remark
    assert rank_assumptions(waiting)[0].startswith("host")
    assert sorted(rank_assumptions(forecast)) == sorted(forecast.assumptions)


LARGE = ("predict", "llama3-70b", "--phase", "decode", "--batch", "64", "--seq", "2048")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("predict", "llama3-8b", "--gpu", "a100-sxm-80gb", "--dtype", "fp8"), "--weights fp8"),
        (("predict", "llama3-8b", "--gpu", "v100-sxm"), "fp16"),
        (("predict", "gpt2", "--gpu", "h200", "--power-limit", "1500W"), "from 200 W to 700 W"),
        (("predict", "gpt2", "--gpu", "h200", "--power-limit", "100W"), "from 200 W to 700 W"),
        (
            ("predict", "gpt2", "--gpu", "rtx-4090", "--power-limit", "2kW"),
            "a limit that the rtx-4090 takes",
        ),
        ((*LARGE, "--gpu", "h100-sxm"), "4 x h100-sxm (tp 4)"),
        ((*LARGE, "--gpu", "h200"), "2 x h200 (tp 2)"),
        (("predict", "deepseek-v3", "--gpu", "h200"), "8 x h200"),
        (("predict", "resnet50", "--gpu", "l4", "--batch", "40000"), "with a batch of"),
    ],
)
def test_what_cannot_run_is_refused_and_forced(call, argv: tuple[str, ...], says: str) -> None:
    done = call(*argv)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert call(*argv, "--force").code == 0


@pytest.mark.parametrize(
    ("tp", "says"), [("3", "divisor of heads=32"), ("64", "divisor of heads=32")]
)
def test_tensor_parallel_gpus_share_heads_evenly(call, tp: str, says: str) -> None:
    done = call("predict", "llama3-8b", "--gpu", "h200", "--tp", tp)
    assert done.code == 2
    assert says in done.err


def test_a_plot_and_a_report_are_refused_likewise(call, tmp_path) -> None:
    for argv in (
        ("predict", "deepseek-v3", "--gpu", "h200", "--plot", str(tmp_path / "p.png")),
        ("report", "deepseek-v3", "--gpu", "h200", "--out", str(tmp_path / "r.html")),
    ):
        done = call(*argv)
        assert done.code == 2
        assert "It fits" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    [
        {"price": "cheap"}, {"price": "2.50/kWh"}, {"price": "l4x=1/h"}, {"electricity": "0.12"}, {"carbon": "400"},
        {"carbon": "atlantis"}, {"pue": 0.5}, {"price": "-1/h"},
        {"price": "1USD/h", "electricity": "1EUR/kWh"},
    ],
)  # fmt: skip
def test_bad_prices_are_refused(asked: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        wattcast.predict("gpt2", "h200", seq=64, **asked)


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    """``examples/`` are users' scripts; the project's own mypy run checks them against these
    signatures.
    """
    assert (Path(wattcast.__file__).parent / "py.typed").exists()
