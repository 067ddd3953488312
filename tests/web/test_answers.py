"""What the workers answer: limits, refusals, no path to the file system, and the same numbers as the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattcast import hardware
from wattcast.predictor.prediction_json import PredictOut
from wattcast.web import answers, request_schema
from wattcast.web.answers import Answer, AnswerCache, answer_request
from wattcast.workload import model_catalogue

CASE = {"gpu": "h200", "model": "gpt2", "batch": 4, "seq": 256}
LIST = {"name": "list", "ops": [{"op": "linear", "m": 512, "n": 4096, "k": 4096, "count": 8}]}


def asked(kind: str, plain: object) -> Answer:
    return answer_request(kind, json.dumps(plain).encode())


def uploaded(content: object, name: str = "mine.json", **more: object) -> Answer:
    return asked("view", {"gpu": "h200", "file": {"name": name, "content": content}, **more})


def test_a_view_agrees_with_the_command_line(call) -> None:
    view = msgspec.json.decode(asked("view", CASE).body, type=answers.ViewOut)
    out = json.loads(call("predict", "gpt2", "--gpu", "h200", "--batch", "4", "--seq", "256", "--json").out)
    p = out["predictions"][0]
    for name in ("latency_s", "power_w", "energy_j", "clock_hz", "busy_s", "peak_power_w", "fits", "memory_byte"):
        assert getattr(view, name) == pytest.approx(p[name], rel=1e-12), name
    assert [m["name"] for m in p["modules"]] == view.parts
    assert sum(view.part_w) == pytest.approx(view.power_w)
    steps = [b - a for a, b in zip(view.trace.edge_s, view.trace.edge_s[1:], strict=False)]
    watts = [sum(column) for column in zip(*view.trace.part_w, strict=True)]
    joules = sum(s * w for s, w in zip(steps, watts, strict=True))
    assert joules == pytest.approx(view.energy_j, rel=0.002)  # watts are sent to a tenth
    again = asked("predict", {"configurations": [CASE]}).body
    assert msgspec.json.decode(again, type=PredictOut).predictions[0].gpu == "h200"
    assert json.loads(again) == out


def test_settings_reach_the_model() -> None:
    free = json.loads(asked("view", CASE).body)
    held = json.loads(asked("view", CASE | {"clock_hz": 1.2e9}).body)
    assert held["clock_hz"] == 1.2e9
    assert held["latency_s"] > free["latency_s"]
    capped = json.loads(asked("view", CASE | {"model": "llama3-8b", "seq": 1024, "power_limit_w": 400}).body)
    assert capped["capped"]
    assert 0.98 * 400 < capped["power_w"] <= 400  # the governor settles a little below its limit
    graph = json.loads(asked("view", CASE | {"host_launch_s": 0.0}).body)
    assert graph["busy_s"] == pytest.approx(graph["latency_s"], rel=1e-6)
    warm = json.loads(asked("view", CASE | {"temperature_c": 80}).body)
    assert warm["power_w"] >= free["power_w"]
    zeros = json.loads(asked("view", CASE | {"data": "zeros"}).body)
    assert zeros["energy_j"] < free["energy_j"]


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({}, "gpu"),
        (CASE | {"gpu": "h201"}, "unknown gpu"),
        (CASE | {"gpu": "../../../etc/passwd"}, "unknown gpu"),
        (CASE | {"gpu": "/etc/passwd.yaml"}, "unknown gpu"),
        (CASE | {"model": "/etc/passwd.json"}, "unknown model"),
        (CASE | {"model": "config.json"}, "unknown model"),
        (CASE | {"file": {"name": "x", "content": LIST}}, "either a model or a file"),
        ({"gpu": "h200"}, "either a model or a file"),
        (CASE | {"batch": 0}, "batch"),
        (CASE | {"batch": 2.5}, "batch"),
        (CASE | {"seq": 10**9}, "seq"),
        (CASE | {"colour": "red"}, "colour"),
        (CASE | {"clock_hz": 5e9}, "clock"),
        (CASE | {"dtype": "fp3"}, "fp3"),
        (CASE | {"phase": "dream"}, "phase"),
        (CASE | {"tokens": 5}, "generate"),
        ([], "object"),
    ],
)
def test_a_bad_request_is_named(plain: object, said: str) -> None:
    found = asked("view", plain)
    assert found.status == 422
    assert said in json.loads(found.body)["error"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"gpu": NaN}', b"[" * 5000, b'{"a":' * 5000])
def test_a_body_that_is_not_json_is_refused(data: bytes) -> None:
    for kind in ("view", "predict", "figure"):
        found = answer_request(kind, data)
        assert found.status == 422
        assert "Traceback" not in found.body.decode()


def test_uploads_of_every_kind() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 2,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    found = json.loads(uploaded(config, "config.json", batch=2, seq=64).body)
    assert "b2 s64" in found["name"]
    assert json.loads(uploaded(LIST).body)["name"] == "list"
    room = json.loads(asked("room", {"gpu": "h200", "file": {"name": "l", "content": LIST}}).body)
    assert room["held"] is None


def test_the_name_of_an_upload_is_a_label_and_no_path() -> None:
    found = uploaded({"name": "x", "ops": [{"op": "conjure"}]}, "../../etc/../passwd.json")
    assert json.loads(found.body)["error"].startswith("passwd.json: ops[0]: unknown operator 'conjure'")


def test_uploads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    assert "nesting" in json.loads(uploaded(deep).body)["error"]
    assert "nesting" not in json.loads(uploaded([["]" * 100, '"' + "[" * 100]]).body)["error"], (
        "strings hold no brackets"
    )
    many = {"name": "x", "ops": [{"op": "add", "n": 1}] * (answers.MOST_OPERATORS + 1)}
    assert "at most 20,000" in json.loads(uploaded(many).body)["error"]
    with pytest.raises(answers.BadInput, match="lists and objects"):
        request_schema.check_nesting(b"[" + b"[]," * (request_schema.MOST_ITEMS + 1) + b"0]", "x")
    with pytest.raises(answers.BadInput, match="at most"):
        request_schema.read_request(b" " * (request_schema.MOST_BYTE + 1), request_schema.Configuration)


def test_no_file_is_opened_that_a_request_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked("view", CASE)  # everything of our own is loaded
    opened: list[str] = []
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened.append(str(path)))
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(str(self)))
    monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(str(self)))
    for name in ("/etc/passwd", "~/x.yaml", "file:///etc/passwd", "C:\\x.json", "h200.yaml", "gpt2.json"):
        assert asked("view", CASE | {"gpu": name}).status == 422
        assert asked("view", CASE | {"model": name}).status == 422
        asked("view", {"gpu": "h200", "file": {"name": name, "content": LIST}})
    assert not [path for path in opened if "passwd" in path or "x." in path or path.endswith("gpt2.json")]


def test_our_own_mistake_is_told_without_its_inside(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(answers.REQUEST_KINDS, "view", lambda body: 1 / 0)
    found = asked("view", CASE)
    assert found.status == 500
    assert b"division" not in found.body
    assert "ZeroDivisionError" in capsys.readouterr().err, "the log says more"


def test_csv_holds_the_operators_and_no_formula() -> None:
    evil = {"name": "=cmd|x", "ops": [{"op": "linear", "m": 64, "n": 64, "k": 64, "label": "@SUM(A1)"}]}
    both = [CASE, {"gpu": "h200", "file": {"name": "e.json", "content": evil}}]
    rows = list(csv.DictReader(io.StringIO(asked("csv", {"configurations": both}).body.decode())))
    energy_j = sum(float(row["energy_j"]) for row in rows if row["configuration"] == "1")
    view = json.loads(asked("view", CASE).body)
    assert 0 < energy_j <= view["energy_j"] * (1 + 1e-9), "the rest is waiting"
    assert rows[-1]["workload"] == "'=cmd|x"
    assert rows[-1]["label"] == "'@SUM(A1)"


def test_figures_and_reports() -> None:
    both = {"configurations": [CASE, CASE | {"gpu": "h100-sxm"}], "figure": "clocks"}
    drawn = asked("figure", both)
    assert drawn.body.startswith(b"<?xml")
    assert drawn.type == "image/svg+xml"
    assert asked("figure", both | {"format": "png"}).body.startswith(b"\x89PNG")
    assert asked("figure", {"configurations": [CASE], "figure": "portrait"}).status == 422
    assert asked("figure", {"configurations": [CASE], "format": "gif"}).status == 422
    assert asked("figure", {"configurations": [CASE] * 5}).status == 422


def test_answers_are_remembered_within_bounds() -> None:
    remember = AnswerCache(most=2)
    first = remember("room", json.dumps(CASE).encode())
    assert remember("room", json.dumps(CASE).encode()) is first
    for batch in (5, 6):
        remember("room", json.dumps(CASE | {"batch": batch}).encode())
    assert remember("room", json.dumps(CASE).encode()) is not first
    small = AnswerCache(most_byte=10)
    assert small("room", json.dumps(CASE).encode()) is not small("room", json.dumps(CASE).encode())


SIZES = st.one_of(st.integers(1, 64), st.sampled_from([1000, 4096, 100_000, 1_000_000]))
CONFIGURATIONS = st.fixed_dictionaries(
    {"gpu": st.sampled_from(hardware.gpu_names()), "model": st.sampled_from(model_catalogue.list_models())},
    optional={
        "batch": SIZES,
        "seq": SIZES,
        "tokens": SIZES,
        "phase": st.sampled_from(["prefill", "decode", "generate", "train", "forward"]),
        "dtype": st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]),
        "attention": st.sampled_from(["eager", "flash"]),
        "stack": st.sampled_from(["eager", "compiled", "engine"]),
        "tp": st.sampled_from([1, 2, 8]),
        "clock_hz": st.floats(1e8, 2.5e9),
        "power_limit_w": st.floats(1.0, 1500.0),
        "host_launch_s": st.floats(0.0, 1.0),
        "temperature_c": st.floats(0.0, 110.0),
        "data": st.sampled_from(["random", "zeros", "ones", "relu"]),
    },
)


@settings(max_examples=60)
@given(plain=CONFIGURATIONS)
def test_whatever_is_chosen_there_is_a_prediction_or_a_reason(plain: dict) -> None:
    found = asked("view", plain)
    assert found.status in (200, 422), (plain, found.body)
    if found.status == 422:
        assert len(json.loads(found.body)["error"]) > 10
        return
    view = msgspec.json.decode(found.body, type=answers.ViewOut)
    assert view.latency_s > 0
    assert view.energy_j == pytest.approx(view.power_w * view.latency_s, rel=1e-6)
    assert view.interval.power_w[0] <= view.power_w <= view.interval.power_w[1]
    assert sum(view.part_w) == pytest.approx(view.power_w, rel=1e-6)


def test_the_catalogue_has_ranges_for_the_sliders() -> None:
    found = msgspec.json.decode(asked("catalogue", {}).body, type=answers.CatalogueOut)
    assert len(found.gpus) >= 18
    assert len(found.models) >= 44
    for gpu in found.gpus:
        assert 0 < gpu.min_clock_hz < gpu.max_clock_hz
        assert 0 < gpu.min_limit_w <= gpu.limit_w <= gpu.max_limit_w
