"""``wattcast models`` and ``wattcast models`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wattcast.core.errors import ExitCode
from wattcast.workload import ModelOptions, build_graph
from wattcast.workload.readers import load_workload

SHOW = ("models", "show", "llama3-8b", "--batch", "2", "--seq", "64")


def test_show_states_work_by_operator_and_in_all(call) -> None:
    done = call(*SHOW, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    out = json.loads(done.out)
    graph = build_graph("llama3-8b", ModelOptions(batch=2, seq=64))
    assert out["flop"] == pytest.approx(graph.flop)
    assert out["byte"] == pytest.approx(graph.byte)
    assert sum(op["flop"] for op in out["ops"]) == pytest.approx(out["flop"])
    assert sum(op["byte"] for op in out["ops"]) == pytest.approx(out["byte"])
    assert sum(op["count"] for op in out["ops"]) == out["calls"]
    assert out["product_flop"] < out["flop"]
    assert out["product_flop"] < out["product_flop_dense"]
    assert out["memory_byte"] > 16e9
    for op in out["ops"]:
        assert op["flop"] == pytest.approx(op["flop_per_call"] * op["count"])


def test_show_prints_a_table(call) -> None:
    done = call(*SHOW)
    assert done.code == 0
    assert "linear 128x28672x4096 bf16" in done.out
    assert "no padding" in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    "options",
    [
        ("--phase", "train", "--recompute"),
        ("--phase", "generate", "--tokens", "20"),
        ("--phase", "decode", "--stack", "engine", "--dtype", "fp8", "--tp", "4"),
        ("--stack", "compiled", "--attention", "eager", "--head", "all"),
    ],
)
def test_all_choices_reach_the_graph(call, options: tuple[str, ...]) -> None:
    done = call(*SHOW, *options, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["flop"] > 0


def test_memory_by_purpose_and_what_fits(call) -> None:
    out = json.loads(call(*SHOW, "--phase", "decode", "--capacity", "80GB", "--json").out)["memory"]
    assert out["fits"]
    assert out["largest_batch"] > 2
    parts = (
        "weight_byte",
        "cache_byte",
        "activation_byte",
        "gradient_byte",
        "optimiser_byte",
        "workspace_byte",
    )
    assert sum(out[part] for part in parts) == out["total_byte"]
    small = json.loads(call(*SHOW, "--capacity", "8GB", "--json").out)["memory"]
    assert (small["fits"], small["largest_batch"]) == (False, 0)
    assert "largest batch" in call(*SHOW, "--capacity", "80GB").out


def test_save_and_take_back(call, tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    done = call("models", "save", "llama3-8b", str(path), "--seq", "64", "--phase", "decode")
    assert done.code == 0, done.err
    assert str(path) in done.err
    assert done.out == ""
    back, graph = (
        load_workload.load_workload(path, ModelOptions()),
        build_graph("llama3-8b", ModelOptions(seq=64, phase="decode")),
    )
    assert back == graph
    again = json.loads(call("models", "show", str(path), "--json").out)
    assert again["flop"] == pytest.approx(graph.flop)
    assert again["memory"] is None
    assert call("models", "show", str(path), "--capacity", "80GB").code == ExitCode.BAD_INPUT
    assert call("predict", str(path), "--gpu", "h200").code == 0


def test_models_lists_all_with_kind_size_and_source(call) -> None:
    rows = json.loads(call("models", "--json").out)["models"]
    assert len(rows) >= 40
    llama = next(row for row in rows if row["name"] == "llama3-8b")
    assert llama["parameters"] == 8_030_261_248
    assert llama["kind"] == "language"
    assert "arXiv" in llama["source"]
    listed = call("models")
    assert listed.code == 0
    assert "llama3-8b" in listed.out
    shown = json.loads(call("models", "show", "Llama 3 8B", "--json").out)
    assert shown["model"]["dims"]["hidden"] == 4096
    assert "source" in call("models", "show", "gpt2").out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("models", "show", "lama3-8b"), "Closest: llama3-8b"),
        (("models", "show", "llama3-8b", "--batch", "0"), "batch"),
        (("models", "show", "llama3-8b", "--skew", "2"), "skew"),
        (("models", "show", "absent.json"), "cannot be read"),
        (("models", "show", "absent.onnx"), "absent.onnx"),
        (("models", "save", "llama3-8b", "/proc/nowhere/x.json"), "cannot be written"),
        (("models", "show", "gtp2"), "Closest: gpt2"),
    ],
)
def test_a_mistake_gets_one_paragraph(
    call, argv: tuple[str, ...], says: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*argv)
    assert done.code in (ExitCode.BAD_INPUT, ExitCode.MISSING)
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.err.count("\n") <= 2
    assert done.out == ""


def test_predict_takes_a_configuration_and_a_model_of_every_kind(call, tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 128,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = call(
        "predict", str(path), "resnet50", "whisper-tiny", "dit-xl-2", "--gpu", "h200", "--json"
    )
    assert done.code == 0, done.err
    names = [p["name"] for p in json.loads(done.out)["predictions"]]
    assert names[0].startswith(f"{tmp_path.name} prefill b1 s128")
    assert names[1:] == [
        "resnet50 forward b1 i224 bf16 eager",
        "whisper-tiny prefill b1 s448 bf16 eager",
        "dit-xl-2 generate b1 i256 n50 bf16 eager",
    ]
