"""Inputs that are well formed and absurd, or no files at all: each is refused in one sentence, at
once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import wattcast
from wattcast.cli.main import main
from wattcast.core.errors import BadInput
from wattcast.core.regular_files import open_regular
from wattcast.hardware.catalogue_reader import parse_gpu
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.power_logs import read_power_log
from wattcast.predictor.bundle.bundle_file import bundle_to_plain, plain_to_bundle, shipped_bundle
from wattcast.report.comparison_sides import read_run
from wattcast.serving.trace_files import parse_trace
from wattcast.web.answers import answer_request, parse_upload
from wattcast.workload.dimension_limits import MOST_LAYERS
from wattcast.workload.readers.from_huggingface import parse_huggingface
from wattcast.workload.readers.from_json import parse_workload

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
SMALL |= {"intermediate_size": 128, "max_position_embeddings": 64}


def _config(**fields: Any) -> bytes:
    return json.dumps(SMALL | fields).encode()


@pytest.mark.parametrize(
    "kind", ["gemma2", "gemma3_text", "qwen2", "modernbert", "jamba", "llama4_text", "t5", "sam"]
)
def test_a_file_with_billions_of_layers_builds_nothing(kind: str) -> None:
    """A ``config.json`` of 400 bytes with 1.6e9 layers took 24 GB: a list held an entry for each
    layer.
    """
    began = time.perf_counter()
    deep = dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), 1600000000)
    config = _config(
        model_type=kind, head_dim=16, num_key_value_heads=4, vision_config=deep, d_kv=16, **deep
    )
    with pytest.raises(BadInput):
        parse_huggingface(config, "config.json")
    assert time.perf_counter() - began < 1.0


def test_millions_of_heads_are_refused_before_they_are_walked() -> None:
    """A config of 16 million heads, or a workload of as many, took 2 GB: a number for each tile."""
    config = json.loads(_config(model_type="llama", head_dim=16, num_key_value_heads=4))
    with pytest.raises(BadInput, match="heads: expected a whole number from 1 to 65536"):
        wattcast.predict(config | {"num_attention_heads": 16_000_000}, "h200")

    attention = {"op": "engine_attention", "heads": 16_000_000, "kv_heads": 4, "head_dim": 16}
    attention |= {"groups": [[1, 1024, 1024]], "dtype": "bf16"}
    work = json.dumps({"name": "wide", "ops": [attention]}).encode()
    with pytest.raises(BadInput, match="rows of queries in a sequence"):
        parse_workload(work, "w.json")


@pytest.mark.parametrize(
    ("field", "count"), [("count", 10**400), ("gpu_count", 0), ("gpu_count", -4), ("tokens", 0)]
)
def test_a_prediction_with_absurd_counts_is_refused(
    field: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A count of 400 digits fits no float, and no run has no GPU."""
    main(["predict", "gpt2", "--gpu", "h200", "--json"])
    answer = json.loads(capsys.readouterr().out)
    prediction = answer["predictions"][0]
    target = prediction["ops"][0] if field == "count" else prediction
    target[field] = count
    path = tmp_path / "prediction.json"
    path.write_text(json.dumps(answer))
    with pytest.raises(BadInput, match="calls" if field == "count" else field):
        read_run(str(path), "h200", 1)


def test_as_many_layers_as_allowed_are_predicted() -> None:
    config = json.loads(_config(model_type="gemma2", head_dim=16, num_key_value_heads=4))
    deep = config | {"num_hidden_layers": MOST_LAYERS}
    assert (
        wattcast.predict(deep, "h200").latency_s > 100 * wattcast.predict(config, "h200").latency_s
    )
    with pytest.raises(BadInput, match=f"from 1 to {MOST_LAYERS} layers"):
        wattcast.predict(deep | {"num_hidden_layers": MOST_LAYERS + 1}, "h200")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_type": "bert", "num_attention_heads": 128}, "heads: expected a divisor of hidden"),
        (
            {"model_type": "vit", "hidden_size": 16, "num_attention_heads": 3},
            "heads: expected a divisor of hidden",
        ),
        ({"model_type": "vit", "image_size": 3, "patch_size": 16}, "image: expected"),
        (
            {"model_type": "mixtral", "num_attention_heads": 64, "num_key_value_heads": 8},
            "even number of rotated",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3},
            "kv_heads: expected a divisor",
        ),
        ({"model_type": "llama", "vocab_size": 2**30}, "vocab: expected"),
    ],
)
def test_sizes_that_no_framework_runs_are_refused_by_name(fields: dict[str, Any], why: str) -> None:
    """More heads than elements were a division by zero; a head of one element was an index out of
    range.
    """
    config = _config(
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "num_channels": 3} | fields
    )
    with pytest.raises(BadInput, match=why):
        parse_huggingface(config, "config.json", "mine")


