"""What is inside one kernel adds up to the kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wattcast
from wattcast.core.errors import BadInput
from wattcast.predictor.kernel_view import view_kernel
from wattcast.predictor.prediction import Prediction
from wattcast.report.kernel_report import draw_kernel, kernel_to_plain, view_numbered_kernel
from wattcast.workload.readers.one_operator import graph_of_operator

CASES = [
    ("llama3-8b", {"batch": 8, "seq": 1024}),
    ("llama3-8b", {"batch": 8, "seq": 1024, "phase": "decode"}),
    ("gpt2", {"batch": 4, "seq": 256, "stack": "eager"}),
    ("resnet50", {"batch": 16}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{len(case[1])}")
def prediction(request: pytest.FixtureRequest) -> Prediction:
    model, options = request.param
    return wattcast.predict(model, gpu="h200", **options)


def test_phases_add_up_to_the_kernel(prediction: Prediction) -> None:
    """Except what cold caches and overlap change, which is part of the fixed phase."""
    detail = prediction.basis.detail
    for row in range(len(prediction.basis.timeline.calls)):
        view = view_kernel(prediction.basis, row)
        assert sum(phase.seconds for phase in view.phases) == pytest.approx(view.seconds, rel=1e-9)
        assert view.energy_j == pytest.approx(float(detail.kernel_j[row]), rel=1e-9)
        for phase in view.phases:
            assert sum(phase.part_w.values()) == pytest.approx(phase.power_w, rel=1e-9)
            longest_s = max(phase.resource_s.values())
            assert phase.resource_s[phase.bound] == longest_s
            assert longest_s == pytest.approx(phase.seconds, rel=1e-6)


def test_a_product_names_its_tile_its_waves_and_its_bytes() -> None:
    graph = graph_of_operator("linear", "4096x4096x4096")
    prediction = wattcast.predict(graph, gpu="h200", host_launch="0us")
    view = view_numbered_kernel(prediction, 1)
    assert view.chosen is not None
    sides = view.chosen.label.split()[1].split("x")
    tiles = (4096 / int(sides[0])) * (4096 / int(sides[1]))
    assert view.chosen.tiles == tiles
    assert view.chosen.waves == pytest.approx(tiles / 132)
    assert view.waves == -(-tiles // 132)
    assert view.last_wave_share == pytest.approx((tiles % 132) / 132)
    # two operands and a result of 4096 by 4096 in two bytes
    assert view.least_byte == {"dram read": 2 * 2 * 4096**2, "dram write": 2 * 4096**2}
    assert view.level_byte["dram read"] >= view.least_byte["dram read"]
    assert view.level_byte["l2"] > view.level_byte["dram read"]
    assert view.chosen.stages == 227 * 1024 // ((int(sides[0]) + int(sides[1])) * 128)
    likely = [view.chosen.likelihood or 0.0]
    likely += [tile.likelihood for tile in view.alternatives if tile.likelihood is not None]
    assert sum(likely) <= 1.0 + 1e-9
    main = next(phase for phase in view.phases if phase.name == "main")
    assert main.bound == "tensor_fp16"


def test_the_figure_and_the_json_say_the_same() -> None:
    prediction = wattcast.predict("llama3-8b", gpu="h200", batch=8, seq=1024)
    view = view_numbered_kernel(prediction, 3)
    plain = kernel_to_plain(view)
    figure = draw_kernel(view)
    lanes, watts = figure.axes
    assert {label.get_text() for label in lanes.get_yticklabels()} >= {
        phase["bound"] for phase in plain["phases"]
    }
    top_w = max(phase["power_w"] for phase in plain["phases"])
    assert watts.get_ylim()[1] >= top_w
    assert watts.get_ylabel() == "Power (W)"


def test_both_commands_look_into_a_kernel(call, tmp_path: Path) -> None:
    picture = tmp_path / "kernel.png"
    done = call(
        "lab",
        "kernel",
        "linear",
        "1024x1024x1024",
        "--gpu",
        "h200",
        "--plot",
        str(picture),
        "--json",
    )
    assert done.code == 0, done.err
    alone = json.loads(done.out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    total_s = sum(phase["latency_s"] for phase in alone["phases"])
    assert total_s == pytest.approx(alone["latency_s"], rel=1e-9)
    text = call("predict", "llama3-8b", "--gpu", "h200", "--seq", "512", "--kernel", "3")
    assert text.code == 0, text.err
    assert "Phases" in text.out
    assert "Bytes at every level" in text.out


def test_a_kernel_that_is_not_there_is_refused(call) -> None:
    done = call("predict", "llama3-8b", "--gpu", "h200", "--seq", "512", "--kernel", "99")
    assert done.code != 0
    assert "1 gather" in done.err
    with pytest.raises(BadInput, match="mxnxk"):
        graph_of_operator("linear", "4096x4096")
    with pytest.raises(BadInput, match="operator"):
        graph_of_operator("linaer", "4096x4096x1")
