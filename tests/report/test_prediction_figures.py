"""Figures speak with one voice, and say what the numbers say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput, UnknownName
from wattcast.core.strict_files import encode_json
from wattcast.lab.validate.ledger_figures import HELD_OUT_QUANTITIES, draw_held_out
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.measured_run import MeasuredRun
from wattcast.measure.run_figure import draw_run_power
from wattcast.measure.window_summary import summarise_window
from wattcast.predictor import api, pipeline
from wattcast.predictor.pipeline import analyse_graph
from wattcast.predictor.prediction_json import predictions_to_output
from wattcast.report import figure_style as house
from wattcast.report import prediction_figures
from wattcast.report.configuration_view import ConfigurationView, view_configuration
from wattcast.report.prediction_figures import (
    FIGURES,
    draw_clock_curves,
    draw_figure,
    label_views,
)
from wattcast.workload.model_options import ModelOptions


@pytest.fixture(scope="module")
def seen() -> ConfigurationView:
    return view_configuration(
        "gpt2", api.find_gpu("h200"), ModelOptions(batch=4, seq=256), power_limit="500W"
    )


def test_a_look_analyses_its_workload_once(
    seen: ConfigurationView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction, the course over time and the clock curve share one timeline; it used to be
    made twice.
    """
    times = []
    monkeypatch.setattr(
        pipeline, "analyse_graph", lambda *given: times.append(given) or analyse_graph(*given)
    )
    settings = {
        "clock": "1.2GHz",
        "power_limit": "500W",
        "host_launch": "3us",
        "temperature": "70C",
        "data": "zeros",
    }
    again = view_configuration("gpt2", seen.gpu, ModelOptions(batch=4, seq=256), **settings)
    assert again.trace.duration_s == pytest.approx(again.prediction.latency_s)
    assert again.clocks["latency_s"].size > 1
    assert len(times) == 1
    alone = api.predict("gpt2", "h200", batch=4, seq=256, **settings)
    assert predictions_to_output([again.prediction]) == predictions_to_output([alone])


