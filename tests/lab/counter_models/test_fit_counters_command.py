"""``wattcast lab fit counters``: JSON, the saved model, figures, and one-paragraph errors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from made_tables import activity_of, made_table
from numpy.testing import assert_allclose

from wattcast.cli.command_output import Environment
from wattcast.cli.main import build_command
from wattcast.core.errors import BadInput, UnknownName
from wattcast.core.strict_files import encode_json
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models import counter_figures, counter_fit
from wattcast.lab.counter_models.counter_fit import CounterFit, fit_counters
from wattcast.lab.counter_models.counter_fit_report import counter_fit_to_plain, make_saved_model
from wattcast.lab.counter_models.launch_power import (
    CounterBook,
    KernelLaunch,
    LaunchKey,
    estimate_launch_power,
)
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.power import power_model
from wattcast.power.activity import Activity, ActivitySource

MAP = """
benchmark: work
power: {column: watts, unit: W}
clock: {column: core, unit: MHz}
memory_clock: {column: memory, unit: MHz}
default: {clock: 1000 MHz, memory_clock: 2000 MHz}
events:
  int_busy_cycle: {column: int, rate: true}
  l2_busy_cycle: {column: l2, rate: true}
  shared_busy_cycle: {column: shared, rate: true}
  dram_busy_cycle: {column: dram, rate: true}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("counters")
    table = made_table(0.01, floored=True)
    rows = ["work,watts,core,memory,int,l2,shared,dram"]
    for i in range(table.rows):
        name = table.benchmark_names[table.benchmark[i]]
        cells = [
            table.power_w[i],
            table.clock_hz[i] / 1e6,
            table.memory_clock_hz[i] / 1e6,
            *table.occurrence[i],
        ]
        rows.append(",".join([name, *(f"{float(cell)!r}" for cell in cells)]))
    (folder / "t.csv").write_text("\n".join(rows) + "\n")
    (folder / "map.yaml").write_text(MAP)
    return folder / "t.csv", folder / "map.yaml"


def run(*argv: object) -> tuple[str, str]:
    """The command as ``wattcast lab fit counters`` will call it; errors pass through, as they do to
    ``main``.
    """
    env = Environment(io.StringIO(), io.StringIO())
    build_command("lab fit counters").main([str(a) for a in argv], standalone_mode=False, obj=env)
    return env.stdout.getvalue(), env.stderr.getvalue()


@pytest.fixture(scope="module")
def command_run(files: tuple[Path, Path]) -> tuple[tuple[str, str], CounterFit]:
    """What the command prints, and the fit that it made; its figures lie in ``figures`` beside the
    table.
    """
    fits: list[CounterFit] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            counter_fit,
            "fit_counters",
            lambda *given: fits.append(fit_counters(*given)) or fits[-1],
        )
        said = run(
            files[0],
            "--columns",
            files[1],
            "--folds",
            3,
            "--json",
            "--figures",
            files[0].parent / "figures",
        )
    return said, fits[0]


@pytest.fixture(scope="module")
def printed(command_run: tuple[tuple[str, str], CounterFit]) -> tuple[str, str]:
    return command_run[0]


@pytest.fixture(scope="module")
def result(command_run: tuple[tuple[str, str], CounterFit]) -> CounterFit:
    return command_run[1]


def test_json_holds_the_error_of_each_kind(printed: tuple[str, str]) -> None:
    out, err = printed
    said = json.loads(out)
    assert [m["kind"] for m in said["models"]] == [str(m) for m in CounterModelKind]
    errors = {m["kind"]: m["held_out"]["benchmark"]["mape"] for m in said["models"]}
    assert errors["hybrid_rail"] < 2.0
    assert errors["hybrid_rail"] < errors["linear_with_clocks"] < errors["rate"]
    assert said["models"][3]["held_out"]["benchmark"]["default_known"]["mape"] < 2.0
    assert np.shape(said["models"][0]["plane"]["mape"]) == (6, 3)
    assert {
        "coefficients",
        "voltage",
        "training_clocks",
        "warnings",
        "assumptions",
    } <= set(said)
    assert "held out by benchmark" in err


