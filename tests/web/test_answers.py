"""What the workers answer: limits, refusals, no path to the file system, and the same numbers as
the command line.
"""

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
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prediction_json import PredictOut
from wattcast.web import answers, request_schema
from wattcast.web.answers import Answer, answer_request
from wattcast.workload import model_catalogue

CASE = {"gpu": "h200", "model": "gpt2", "batch": 4, "seq": 256}
LIST = {"name": "list", "ops": [{"op": "linear", "m": 512, "n": 4096, "k": 4096, "count": 8}]}


def asked(kind: str, plain: object) -> Answer:
    return answer_request(kind, json.dumps(plain).encode())


def uploaded(content: object, name: str = "mine.json", **more: object) -> Answer:
    return asked("view", {"gpu": "h200", "file": {"name": name, "content": content}, **more})


def predicted(plain: object) -> dict:
    found: dict = json.loads(asked("view", plain).body)["prediction"]
    return found


def test_a_view_agrees_with_the_command_line(call) -> None:
    view = msgspec.json.decode(asked("view", CASE).body, type=answers.ViewOut)
    out = json.loads(
        call("predict", "gpt2", "--gpu", "h200", "--batch", "4", "--seq", "256", "--json").out
    )
    p = out["predictions"][0]
    shown = msgspec.to_builtins(view.prediction)
    assert {
        k: v for k, v in shown.items() if k not in ("ops", "assumptions", "support", "interval")
    } == {k: v for k, v in p.items() if k not in ("ops", "assumptions", "support", "interval")}
    assert sorted(shown["assumptions"]) == sorted(p["assumptions"])
    busy = sum(group.latency_s for group in view.groups)
    assert busy == pytest.approx(view.prediction.busy_s, rel=1e-6), (
        "a small model has no operator left out"
    )
    for group in view.groups:
        assert sum(group.part_j) == pytest.approx(group.energy_j, rel=1e-6), group.name
        if group.flop_per_byte is not None:
            roof = min(
                max(view.roofs.values()), max(view.byte_per_s.values()) * group.flop_per_byte
            )
            assert group.flop_per_s <= roof * 1.001, f"{group.name} lies above its roof"
    again = asked("predict", {"configurations": [CASE]}).body
    assert msgspec.json.decode(again, type=PredictOut).predictions[0].gpu == "h200"
    assert json.loads(again) == out


def test_settings_reach_the_model() -> None:
    busy = CASE | {"stack": "eager", "batch": 64}  # the host holds a smaller batch up
    free = predicted(busy)
    held = predicted(busy | {"clock_hz": 1.2e9})
    assert held["clock_hz"] == 1.2e9
    assert held["latency_s"] > free["latency_s"]
    capped = predicted(busy | {"model": "llama3-8b", "seq": 1024, "power_limit_w": 400})
    assert capped["capped"]
    assert 0.98 * 400 < capped["power_w"] <= 400  # the governor settles a little below its limit
    graph = predicted(busy | {"host_launch_s": 0.0})
    assert graph["busy_s"] == pytest.approx(graph["latency_s"], rel=1e-6)
    warm = predicted(busy | {"temperature_c": 80})
    assert warm["power_w"] >= free["power_w"]
    zeros = predicted(busy | {"data": "zeros"})
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


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b'{"gpu": NaN}', b"[" * 5000, b'{"a":' * 5000]
)
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
    assert "b2 s64" in found["prediction"]["name"]
    assert json.loads(uploaded(LIST).body)["prediction"]["name"] == "list"
    room = json.loads(asked("room", {"gpu": "h200", "file": {"name": "l", "content": LIST}}).body)
    assert room["held"] is None


def test_the_name_of_an_upload_is_a_label_and_no_path() -> None:
    found = uploaded({"name": "x", "ops": [{"op": "conjure"}]}, "../../etc/../passwd.json")
    assert json.loads(found.body)["error"].startswith(
        "passwd.json: ops[0]: unknown operator 'conjure'"
    )


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
        request_schema.read_request(
            b" " * (request_schema.MOST_BYTE + 1), request_schema.Configuration
        )


def test_no_file_is_opened_that_a_request_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked("view", CASE)  # everything of our own is loaded
    opened: list[str] = []
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: opened.append(str(path)))
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(str(self)))
    monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(str(self)))
    for name in (
        "/etc/passwd",
        "~/x.yaml",
        "file:///etc/passwd",
        "C:\\x.json",
        "h200.yaml",
        "gpt2.json",
    ):
        assert asked("view", CASE | {"gpu": name}).status == 422
        assert asked("view", CASE | {"model": name}).status == 422
        assert asked("plan", {"model": "gpt2", "gpus": [name], "rate_per_s": 1}).status == 422
        assert asked("train", {"model": "gpt2", "gpu": name}).status == 422
        assert answer_request("gpu", name.encode()).status == 422
        trace = {
            "model": "gpt2",
            "gpu": "h200",
            "trace_name": name,
            "trace": "arrival_s,prompt_tokens\n1,2\n",
        }
        assert asked("simulate", trace).status == 422
        asked("view", {"gpu": "h200", "file": {"name": name, "content": LIST}})
    assert not [
        path for path in opened if "passwd" in path or "x." in path or path.endswith("gpt2.json")
    ]