@pytest.mark.parametrize(
    "entry", [{"repeat": 2**53}, {"repeat": 10**6, "count": 10**6}, {"repeat": 1, "count": 2**53}]
)
def test_a_workload_of_countless_calls_is_refused(entry: dict[str, int]) -> None:
    """``repeat`` of 2^53 was predicted: centuries."""
    op = {"op": "linear", "m": 8, "n": 8, "k": 8, "dtype": "bf16", "count": entry.get("count", 1)}
    file = {"name": "w", "ops": [{"repeat": entry["repeat"], "ops": [op]}]}
    with pytest.raises(BadInput, match=r"10,000,000,000|2\^40"):
        parse_workload(json.dumps(file).encode(), "w.json")


@pytest.mark.parametrize("time_s", ["1e300", "1e308", "1e9"])
def test_a_request_that_arrives_in_a_million_years_is_refused(time_s: str) -> None:
    """Arrivals at 1e300 s were simulated, or ended as an internal error."""
    table = f"arrival_s,prompt_tokens,output_tokens\n0.5,16,4\n{time_s},16,4\n"
    lines = f'{{"arrival_s": {time_s}, "prompt_tokens": 8, "output_tokens": 2}}\n'
    for data, name in ((table, "trace.csv"), (lines, "trace.jsonl")):
        with pytest.raises(BadInput, match="at most 1e\\+08 s"):
            parse_trace(data.encode(), name)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("waiting_sm", -5.0),
        ("step_energy", -1.0),
        ("toggling.random", -1.0),
        ("interval_level", 1.5),
        ("corrections.gemm.compute", -1.0),
        ("corrections.gemm.memory", 1e12),
        ("corrections.gemm.fixed", "-3 s"),
        ("corrections.gemm.fixed", "142 h"),
        ("launch.host_per_operator", "12 h"),
        ("launch.host_weights.bmm", -1.0),
        ("power.model.energy_j.l2_byte", 1.0),
        ("power.model.memory_on_core", 2.0),
        ("power.model.idle.per_c", 5.0),
        ("reference.sm_count", -132.0),
        ("residuals.gemm.latency", [2.0, 0.5]),
        ("residuals.gemm.latency", [-1.0, 0.5]),
        ("effective_clock.ratio", [-1.0]),
    ],
)
def test_a_bundle_of_absurd_factors_is_refused(path: str, value: object) -> None:
    """Bundles with negative or huge factors gave modules of -22 W and runs of 142 days, and nobody
    was told.
    """
    bundle = shipped_bundle("h200")
    assert bundle is not None
    plain: Any = bundle_to_plain(dataclasses.replace(bundle, learned=None))
    *outer, last = path.split(".")
    inner = plain
    for name in outer:
        inner = inner[name]
    plain_to_bundle(plain, "bundle.json")
    inner[last] = value
    with pytest.raises(BadInput, match=r"bundle\.json|residuals"):
        plain_to_bundle(plain, "bundle.json")


@pytest.mark.parametrize(
    ("old", "new"), [("4.8 TB/s", "1e280 TB/s"), ("4.8 TB/s", "1e-300 TB/s"), ("700 W", "1e250 W")]
)
def test_a_gpu_beyond_physics_is_refused(old: str, new: str) -> None:
    """GPU files of 1e300 or 1e-300 ended as internal errors far from the number."""
    good = (Path(wattcast.__file__).parent / "hardware/catalogue/h200.yaml").read_text()
    assert old in good
    with pytest.raises(BadInput, match="expected from"):
        parse_gpu(good.replace(old, new).encode(), "mine", "mine.yaml")


