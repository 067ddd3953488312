"""A saved counter model is applied to counters it never saw."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.lab.counter_models.test_dcgm import FIELDS, as_dmon, made_rounds

from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import WattcastError
from wattcast.lab.counter_models.apply_model import apply_model


def run(*argv: str) -> tuple[int, str, str]:
    env = Environment(io.StringIO(), io.StringIO())
    code = main(list(argv), env)
    return code, env.stdout.getvalue(), env.stderr.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rate model of a card of 100 W, 300 W more for tensor cores and 150 W for memory."""
    folder = tmp_path_factory.mktemp("model")
    log = folder / "dcgm.log"
    log.write_text(as_dmon(made_rounds()))
    path = folder / "model.yaml"
    words = ["lab", "fit", "counters", str(log), "--form", "dcgm", "--model", "rate"]
    code, _, err = run(*words, "--no-advice", "--out", str(path))
    assert code == 0, err
    return path


def other_rounds(with_power: bool) -> list[dict[str, float]]:
    rounds = []
    for tensor, memory in ((0.0, 0.0), (0.5, 0.2), (0.9, 0.7)):
        values = {"SMCLK": 1980, "MMCLK": 3201, "TENSO": tensor, "DRAMA": memory}
        if with_power:
            values["POWER"] = 100.0 + 300.0 * tensor + 150.0 * memory
        rounds.append(values)
    return rounds


def write_log(path: Path, rounds: list[dict[str, float]]) -> Path:
    names = [name for name in FIELDS if name in rounds[0]]
    lines = ["# Entity  " + "  ".join(names), "      Id"]
    lines += ["   GPU 0  " + "  ".join(f"{values[n]:g}" for n in names) for values in rounds]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("with_power", [True, False])
def test_a_log_of_three_rounds_gets_its_watts(
    model: Path, tmp_path: Path, with_power: bool
) -> None:
    """Three rounds are too few to fit to, and plenty to apply a model to, with watts or without."""
    log = write_log(tmp_path / "other.log", other_rounds(with_power))
    picture = tmp_path / "watts.png"
    words = ["lab", "apply", str(log), "--model", str(model), "--form", "dcgm"]
    code, out, err = run(*words, "--json", "--plot", str(picture))
    assert code == 0, err
    said = json.loads(out)
    expected = np.array([100.0, 280.0, 475.0])
    assert [row["power_w"] for row in said["rows"]] == pytest.approx(expected, rel=0.02)
    assert said["mean_power_w"] == pytest.approx(expected.mean(), rel=0.02)
    for row in said["rows"]:
        assert sum(row["part_w"].values()) == pytest.approx(row["power_w"])
    assert ("measured_w" in said["rows"][0]) is with_power
    assert (said["error_percent"] is None) is not with_power
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(*words)
    assert code == 0
    assert "3 rows, mean" in out


def write_table(folder: Path, *, with_power: bool) -> tuple[Path, Path]:
    table = folder / "counters.csv"
    header = "name,ms,mhz,mem_mhz,tensor,dram"
    rows = ["a,10,1980,3201,9.9e6,6.402e6", "b,10,1980,3201,0,0"]
    if with_power:
        header += ",w"
        rows = [f"{rows[0]},281", f"{rows[1]},99"]
    table.write_text("\n".join([header, *rows]) + "\n")
    columns = folder / "map.yaml"
    columns.write_text(
        """benchmark: name
power: {column: w, unit: W}
duration: {column: ms, unit: ms}
clock: {column: mhz, unit: MHz}
memory_clock: {column: mem_mhz, unit: MHz}
events:
  tensor_busy_cycle: {column: tensor}
  dram_busy_cycle: {column: dram}
"""
    )
    return table, columns


@pytest.mark.parametrize("with_power", [True, False])
def test_a_table_without_watts_gets_them(model: Path, tmp_path: Path, with_power: bool) -> None:
    """Half of all cycles on tensor cores and a fifth in memory, then an idle row."""
    table, columns = write_table(tmp_path, with_power=with_power)
    applied = apply_model(model, table, "table", columns=columns)
    assert applied.predicted_w == pytest.approx([280.0, 100.0], rel=0.02)
    assert applied.duration_s == pytest.approx([0.01, 0.01])
    if with_power:
        assert applied.error_percent == pytest.approx(0.7, abs=0.6)
    else:
        assert applied.error_percent is None


def test_errors_of_rows_do_not_cancel(model: Path, tmp_path: Path) -> None:
    """A signed mean called 10 % too much and 10 % too little no error at all."""
    table, columns = write_table(tmp_path, with_power=True)
    applied = apply_model(model, table, "table", columns=columns)
    off = replace(applied, measured_w=applied.predicted_w / np.array([1.1, 0.9]))
    assert off.error_percent == pytest.approx(10.0)


def test_a_source_without_an_event_of_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    """A sum that lacks a part is no total."""
    rounds = [{"SMCLK": 1980, "MMCLK": 3201, "TENSO": 0.5}]
    log = write_log(tmp_path / "half.log", rounds)
    with pytest.raises(WattcastError, match="dram_busy_cycle"):
        apply_model(model, log, "dcgm")
    table, _ = write_table(tmp_path, with_power=False)
    with pytest.raises(WattcastError, match="--columns"):
        apply_model(model, table, "table")


def test_kernels_of_nsight_compute_name_the_metrics_they_lack(tmp_path: Path) -> None:
    table = tmp_path / "kernels.csv"
    table.write_text(
        '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum",'
        '"sm__cycles_elapsed.max"\n"","","","","ns","cycle"\n'
        '"0","k","(32, 1, 1)","(1, 1, 1)","1000","1980"\n'
    )
    code, _, err = run("lab", "apply", str(table), "--model", "h200", "--form", "ncu")
    assert code != 0
    assert "ncu --metrics" in " ".join(err.split())
