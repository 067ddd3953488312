"""Two commands that answer the same question give the same number.

Where both do the same computation they agree to a billionth. Where they do not, the output says
why, and the test checks that sentence and a bound on the difference.
"""

from __future__ import annotations

import csv
import html
import json
import random
from pathlib import Path
from typing import Any

import pytest

import wattcast
from wattcast.control.serving_rehearsal import build_clock_levels
from wattcast.explore import explore
from wattcast.explore.fleet import SERVED_REQUESTS, assign_fleet, read_fleet
from wattcast.hardware import load_gpu
from wattcast.predictor.answer_lines import list_answers
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prices import BOARD_ENERGY
from wattcast.report.comparison_sides import compare
from wattcast.serving.governed_steps import govern_steps
from wattcast.serving.plan_options import INTERPOLATED
from wattcast.serving.service_demand import REQUESTS
from wattcast.serving.simulate_serving import WHOLE_TIME
from wattcast.training.train_job import SECTIONS
from wattcast.web.answers import answer_request
from wattcast.web.request_schema import PLAN_REQUESTS

EXACT = 1e-9
NUMBERS = ("latency_s", "power_w", "energy_j", "clock_hz", "effective_clock_hz", "busy_s")
ANSWERS = ("tokens_per_s", "energy_j_per_token", "total_power_w", "total_energy_j", "peak_power_w")
GPUS = ("h200", "h100-sxm", "a100-sxm-80gb", "l40s", "b200")
MODELS = ("llama3-8b", "qwen3-8b", "gpt2", "qwen3-30b-a3b", "mistral-7b")


def draw_cases(count: int) -> list[dict[str, Any]]:
    """Draw configurations of several models, cards, phases, caps and formats, always the same."""
    drawn = random.Random(58)
    cases = []
    for _ in range(count):
        phase = drawn.choice(("prefill", "decode", "generate", "train"))
        gpu = drawn.choice(GPUS)
        case: dict[str, Any] = {
            "model": "gpt2" if phase == "train" else drawn.choice(MODELS),
            "gpu": gpu,
            "phase": phase,
            "batch": drawn.choice((1, 4, 16)),
            "seq": drawn.choice((128, 512, 1000)),
        }
        if phase == "generate":
            case["tokens"] = drawn.choice((2, 24))
        if phase != "train":
            case["dtype"] = drawn.choice(("bf16", "bf16", "fp16"))
            if case["model"] != "gpt2":
                case["tp"] = drawn.choice((1, 1, 2))
        limit_w = float(load_gpu(gpu).power.limit_w)
        settings = ({}, {"power_limit": f"{0.7 * limit_w:.0f}W"}, {"clock": "1.2GHz"})
        cases.append(case | drawn.choice(settings))
    return cases


_SERVED = {"model": "llama3-8b", "gpu": "h200", "seq": 512}
# Options of engines, which every command has to pass on.
ENGINE_CASES: list[dict[str, Any]] = [
    _SERVED | {"phase": "decode", "batch": 16, "sampling": "top-p"},
    _SERVED | {"phase": "decode", "batch": 8, "lora": 16, "adapters": 4},
    _SERVED | {"phase": "generate", "batch": 4, "tokens": 8, "kv_dtype": "fp8"},
    _SERVED | {"phase": "prefill", "batch": 2, "quantization": "awq", "sampling": "top-k-top-p"},
]
CASES = [*draw_cases(12), *ENGINE_CASES]
CASE_NAMES = [f"{i}-{case['model']}-{case['gpu']}-{case['phase']}" for i, case in enumerate(CASES)]