def test_a_prediction_of_negative_figures_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``compare`` took logarithms of what a file said."""
    plain = wattcast.predict("gpt2", "h200").to_dict()
    good = {"wattcast": wattcast.__version__, "predictions": [plain]}
    (tmp_path / "good.json").write_text(json.dumps(good))
    assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "good.json")]) == 0
    for change in ({"latency_s": -1.0}, {"power_w": 0.0}, {"energy_j": 5e9}, {"clock_hz": -1.0}):
        (tmp_path / "bad.json").write_text(json.dumps(good | {"predictions": [plain | change]}))
        assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "bad.json")]) == 2
        assert "internal error" not in capsys.readouterr().err
    for run in (
        {"duration_s": "x", "power_w": 3},
        {"duration_s": [], "power_w": 3},
        {"duration_s": -1, "power_w": 3},
    ):
        (tmp_path / "run.json").write_text(json.dumps(run))
        assert main(["compare", str(tmp_path / "good.json"), str(tmp_path / "run.json")]) == 2


def test_an_upload_that_is_no_text_is_the_users_mistake() -> None:
    """Invalid UTF-8 inside an upload was an answer of 500."""
    with pytest.raises(BadInput, match="not valid JSON"):
        parse_upload("x.json", b'{"name": "\xff\xfe"}')
    body = b'{"gpu":"h200","file":{"name":"x.json","content":{"name":"\xff","ops":[]}}}'
    assert answer_request("view", body).status == 422


def test_a_name_of_a_file_that_is_too_long_is_the_users_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names over 255 characters were internal errors."""
    for argv in (
        ["predict", "x" * 300 + "/y", "--gpu", "h200"],
        ["predict", "x" * 5000 + ".json", "--gpu", "h200"],
        ["gpus", "show", "y" * 300 + ".yaml"],
        ["simulate", "gpt2", "--gpu", "h200", "--trace", "z" * 300],
        ["compare", "a" * 400 + ".json", "b"],
    ):
        assert main(argv) == 2, argv[:1]
        assert "internal error" not in capsys.readouterr().err


@pytest.fixture
def odd_files(tmp_path: Path) -> list[Path]:
    """A pipe, a socket and a device under a name that every reader would open."""
    os.mkfifo(tmp_path / "pipe.json")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket.json"))
    listening.close()
    (tmp_path / "device.json").symlink_to("/dev/zero")
    return [tmp_path / name for name in ("pipe.json", "socket.json", "device.json")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes of that kind on this platform")
def test_what_is_no_file_is_refused_at_once(
    odd_files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening a FIFO waits until somebody writes into it: every command that was given one hung."""
    began = time.perf_counter()
    for path in odd_files:
        for read in (open_regular, EnergySamples.load, read_power_log):
            with pytest.raises(BadInput, match=r"pipe|socket|device"):
                read(path)
        for argv in (
            ["predict", str(path), "--gpu", "h200"],
            ["simulate", "gpt2", "--gpu", "h200", "--trace", str(path)],
            ["measure", "log", str(path)],
            ["serve", "--replay", str(path)],
            ["predict", "gpt2", "--gpu", "h200", "--bundle", str(path)],
        ):
            assert main(argv) == 2, argv
            assert "internal error" not in capsys.readouterr().err
    assert time.perf_counter() - began < 30.0


@pytest.mark.parametrize(
    "op",
    [
        {"op": "engine_quantize", "rows": 8, "dim": 64, "mode": "nonsense"},
        {"op": "engine_rms_norm", "rows": 8, "dim": 64, "quant": "nonsense"},
        {"op": "engine_rotary", "rows": 1, "dim": 10**400},
        {"op": "linear", "m": 8, "n": 8, "k": 2**41},
        {"op": "engine_latent", "batch": 1, "heads": 8, "q_len": 64, "kv_len": 8},
    ],
)
def test_an_operator_of_unknown_words_or_sizes_is_refused(op: dict[str, Any]) -> None:
    """Words that no table knows were a KeyError, and sizes that no float holds an OverflowError,
    when their kernels were counted.
    """
    with pytest.raises(BadInput, match="expected"):
        parse_workload(json.dumps({"name": "w", "ops": [op]}).encode(), "w.json")


def test_a_power_limit_that_no_card_takes_is_refused_over_http() -> None:
    """A limit of 100 kW let an H200 of 700 W draw 777 W."""
    body = {"gpu": "h200", "model": "gpt2", "power_limit_w": 1e5}
    answer = answer_request("view", json.dumps(body).encode())
    assert answer.status == 422
    assert b"a limit that the h200 takes" in answer.body