@pytest.mark.parametrize(
    "figure",
    ["clocks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("breakdown", "timeline"))],
)
def test_a_figure_draws_the_prediction_that_is_printed(
    figure: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``predict --factor compute=0.7 --plot`` printed 0.200 s and drew 0.233 s: figures left
    factors out.
    """
    drawn: list[ConfigurationView] = []
    draw = prediction_figures.draw_figure
    monkeypatch.setattr(
        prediction_figures, "draw_figure", lambda name, seen: drawn.append(seen) or draw(name, seen)
    )
    words = (
        "predict",
        "llama3-8b",
        "--gpu",
        "h200",
        "--batch",
        "8",
        "--seq",
        "1024",
        "--factor",
        "compute=0.7",
    )
    plain = json.loads(call(*words, "--card", "this", "--json").out)["predictions"][0]
    done = call(
        *words, "--card", "this", "--json", "--plot", str(tmp_path / "x.svg"), "--figure", figure
    )
    assert json.loads(done.out)["predictions"][0] == plain
    assert plain["latency_s"] != pytest.approx(
        float(api.predict("llama3-8b", "h200", batch=8, seq=1024).latency_s)
    )
    (seen,) = drawn
    assert json.loads(encode_json(predictions_to_output([seen.prediction])))["predictions"] == [
        plain
    ]
    assert seen.trace.duration_s == pytest.approx(plain["latency_s"], rel=1e-9)
    assert seen.trace.energy_j == pytest.approx(plain["energy_j"], rel=1e-9)
    settled = np.interp(plain["clock_hz"], seen.clocks["asked_hz"], seen.clocks["latency_s"])
    assert settled == pytest.approx(plain["latency_s"], rel=0.01)


def test_a_figure_drawn_twice_is_the_same_file(seen: ConfigurationView) -> None:
    assert set(FIGURES) == {"breakdown", "timeline", "roofline", "clocks"}
    data = house.encode_figure(draw_figure("clocks", seen), "svg")
    assert data.startswith(b"<?xml")
    assert house.encode_figure(draw_figure("clocks", seen), "svg") == data


@pytest.mark.parametrize("ending", house.ENDINGS)
def test_every_form_of_file(seen: ConfigurationView, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{ending}"
    house.save_figure(draw_figure("breakdown", seen), path)
    assert path.read_bytes().startswith(
        {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    )


def test_dollar_signs_in_names_are_not_mathematics(seen: ConfigurationView) -> None:
    """A name with an odd command between dollar signs used to end the drawing with a parser's
    error.
    """
    named = replace(seen.prediction, name=r"$\frac{$ and $x^$")
    assert house.encode_figure(prediction_figures.draw_breakdown(named), "png")


def test_a_figure_nobody_knows_is_named(seen: ConfigurationView) -> None:
    with pytest.raises(UnknownName, match="timeline"):
        draw_figure("timelin", seen)
    with pytest.raises(BadInput, match=r"\.png, \.svg or \.pdf"):
        house.check_figure_path(Path("figure.gif"))


def test_modules_have_one_colour_in_all_figures_and_no_line_looks_like_one(
    seen: ConfigurationView,
) -> None:
    bars = draw_figure("breakdown", seen).axes[0]
    stack = draw_figure("timeline", seen).axes[0]
    in_bars = {c.get_label(): _hex(c.patches[0].get_facecolor()) for c in bars.containers}
    in_stack = {
        p.get_label(): _hex(p.get_facecolor())
        for p in stack.patches
        if p.get_label() in house.MODULE_COLOURS
    }
    assert len(in_stack) >= 5
    assert in_bars.items() >= in_stack.items()
    assert all(house.MODULE_COLOURS[name] == colour for name, colour in in_bars.items())
    assert not set(house.SERIES_COLOURS) & set(house.MODULE_COLOURS.values())


def test_colours_differ_for_the_colour_blind() -> None:
    """Neighbours in the stack must differ in lightness or hue also to those who see no red or no
    green.
    """
    for matrix in DEFICIENT.values():
        seen_as = [matrix @ _linear(c) for c in house.MODULE_COLOURS.values()]
        apart = [np.linalg.norm(a - b) for i, a in enumerate(seen_as) for b in seen_as[:i]]
        assert min(apart) > 0.02


def test_breakdown_bars_add_up_to_the_power(seen: ConfigurationView) -> None:
    axes = draw_figure("breakdown", seen).axes[0]
    first = sum(container.patches[0].get_width() for container in axes.containers)
    assert_allclose(first, float(seen.prediction.power_w), rtol=1e-9)


def test_clock_curve_meets_the_prediction_where_it_settles(seen: ConfigurationView) -> None:
    for column in ("latency_s", "power_w"):
        there = np.interp(
            float(seen.prediction.clock_hz), seen.clocks["clock_hz"], seen.clocks[column]
        )
        assert_allclose(there, float(getattr(seen.prediction, column)), rtol=0.02)
    assert (seen.clocks["power_w"] <= 500.0 * (1 + 1e-4)).all()


@pytest.mark.parametrize("limit", ["700W", "300W", "200W"])
def test_clock_curve_is_what_predict_says_at_each_clock(limit: str) -> None:
    options, gpu = ModelOptions(batch=8, seq=512), api.find_gpu("h200")
    curve = view_configuration("llama3-8b", gpu, options, power_limit=limit, clock="1GHz").clocks
    p = api.predict("llama3-8b", gpu, clock=curve["asked_hz"], power_limit=limit, batch=8, seq=512)
    for column in ("clock_hz", "latency_s", "power_w", "energy_j"):
        assert_allclose(curve[column], getattr(p, column), rtol=2e-5)


def test_clock_curves_of_two_gpus_are_labelled_by_gpu(seen: ConfigurationView) -> None:
    other = view_configuration("gpt2", api.find_gpu("h100-sxm"), ModelOptions(batch=4, seq=256))
    shown = [
        text.get_text()
        for text in draw_clock_curves([seen, other]).axes[-1].get_legend().get_texts()
    ]
    assert shown == ["h200", "h100-sxm"]
    name = seen.prediction.name
    assert label_views([seen, seen]) == [f"1: {name} on h200", f"2: {name} on h200"]
    assert label_views([seen]) == [f"{name} on h200"]


def test_roofline_marks_lie_under_the_roof(seen: ConfigurationView) -> None:
    """Of kernels that stream from DRAM; small ones live in L2 and may pass DRAM's slope."""
    big = view_configuration("llama3-8b", api.find_gpu("h200"), ModelOptions(batch=8, seq=1024))
    axes = draw_figure("roofline", big).axes[0]
    roof = axes.lines[0]
    for marks in axes.collections:
        for x, y in marks.get_offsets():
            assert y <= 1.35 * np.interp(x, roof.get_xdata(), roof.get_ydata())


@pytest.mark.parametrize("quantity", HELD_OUT_QUANTITIES)
def test_held_out_rows_show_their_error(quantity: str) -> None:
    titles = [axes.get_title() for axes in draw_held_out(quantity).axes]
    assert any(title.startswith("gemm: ") and "%" in title for title in titles)
    with pytest.raises(UnknownName):
        draw_held_out("colour")


def test_measured_is_dots_and_predicted_a_line() -> None:
    rows = np.full((201, len(COLUMNS)), np.nan)
    time_s = np.arange(201) * 0.01
    for name, values in (
        ("time_s", time_s),
        ("energy_j", 60.0 * np.floor(time_s / 0.1)),
        ("sm_clock_hz", 1.5e9),
    ):
        rows[:, COLUMNS.index(name)] = values
    samples, card = EnergySamples(rows), DeviceIdentity("a card")
    run = MeasuredRun(
        ("a", "run"), 0, summarise_window("a run", samples, 0.2, 1.8), card, samples, 0.2
    )
    level = {
        "name": "x",
        "gpu": "y",
        "power_w": 590.0,
        "interval": {"power_w": (550.0, 640.0)},
        "clock_hz": 1.5e9,
    }
    measured, _, line = draw_run_power(run, level).axes[0].lines
    assert (measured.get_marker(), measured.get_linestyle()) == ("o", "None")
    assert_allclose(measured.get_ydata(), 600.0, rtol=0.2)
    assert_allclose(line.get_ydata(), 590.0)


def test_a_front_of_points() -> None:
    points = {"a": (1.0, 5.0), "b": (2.0, 2.0), "c": (3.0, 3.0)}
    axes = prediction_figures.draw_pareto(points, "x (s)", "y (J)", "t", "s").axes[0]
    assert axes.lines[0].get_xdata().tolist() == [1.0, 2.0]


def test_plot_on_commands(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "wattcast.lab.validate.ledger.build_ledger", lambda *given, **options: []
    )  # its figure is asked for
    fleet = tmp_path / "site.yaml"
    fleet.write_text(
        "gpus: {h200: 4}\npower: 12 kW\nworkloads:\n  - {workload: gpt2, rate: 20/s, options: {batch: 4, seq: 128}}\n"
    )
    plan = ["--rate", "2/s", "--prompt", "100", "--output", "20", "--gpu", "h200", "--tp", "1"]
    commands = {
        "sweep": [
            "explore",
            "sweep",
            "gpt2",
            "--gpu",
            "h200",
            "--seq",
            "128",
            "--vary",
            "batch=1,2",
        ],
        "fleet": ["explore", "fleet", str(fleet)],
        "plan": ["plan", "gpt2", *plan],
        "validate": ["lab", "validate", "--quantity", "power"],
    }
    for name, argv in commands.items():
        path = tmp_path / f"{name}.svg"
        done = call(*argv, "--plot", str(path))
        assert done.code == 0, (name, done.err)
        assert path.read_bytes().startswith(b"<?xml"), name
    bad = call("predict", "gpt2", "--gpu", "h200", "--plot", str(tmp_path / "x.gif"))
    assert bad.code == 2
    assert ".png, .svg or .pdf" in bad.err


def _hex(colour: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * c):02X}" for c in colour[:3])


def _linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# Machado, Oliveira and Fernandes (2009), severity 1.0, linear RGB
DEFICIENT = {
    "no red": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}


def test_a_simulated_trace_is_drawn_where_asked(call, tmp_path: Path) -> None:
    from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

    columns = [counter.column for counter in dialect_counters(SimulatorDialect.GPUWATTCH)]
    rows = ["".join(f"{(7 * i + 3 * k) % 100:f}," for k in range(len(columns))) for i in range(12)]
    (tmp_path / "m.log").write_text("\n".join([",".join(columns), *rows]) + "\n")
    chip = Path(__file__).parents[2] / "examples" / "made_up_chip"
    config = chip / "architecture.xml"
    energies = chip / "energies.yaml"
    argv = [
        "lab",
        "power-trace",
        str(tmp_path / "m.log"),
        "--config",
        str(config),
        "--energies",
        str(energies),
    ]
    argv += [
        "--out",
        str(tmp_path / "out"),
        "--sample-cycles",
        "500",
        "--no-parquet",
        "--no-figure",
    ]
    done = call(*argv, "--plot", str(tmp_path / "parts.svg"))
    assert done.code == 0, done.err
    assert (tmp_path / "parts.svg").read_bytes().startswith(b"<?xml")