def test_groups_to_test_are_not_trained_on_without_rails_too(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """A map without rails ignored `test:`; rows with absurd watts there must not move the model."""
    lines = files[0].read_text().splitlines()
    cells = [line.split(",") for line in lines[1:]]
    wild = [
        ",".join([c[0], "900.0", *c[2:]]) if c[0] in ("b3", "b4") else ",".join(c) for c in cells
    ]
    (tmp_path / "wild.csv").write_text("\n".join([lines[0], *wild]) + "\n")
    columns = tmp_path / "map.yaml"
    columns.write_text(MAP + "test: [b3]\nleft_out: {b4: a broken sensor, b77: misspelt}\n")
    options = ("--columns", columns, "--folds", 2, "--no-advice", "--model", "hybrid_rail")
    said, wild_said = (
        json.loads(run(path, *options, "--json")[0]) for path in (files[0], tmp_path / "wild.csv")
    )
    assert said["coefficients"] == wild_said["coefficients"]
    assert said["table"]["benchmarks"] == 12
    assert {row["benchmark"] for row in said["test"]} == {"b3"}
    assert said["models"][0]["test_mape"] < 3.0
    assert wild_said["models"][0]["test_mape"] > 50.0
    assert any("b4: a broken sensor" in words for words in said["warnings"])
    assert "Not trained on: b77: it is not in the table." in said["warnings"]
    assert "never trained on" in run(files[0], *options[:-1], "rate")[0]
    columns.write_text(MAP + "test: [b99]\n")
    with pytest.raises(BadInput, match="test: expected groups of the table"):
        run(files[0], *options)


def test_microbenchmarks_of_one_group_train_and_programs_of_another_test(tmp_path: Path) -> None:
    """The paper's protocol was refused: with one group to train on, no group can be held out,
    benchmarks can.
    """
    rows = [f"k{n},micro,{100 + 20 * n},{1 + n}e9" for n in range(5)] + ["p,programs,240,7e9"]
    (tmp_path / "t.csv").write_text("\n".join(["kernel,kind,watts,ops", *rows]) + "\n")
    clocks = "clock: 1000 MHz\nmemory_clock: 850 MHz\ndefault: {clock: 1000 MHz, memory_clock: 850 MHz}\n"
    columns = "benchmark: kernel\ngroup: {column: kind}\npower: {column: watts, unit: W}\n" + clocks
    columns += "test: [programs]\nevents: {executed_warp: {column: ops, rate: true}}\n"
    (tmp_path / "map.yaml").write_text(columns)
    argv = (
        tmp_path / "t.csv",
        "--columns",
        tmp_path / "map.yaml",
        "--model",
        "rate",
        "--no-advice",
        "--json",
    )
    (model,) = json.loads(run(*argv)[0])["models"]
    assert model["test_mape"] == pytest.approx(100.0 * (1.0 - 220.0 / 240.0))
    assert "group" not in model["held_out"]


def test_the_saved_model_is_readable_and_predicts(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    out, _ = run(
        files[0],
        "--columns",
        files[1],
        "--folds",
        3,
        "--model",
        "hybrid_rail",
        "--out",
        path,
        "--no-advice",
    )
    assert "hybrid_rail" in out
    back = power_model.load_saved_model(path)
    assert yaml.safe_load(path.read_text())["kind"] == "hybrid_rail"
    assert back.error_percent["held out by benchmark"] < 2.0
    clean = made_table(0.0, floored=True)
    assert_allclose(back.model.power(activity_of(clean)).total_w[:, 0], clean.power_w, rtol=0.03)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--form", "gpmtol"], "gpmtool"),
        ([], "--columns"),
        (["--columns", "MAP", "--estimator", "lasso"], "nnls, ols, huber"),
        (["--columns", "MAP", "--model", "hybrid"], "hybrid_rail"),
        (["--columns", "MAP", "--predict", "MAP"], "--predict"),
        (["--columns", "gone.yaml"], "gone.yaml: cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(files: tuple[Path, Path], argv: list[str], words: str) -> None:
    with pytest.raises((BadInput, UnknownName), match=words):
        run(files[0], *(files[1] if a == "MAP" else a for a in argv))


def test_figures_are_saved(files: tuple[Path, Path], printed: tuple[str, str]) -> None:
    folder = files[0].parent / "figures"
    found = {path.name for path in folder.iterdir()}
    assert found == {"costs.png", "error_planes.png", "voltages.png", "training_clocks.png"}
    assert all(path.stat().st_size > 5000 for path in folder.iterdir())


def test_error_planes_show_all_three_kinds(result: CounterFit) -> None:
    figure = counter_figures.draw_error_planes(result)
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert [t.split(":")[0] for t in titles] == [
        "rate-based",
        "switched capacitance",
        "hybrid rail",
    ]
    assert figure.axes[0].get_ylabel() == "Core clock (MHz)"


def test_costs_show_every_coefficient(result: CounterFit) -> None:
    axes = counter_figures.draw_event_costs(result).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [c.name for c in result.kinds[CounterModelKind.HYBRID].diagnosis.coefficients]


def test_power_over_time_stacks_to_the_total() -> None:
    model = power_model.load_saved_model(Path("tegra-k1")).model
    key = LaunchKey("dct", (1, 1, 1), (1, 1, 1))
    book = CounterBook().with_pass(key, dict.fromkeys(model.required_events, 1000000.0))
    at = OperatingPoint(clock_hz=852e6, memory_clock_hz=924e6)
    found = estimate_launch_power(
        [KernelLaunch(key, 0.0, 1e-3), KernelLaunch(key, 2e-3, 1e-3)], book, model, at
    )
    measured = np.array([0.0, 1e-3, 2e-3]), np.array([5.0, 4.0, 5.0])
    axes = counter_figures.draw_launch_power(found, measured, most=4).axes[0]
    tops = [patch.get_data().values for patch in axes.patches]
    assert len(tops) == 5  # the four largest, and the others as one
    assert_allclose(tops[-1], found.power.total_w)
    assert axes.get_ylabel() == "Power (W)"


def test_idle_planes_of_the_tegra_k1() -> None:
    """Figure 5: with the GPU off the core clock does not matter; on, it costs clock power that
    grows with V²f.
    """
    model = power_model.load_saved_model(Path("tegra-k1")).model
    core, memory = np.meshgrid([72e6, 396e6, 852e6], [204e6, 924e6], indexing="ij")
    at = OperatingPoint(clock_hz=core[..., np.newaxis], memory_clock_hz=memory[..., np.newaxis])
    names = model.required_events
    idle = Activity(
        np.ones((3, 2, 1)), np.zeros((3, 2, 1, len(names))), names, at, ActivitySource.PREDICTED
    )
    power = model.power(idle)
    of_gpu = next(rail.parts for rail in model.rails if rail.name == "gpu")
    kept = [i for i, part in enumerate(power.parts) if part not in of_gpu]
    off, on = power.part_w[..., 0, kept].sum(axis=-1), power.total_w[..., 0]
    assert_allclose(off, np.broadcast_to(off[:1], off.shape))
    assert_allclose((on - off)[-1], 0.27 * 1.05 + 2.10e-9 * 1.05**2 * 852e6)


def test_json_never_holds_nan(result: CounterFit) -> None:
    assert b"NaN" not in encode_json(counter_fit_to_plain(result))
    assert b"null" in encode_json(
        counter_fit_to_plain(result)
    )  # standard error of a cost held at zero, or no plane cell


def test_the_model_file_round_trips_and_refuses_damage(result: CounterFit) -> None:
    text = power_model.encode_model(make_saved_model(result, "made", "a device"))
    back = power_model.parse_saved_model(text, "m.yaml")
    assert power_model.encode_model(back) == text
    with pytest.raises(BadInput, match=r"m.yaml: format"):
        power_model.parse_saved_model(text.replace(b"format: 1", b"format: 9"), "m.yaml")
    with pytest.raises(UnknownName, match="hybrid_rail"):
        power_model.parse_saved_model(text.replace(b"kind: hybrid_rail", b"kind: hybrid"), "m.yaml")
    with pytest.raises(BadInput, match=r"m.yaml: model"):
        power_model.parse_saved_model(text.replace(b"base_w", b"bose_w"), "m.yaml")
    with pytest.raises(BadInput, match=r"m.yaml"):
        power_model.parse_saved_model(text.replace(b"int_busy_cycle", b"int_bisy_cycle"), "m.yaml")