def split_case(case: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return model, GPU and the options of a case."""
    options = {name: value for name, value in case.items() if name not in ("model", "gpu")}
    return case["model"], case["gpu"], options


def predict_case(case: dict[str, Any]) -> Prediction:
    model, gpu, options = split_case(case)
    return wattcast.predict(model, gpu, **options)


def write_options(options: dict[str, Any]) -> list[str]:
    """Return options as a user types them."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_python_and_the_command_line_predict_alike(case: dict[str, Any], call: Any) -> None:
    model, gpu, options = split_case(case)
    done = call("predict", model, "--gpu", gpu, *write_options(options), "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)["predictions"][0]
    alone = predict_case(case)
    for name in (*NUMBERS, *ANSWERS):
        assert shown[name] == pytest.approx(getattr(alone, name), rel=EXACT), name
    for name in ("latency_s", "power_w", "energy_j"):
        assert shown["interval"][name] == pytest.approx(
            getattr(alone.interval, name).tolist(), rel=EXACT
        )


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_the_page_and_the_command_line_predict_alike(case: dict[str, Any]) -> None:
    asked = dict(case)
    if "clock" in asked:
        asked["clock_hz"] = 1.2e9
        del asked["clock"]
    if "power_limit" in asked:
        asked["power_limit_w"] = float(asked.pop("power_limit").removesuffix("W"))
    answer = json.loads(answer_request("view", json.dumps(asked).encode()).body)
    alone = predict_case(case)
    for name in (*NUMBERS, *ANSWERS):
        assert answer["prediction"][name] == pytest.approx(getattr(alone, name), rel=EXACT), name
    phases = [(phase["name"], phase["power_w"]) for phase in answer["prediction"]["phases"]]
    assert phases == [(phase.name, pytest.approx(phase.power_w)) for phase in alone.phases]


def test_the_page_and_the_command_line_assume_alike() -> None:
    """With prices the page did not say that energy is that of the board, without a host."""
    asked = {"model": "gpt2", "gpu": "h200", "phase": "prefill", "seq": 200}
    prices = {"price_per_h": 2.0, "electricity_per_kwh": 0.1}
    answer = json.loads(answer_request("view", json.dumps(asked | prices).encode()).body)
    alone = wattcast.predict(
        "gpt2", "h200", phase="prefill", seq=200, price="2USD/h", electricity="0.1USD/kWh"
    )
    assert set(answer["prediction"]["assumptions"]) == set(alone.assumptions)
    assert BOARD_ENERGY in alone.assumptions


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_compare_and_predict_agree(case: dict[str, Any]) -> None:
    model, gpu, options = split_case(case)
    pairs = [f"{name}={value}" for name, value in options.items()]
    more = 2 * case["batch"]
    found = compare(",".join([f"{model}@{gpu}", *pairs]), f",batch={more}")
    for side, batch in ((found.a, case["batch"]), (found.b, more)):
        alone = predict_case(case | {"batch": batch})
        assert side.gpu_count == alone.gpu_count
        for name in ("latency_s", "power_w", "energy_j", "clock_hz", *ANSWERS[:4]):
            assert getattr(side, name) == pytest.approx(getattr(alone, name), rel=EXACT), name
    for name in ("latency_s", "total_energy_j", "total_power_w"):
        changed = getattr(found.b, name) - getattr(found.a, name)
        terms = sum(getattr(found, name).values())
        assert terms == pytest.approx(changed, rel=1e-6, abs=1e-9 * getattr(found.a, name))


EXPLORED = [  # each third by day: a sweep has as many ways through it as these
    pytest.param(case, id=name, marks=() if place % 3 == 0 else pytest.mark.slow)
    for place, (case, name) in enumerate(zip(CASES, CASE_NAMES, strict=True))
]


@pytest.mark.parametrize("case", EXPLORED)
def test_explore_and_predict_agree(case: dict[str, Any]) -> None:
    model, gpu, options = split_case(case)
    given = {name: value for name, value in options.items() if name != "batch"}
    found = explore(model, gpu, [f"batch={case['batch']},{2 * case['batch']}"], **given)
    for point in found.points:
        alone = predict_case(case | {"batch": point.names["batch"]})
        for name in ("latency_s", "power_w", "energy_j", "clock_hz", *ANSWERS[:4]):
            assert point.results[name] == pytest.approx(getattr(alone, name), rel=EXACT), name
        assert bool(point.results["capped"]) == bool(alone.capped)
        assert point.results["unit"] == "token"
        assert point.results["energy_j_per_unit"] == point.results["energy_j_per_token"]


@pytest.mark.parametrize("tp", [1, 4])
def test_designs_and_predict_agree(tp: int, call: Any) -> None:
    """Designs of four GPUs once showed the watts of one of them as those of the run."""
    options = {"phase": "decode", "batch": 8, "seq": 1024, "tp": tp}
    words = ["--gpu", "h200", *write_options(options), "--vary", "clock=1.2GHz,1.98GHz"]
    done = call("explore", "designs", "llama3-70b", *words, "--json")
    assert done.code == 0, done.err
    fastest = json.loads(done.out)["best"]["latency_s"]
    alone = wattcast.predict("llama3-70b", "h200", clock="1.98GHz", force=True, **options)
    assert json.loads(done.out)["gpu_count"] == alone.gpu_count == tp
    for name in (*NUMBERS, "total_power_w", "total_energy_j"):
        assert fastest[name] == pytest.approx(getattr(alone, name), rel=EXACT), name
    text = call("explore", "designs", "llama3-70b", *words).out
    assert ("total power" in text and "4 GPUs each" in text) is (tp == 4)


REPORTED = [
    pytest.param(case, id=name, marks=() if place < 1 else pytest.mark.slow)  # a report is drawn
    for place, (case, name) in enumerate(zip(CASES[:6], CASE_NAMES[:6], strict=True))
]


@pytest.mark.parametrize("case", REPORTED)
def test_a_report_says_what_predict_says(case: dict[str, Any], call: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, gpu, options = split_case(case)
    page = tmp_path / "page.html"
    done = call("report", model, "--gpu", gpu, *write_options(options), "--out", str(page))
    assert done.code == 0, done.err
    text = html.unescape(page.read_text(encoding="utf-8"))
    for line in list_answers(predict_case(case)):
        assert line.value in text, line.label
        assert line.remark in text, line.label


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_python_and_the_command_line_predict_an_engine_alike(engine: str, call: Any) -> None:
    """The engine decides an answer, and is the same engine in both."""
    options = {"phase": "decode", "batch": 8, "seq": 512}
    words = ["--gpu", "h200", *write_options(options), "--engine", engine]
    done = call("predict", "llama3-8b", *words, "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)["predictions"][0]
    alone = wattcast.predict("llama3-8b", "h200", engine=engine, **options)
    usual = wattcast.predict("llama3-8b", "h200", **options)
    for name in NUMBERS:
        assert shown[name] == pytest.approx(getattr(alone, name), rel=EXACT), name
    assert alone.latency_s != pytest.approx(usual.latency_s, rel=1e-3)


TRAINED = (
    ("llama3-8b", "h200", {"batch": 2, "seq": 1024, "stack": "eager"}, 0.01),
    ("llama3-8b", "h200", {"batch": 1, "seq": 8192, "stack": "eager"}, 0.01),
    ("gpt2", "a100-sxm-80gb", {"batch": 8, "seq": 512, "stack": "compiled"}, 0.01),
    ("qwen3-8b", "h100-sxm", {"batch": 1, "seq": 2048, "stack": "compiled"}, 0.01),
    ("gpt2", "h200", {"batch": 8, "seq": 512, "stack": "eager"}, 0.04),
)


@pytest.mark.parametrize(("model", "gpu", "options", "within"), TRAINED)
def test_train_and_predict_of_a_step_agree(
    model: str, gpu: str, options: dict[str, Any], within: float
) -> None:
    """They are two computations: ``train`` adds up sections and says how far that may be off."""
    alone = wattcast.predict(model, gpu, phase="train", force=True, **options)
    job = wattcast.train(
        model,
        gpu,
        gpus=1,
        seq=options["seq"],
        global_batch=options["batch"],
        micro_batch=options["batch"],
        recompute="none",
        master_weights=False,
        gradient_byte=2,
        stack=options["stack"],
        force=True,
    )
    assert job.step_s == pytest.approx(alone.latency_s, rel=within)
    assert float(job.step.power_w) == pytest.approx(alone.power_w, rel=within)
    assert SECTIONS in job.assumptions
    assert f"within {0.01:.0%} where the GPU decides" in SECTIONS
    assert "4% where the host does" in SECTIONS


JOB = {"rate": 6.0, "prompt": 512, "output": 128, "ttft": "p99:500ms"}
ENGINE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"sampling": "top-p"},
    {"lora": 16, "adapters": 4},
    {"kv_dtype": "fp8"},
)
PLANNED = (
    *(
        pytest.param("llama3-8b", "h200", JOB | options, marks=pytest.mark.slow if place else ())
        for place, options in enumerate(ENGINE_OPTIONS)
    ),
    ("llama3-8b", "h200", {"rate": 6.0, "prompt": 512, "output": 128, "ttft": "p99:500ms"}),
    ("llama3-8b", "l40s", {"rate": 1.0, "prompt": 300, "output": 64, "tpot": "p90:60ms"}),
    ("qwen3-8b", "h100-sxm", {"rate": 30.0, "prompt": 1000, "output": 200, "ttft": "1s"}),
)


@pytest.mark.parametrize(("model", "gpu", "asked"), PLANNED)
def test_plan_and_simulate_agree(model: str, gpu: str, asked: dict[str, Any]) -> None:
    """One replica of the best plan, simulated at its share of the rate, is the plan's own run."""
    best = wattcast.plan(model, gpu, requests=200, tp="1", **asked).best
    row = best.make_row()
    assert row["gpus"] == row["replicas"]
    bounds = ("rate", "ttft", "tpot")
    shared = {name: value for name, value in asked.items() if name not in bounds}
    run = wattcast.simulate(
        model,
        gpu,
        rate=asked["rate"] / row["replicas"],
        requests=len(best.result.trace),
        **shared,
        max_seqs=row["max_seqs"],
        max_batched_tokens=row["max_batched_tokens"],
        power_limit=row["power_limit_w"],
    )
    found = run.summarise()
    for name in ("ttft_s", "tpot_s"):
        for quantile in ("p50", "p90", "p99", "mean"):
            assert row[name][quantile] == pytest.approx(found[name][quantile], rel=EXACT)
    assert row["power_w"] == pytest.approx(found["power_w"] * row["replicas"], rel=EXACT)
    assert row["energy_j_per_token"] == pytest.approx(found["energy_j_per_token"], rel=EXACT)
    # a plan names the rate that is asked for; a run that ends has it while traffic lasts
    assert WHOLE_TIME in found["assumptions"]
    steady = found["steady"]
    assert not steady["queue_grows"]
    served = steady["output_tokens_per_s"] * row["replicas"]
    assert row["output_tokens_per_s"] == pytest.approx(served, rel=0.15)


def test_the_page_and_the_command_line_simulate_alike(call: Any) -> None:
    shared = {"model": "llama3-8b", "gpu": "h200", "prompt": 300, "output": 40}
    body = json.dumps(shared | {"rate_per_s": 5.0, "seconds": 20.0}).encode()
    page = json.loads(answer_request("simulate", body).body)
    argv = ("--rate", "5/s", "--seconds", "20", "--prompt", "300", "--output", "40", "--json")
    shell = json.loads(call("simulate", "llama3-8b", "--gpu", "h200", *argv).out)
    for name in ("requests_per_s", "output_tokens_per_s", "power_w", "energy_j", "length_s"):
        assert page[name] == pytest.approx(shell[name], rel=EXACT), name
    for name in ("ttft_s", "tpot_s", "latency_s"):
        assert page[name] == pytest.approx(shell[name], rel=EXACT), name
    assert page["steady"] == shell["steady"]


def test_the_page_and_the_command_line_plan_alike(call: Any) -> None:
    """The page simulates fewer requests for each answer, and says how many."""
    shared = {"model": "llama3-8b", "prompt": 300, "output": 40, "ttft_s": 0.5}
    asked = shared | {"gpus": ["h200"], "rate_per_s": 5.0, "percentile": 90.0}
    page = json.loads(answer_request("plan", json.dumps(asked).encode()).body)
    lengths: dict[str, Any] = {"rate": "5/s", "prompt": 300, "output": 40, "ttft": "p90:500ms"}
    library = wattcast.plan("llama3-8b", "h200", requests=PLAN_REQUESTS, **lengths).to_dict()
    shell = json.loads(
        call("plan", "llama3-8b", "--gpu", "h200", *write_options(lengths), "--json").out
    )
    for name in ("gpus", "replicas", "power_w", "energy_j_per_token", "output_tokens_per_s"):
        exact = page["plans"][0][name]
        assert exact == pytest.approx(library["plans"][0][name], rel=EXACT), name
        assert exact == pytest.approx(shell["plans"][0][name], rel=0.1), name
    assert page["plans"][0]["gpus"] == shell["plans"][0]["gpus"]
    for found, count in ((page, PLAN_REQUESTS), (shell, REQUESTS)):
        said = f"{count} requests simulated for each answer"
        assert any(said in note for note in found["assumptions"])


def test_the_page_and_the_command_line_train_alike(call: Any) -> None:
    asked = {"model": "llama3-8b", "gpu": "h200", "gpus": 8, "tokens": 1e9}
    page = json.loads(answer_request("train", json.dumps(asked).encode()).body)
    argv = ("--gpu", "h200", "--gpus", "8", "--tokens", "1B", "--json")
    shell = json.loads(call("train", "llama3-8b", *argv).out)
    shared = [name for name in shell if isinstance(shell[name], float) and name in page]
    assert len(shared) >= 3
    for name in shared:
        assert page[name] == pytest.approx(shell[name], rel=EXACT), name


ALONE: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("llama3-8b", "h200", 512, 128, {}),
    ("qwen3-32b", "h200", 2048, 64, {}),
    ("qwen3-8b", "l40s", 512, 64, {}),
    ("llama3-8b", "a100-sxm-80gb", 1024, 64, {}),
    ("qwen3-30b-a3b", "h200", 512, 64, {}),
    ("llama3-8b", "h200", 512, 64, {"sampling": "top-p"}),
    ("llama3-8b", "h200", 512, 64, {"lora": 16, "adapters": 1}),
    ("llama3-8b", "h200", 512, 64, {"engine": "sglang"}),
)


@pytest.mark.parametrize(("model", "gpu", "prompt", "output", "options"), ALONE)
def test_predict_and_simulate_of_one_request_at_a_time_agree(
    model: str, gpu: str, prompt: int, output: int, options: dict[str, Any]
) -> None:
    """A request alone takes what ``predict`` says of its prefill and of its decode steps.

    They are two computations. ``simulate`` lets the first step after a pause run at the top clock,
    and both say so; its host takes in requests and hands out tokens.
    """
    shared: dict[str, Any] = {"rate": 0.02, "requests": 5, "arrivals": "fixed"}
    run = wattcast.simulate(model, gpu, prompt=prompt, output=output, **shared, **options)
    found = run.summarise()
    prefill = wattcast.predict(model, gpu, phase="prefill", seq=prompt, **options)
    short_s = min(prefill.latency_s, 0.09)
    burst = wattcast.predict(model, gpu, phase="prefill", seq=prompt, duration=short_s, **options)
    decode = wattcast.predict(model, gpu, phase="decode", seq=prompt + output // 2, **options)
    assert found["tpot_s"]["p50"] == pytest.approx(decode.latency_s, rel=0.05)
    first_s = found["ttft_s"]["p50"]
    shortest_s = min(burst.latency_s, prefill.latency_s)
    assert 0.95 * shortest_s <= first_s <= 1.1 * prefill.latency_s + 3e-3
    assert any("sustained" in note for note in prefill.assumptions)
    assert any(note.startswith("host: ") for note in prefill.assumptions)
    assert any("top clock until the governor reacts" in note for note in found["assumptions"])
    assert any(note.startswith("host times: ") for note in found["assumptions"])


def test_one_user_is_one_request_at_a_time(call: Any) -> None:
    """A closed loop of one user takes what ``predict`` says, in Python and on the command line."""
    lengths = {"prompt": 512, "output": 64}
    loop = {"concurrency": 1, "requests": 6}
    run = wattcast.simulate("llama3-8b", "h200", **lengths, **loop).summarise()
    decode = wattcast.predict("llama3-8b", "h200", phase="decode", seq=512 + 32)
    assert run["tpot_s"]["p50"] == pytest.approx(decode.latency_s, rel=0.05)
    words = [*write_options(lengths), *write_options(loop)]
    shell = json.loads(call("simulate", "llama3-8b", "--gpu", "h200", *words, "--json").out)
    for name in ("requests_per_s", "power_w", "energy_j", "length_s"):
        assert shell[name] == pytest.approx(run[name], rel=EXACT), name
    assert shell["tpot_s"] == pytest.approx(run["tpot_s"], rel=EXACT)


POWER_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("predict", ("--phase", "generate", "--batch", "4", "--seq", "1024", "--tokens", "64")),
    ("simulate", ("--rate", "4/s", "--seconds", "20", "--prompt", "512", "--output", "64")),
    ("simulate", ("--concurrency", "4", "--requests", "20", "--prompt", "512", "--output", "64")),
)


@pytest.mark.parametrize(("verb", "words"), POWER_FILES)
def test_power_over_time_adds_up_to_the_answer(
    verb: str, words: tuple[str, ...], call: Any, tmp_path: Path
) -> None:
    """The file of ``--power-out`` has the energy and the length that the command answers."""
    path = tmp_path / "power.csv"
    argv = (verb, "llama3-8b", "--gpu", "h200", *words, "--power-out", str(path), "--grid", "50ms")
    done = call(*argv, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    if verb == "predict":
        (answer,) = answer["predictions"]
        answer["length_s"] = answer["latency_s"]
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert sum(float(row["energy_j"]) for row in rows) == pytest.approx(answer["energy_j"])
    assert sum(float(row["duration_s"]) for row in rows) == pytest.approx(answer["length_s"])


@pytest.mark.parametrize(("bound", "is_top"), [("tpot: 'p90:6.7ms'", True), ("ttft: '1s'", False)])
def test_a_fleet_and_a_plan_serve_alike(bound: str, is_top: bool, tmp_path: Path) -> None:
    """An engine of a fleet is that of a plan: ``simulate`` at its share of the rate says the same.

    At lower clocks steps are interpolated between tabulated ones, which both say.
    """
    pytest.importorskip("scipy")
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "gpus: {h200: 4}\n"
        "workloads:\n"
        f"  - {{workload: llama3-8b, rate: 8/s, prompt: 512, output: 128, {bound}, tp: [1]}}\n"
    )
    assignment = assign_fleet(read_fleet(path), "gpus")
    (row,) = assignment.rows
    name, _, text = bound.partition(": ")
    shared: dict[str, Any] = {"prompt": 512, "output": 128, "requests": SERVED_REQUESTS}
    planned = wattcast.plan(
        "llama3-8b", "h200", rate="8/s", tp="1", **shared, **{name: text.strip("'")}
    )
    assert row["gpus"] == planned.best.gpus
    assert row["unit"] == "request"
    assert row["units_per_s"] == pytest.approx(8.0, rel=1e-6)
    assert (row["clock_hz"] == 1.98e9) is is_top
    at_clock = {} if is_top else {"clock": row["clock_hz"]}
    run = wattcast.simulate("llama3-8b", "h200", rate=8.0 / row["gpus"], **shared, **at_clock)
    figures = run.headline
    within = EXACT if is_top else 0.02
    for quantile in ("p50", "p99"):
        tpot_s = figures[f"tpot_s.{quantile}"]
        assert row[f"tpot_{quantile}_s"] == pytest.approx(tpot_s, rel=within)
    assert row["power_w_per_gpu"] == pytest.approx(figures["power_w"], rel=within)
    ttft_within = EXACT if is_top else 0.06
    assert row["ttft_p99_s"] == pytest.approx(figures["ttft_s.p99"], rel=ttft_within)
    assert INTERPOLATED in assignment.notes
    assert any(f"{SERVED_REQUESTS} requests" in note for note in assignment.notes)


@pytest.mark.parametrize(("model", "gpu"), [("llama3-8b", "h200"), ("mistral-7b", "l40s")])
def test_the_forecast_of_manage_serve_and_predict_agree(model: str, gpu: str) -> None:
    """A keeper of clocks takes steps from the table of a plan, ``predict`` a step by itself.

    Between tabulated contexts and clocks they are interpolated, which plans and fleets say.
    """
    levels = build_clock_levels(model, load_gpu(gpu))
    for costs in (levels[0], levels[-1]):
        for batch, context in ((1, 256), (8, 2000)):
            cost = costs.decode_cost(batch, batch, float(context))
            step_s = govern_steps(costs, cost, 1, 0.0)[0]
            clock_hz = float(costs.clock_hz[0])
            alone = wattcast.predict(
                model, gpu, phase="decode", batch=batch, seq=context, clock=clock_hz
            )
            assert step_s == pytest.approx(alone.latency_s, rel=0.06)


def test_a_hall_and_simulate_agree(call: Any, tmp_path: Path) -> None:
    """The busiest hour of a hall's replica is a run of ``simulate`` at its rate."""
    path = tmp_path / "hall.yaml"
    path.write_text(
        "title: one node\nhours: 1\ngroups:\n"
        "  - {name: chat, system: dgx-h200, racks: 1, nodes_per_rack: 1, racks_per_row: 1,\n"
        "     serve: {model: llama3-8b, rate: 2/s, prompt: 300, output: 50, day: flat}}\n"
    )
    done = call("hall", str(path), "--span", "10min", "--json")
    assert done.code == 0, done.err
    busiest = json.loads(done.out)["groups"][0]["busiest"]
    run = wattcast.simulate(
        "llama3-8b", "h200", rate=busiest["served_per_s"], prompt=300, output=50, requests=1000
    )
    figures = run.summarise()
    # other arrivals were drawn at the same rate
    for name in ("ttft", "tpot"):
        middle_s = figures[f"{name}_s"]["p50"]
        assert busiest[f"{name}_p50_s"] == pytest.approx(middle_s, rel=0.05), name
    assert busiest["gpu_w"] == pytest.approx(figures["steady"]["power_w"], rel=0.05)


def test_text_and_json_of_predict_agree(call: Any) -> None:
    """The first screen is made of the numbers of the JSON."""
    argv = ("predict", "llama3-70b", "--gpu", "h100-sxm", "--tp", "8", "--phase", "decode")
    shown = json.loads(call(*argv, "--json").out)["predictions"][0]
    alone = wattcast.predict("llama3-70b", "h100-sxm", tp=8, phase="decode")
    text = call(*argv).out
    for line in list_answers(alone):
        assert line.value in text
    assert shown["total_power_w"] == pytest.approx(8 * shown["power_w"], rel=EXACT)