def test_our_own_mistake_is_told_without_its_inside(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(answers.REQUEST_KINDS, "view", (str, lambda body: 1 / 0))
    found = asked("view", CASE)
    assert found.status == 500
    assert b"division" not in found.body
    assert "ZeroDivisionError" in capsys.readouterr().err, "the log says more"


def test_csv_holds_the_operators_and_no_formula() -> None:
    evil = {
        "name": "=cmd|x",
        "ops": [{"op": "linear", "m": 64, "n": 64, "k": 64, "label": "@SUM(A1)"}],
    }
    both = [CASE, {"gpu": "h200", "file": {"name": "e.json", "content": evil}}]
    rows = list(csv.DictReader(io.StringIO(asked("csv", {"configurations": both}).body.decode())))
    energy_j = sum(float(row["energy_j"]) for row in rows if row["configuration"] == "1")
    assert 0 < energy_j <= predicted(CASE)["energy_j"] * (1 + 1e-9), "the rest is waiting"
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


SIZES = st.one_of(st.integers(1, 64), st.sampled_from([1000, 4096, 100_000, 1_000_000]))
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "gpu": st.sampled_from(hardware.gpu_names()),
        "model": st.sampled_from(model_catalogue.list_models()),
    },
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


@settings(max_examples=20)
@given(plain=CONFIGURATIONS)
def test_whatever_is_chosen_there_is_a_prediction_or_a_reason(plain: dict) -> None:
    check_view(plain)


@pytest.mark.slow
@settings(max_examples=300)
@given(plain=CONFIGURATIONS)
def test_whatever_is_chosen_by_night_there_is_a_prediction_or_a_reason(plain: dict) -> None:
    check_view(plain)


def check_view(plain: dict) -> None:
    found = asked("view", plain)
    assert found.status in (200, 422), (plain, found.body)
    if found.status == 422:
        assert len(json.loads(found.body)["error"]) > 10
        return
    p = msgspec.json.decode(found.body, type=answers.ViewOut).prediction
    assert p.latency_s > 0
    assert p.energy_j == pytest.approx(p.power_w * p.latency_s, rel=1e-6)
    assert p.interval.power_w[0] <= p.power_w <= p.interval.power_w[1]
    assert sum(module.power_w for module in p.modules) == pytest.approx(p.power_w, rel=1e-6)


def test_prices_are_those_of_the_command_line() -> None:
    free = predicted(CASE)
    assert free["cost"] is None
    rented = predicted(CASE | {"price_per_h": 3.6, "electricity_per_kwh": 0.36})
    assert rented["cost"] == pytest.approx(1e-3 * free["latency_s"] + 1e-7 * free["energy_j"])
    assert rented["currency"] == "USD"


def test_a_comparison_adds_up() -> None:
    found = json.loads(
        asked(
            "compare", {"configurations": [CASE, CASE | {"batch": 8}, CASE | {"gpu": "l40s"}]}
        ).body
    )
    assert len(found["against_first"]) == 2
    for pair in found["against_first"]:
        for what in ("latency_s", "total_energy_j", "total_power_w"):
            assert sum(pair["terms"][what].values()) == pytest.approx(
                pair["difference"][what], abs=1e-9
            )
    alone = json.loads(asked("compare", {"configurations": [CASE]}).body)
    assert "two to four" in alone["error"]


SERVED = {"model": "gpt2", "prompt": 64, "output": 16}


def test_a_plan_has_a_front_and_what_binds() -> None:
    found = json.loads(
        asked("plan", SERVED | {"gpus": ["h200"], "rate_per_s": 50, "price_per_h": 2}).body
    )
    assert found["best"] == found["plans"][0]
    assert found["pareto"], "the best plan is on the front"
    assert found["best"]["cost_per_million_tokens"] > 0
    assert found["best"]["binds"]
    never = json.loads(
        asked("plan", SERVED | {"gpus": ["h200"], "rate_per_s": 5, "ttft_s": 1e-6}).body
    )
    assert "cannot be served as asked" in never["error"]
    pictures = asked("plan", {"model": "resnet50", "gpus": ["h200"], "rate_per_s": 5})
    assert "a language model" in json.loads(pictures.body)["error"]


def test_a_draft_model_is_a_name_of_the_catalogue() -> None:
    question = {"model": "qwen3-8b", "gpu": "h200", "rate_per_s": 1.0, "seconds": 10}
    drafting = question | {"speculative_tokens": 3, "draft": "qwen3-0.6b"}
    told = json.loads(asked("simulate", drafting).body)["assumptions"]
    assert any("qwen3-0.6b drafts 3 tokens" in note for note in told)
    for path in ("/etc/passwd", "config.json"):
        refused = asked("simulate", drafting | {"draft": path})
        assert refused.status == 422
        assert f"unknown model '{path}'" in json.loads(refused.body)["error"]


def test_a_simulation_shows_power_and_queue_over_time() -> None:
    drawn = json.loads(
        asked(
            "simulate", SERVED | {"gpu": "h200", "rate_per_s": 20, "seconds": 10, "replicas": 3}
        ).body
    )
    shape = drawn["over_time"]
    assert {len(values) for values in shape.values()} == {len(shape["start_s"])}
    assert sum(shape["power_w"]) / len(shape["power_w"]) == pytest.approx(
        drawn["power_w"], rel=0.02
    )
    running = sum(shape["decodes"]) / len(shape["decodes"])
    assert running == pytest.approx(drawn["batch"]["mean"], rel=0.02)
    text = "arrival_s,prompt_tokens,output_tokens\n0.1,64,8\n0.2,32,4\n"
    read = json.loads(asked("simulate", {"model": "gpt2", "gpu": "h200", "trace": text}).body)
    assert read["requests"] == 2
    many = asked("simulate", SERVED | {"gpu": "h200", "rate_per_s": 1000, "seconds": 3600})
    assert "at most 20,000" in json.loads(many.body)["error"]
    for broken in ("", "a\rb,c", '"' + "x" * 200_000, "arrival_s,prompt_tokens,output_tokens\n"):
        assert asked("simulate", {"model": "gpt2", "gpu": "h200", "trace": broken}).status == 422, (
            broken[:20]
        )
    both = asked("simulate", {"model": "gpt2", "gpu": "h200", "trace": text, "rate_per_s": 1})
    assert "either a rate or a trace" in json.loads(both.body)["error"]


def test_a_training_job_costs_time_energy_and_money() -> None:
    job = {"model": "gpt2", "gpu": "h200", "gpus": 2, "tokens": 1e8, "seq": 512, "price_per_h": 2}
    found = json.loads(asked("train", job).body)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    assert found["energy_kwh"] > 0
    operators = asked("train", {"gpu": "h200", "file": {"name": "l", "content": LIST}})
    assert "a list of operators" in json.loads(operators.body)["error"]


def test_every_number_of_a_gpu_comes_with_its_source() -> None:
    found = json.loads(answer_request("gpu", b"h200").body)
    assert all(row["source"] for row in found["numbers"])
    assert "clocks.base_hz" in found["unknown"]


def test_the_catalogue_has_ranges_for_the_sliders() -> None:
    found = msgspec.json.decode(asked("catalogue", {}).body, type=answers.CatalogueOut)
    assert len(found.gpus) >= 18
    assert len(found.models) >= 44
    uses = [gpu.use for gpu in found.gpus]
    assert uses == sorted(uses, key=["data-centre", "workstation", "museum"].index), (
        "museum cards come last"
    )
    assert all(model.parameters > 1e6 for model in found.models)
    status = {gpu.name: gpu.coefficients for gpu in found.gpus}
    for name in ("h200", "l40s", "h100-sxm", "t4"):
        assert status[name] == str(bundle_for(hardware.load_gpu(name)).status)
    for gpu in found.gpus:
        assert 0 < gpu.min_clock_hz < gpu.max_clock_hz
        assert 0 < gpu.min_limit_w <= gpu.limit_w <= gpu.max_limit_w


def test_a_configuration_that_a_figure_does_not_draw_is_still_to_be_right() -> None:
    for wrong in ({"gpu": "none"}, {"data": "none"}, {"phase": "none"}):
        configurations = [
            {"gpu": "h200", "model": "gpt2"},
            {"gpu": "h200", "model": "gpt2"} | wrong,
        ]
        body = json.dumps({"configurations": configurations}).encode()
        assert answers.answer_request("figure", body).status == 422


@pytest.mark.parametrize("kind", ["plan", "simulate"])
def test_traffic_that_costs_too_much_is_refused_by_its_cost(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A valid plan ran into the time limit, which answered 503: try again. It would have again, and
    again.
    """
    monkeypatch.setattr(answers, "MOST_EVENTS", 300)
    where = {"gpus": ["h200"]} if kind == "plan" else {"gpu": "h200", "seconds": 100}
    found = asked(kind, {"model": "gpt2", "rate_per_s": 10, "prompt": 200, "output": 5, **where})
    assert found.status == 422
    assert "fewer requests" in json.loads(found.body)["error"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"serving_racks": 0, "training_racks": 0, "idle_racks": 0}, "1 to 40 together"),
        ({"serving_racks": 40}, "1 to 40 together"),
        ({"system": "../hall.yaml"}, "unknown node system"),
        ({"idle_racks": -1}, "idle_racks"),
        ({"day": "night"}, "shape of a day"),
        ({"around_s": 90000}, "around_s"),
        ({"rate_per_s": 10000}, "rate_per_s"),
    ],
)
def test_an_impossible_hall_is_refused_in_one_sentence(wrong: dict, said: str) -> None:
    """No name of a system is ever opened as a file."""
    answer = answers.answer_request("hall", msgspec.json.encode({"model": "llama3-8b"} | wrong))
    assert answer.status == 422
    assert said in answer.body.decode()
