"""What ``gpus`` says of a calibrated card: by which rows, with which errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import wattcast.predictor.bundle as bundle_package
from wattcast.predictor.bundle.held_out_errors import read_held_out_errors

FOLDER = Path(next(iter(bundle_package.__path__)))
CALIBRATED = sorted(path.parent.name for path in FOLDER.glob("*/calibration.yaml"))


@pytest.mark.parametrize("name", CALIBRATED)
def test_every_calibration_says_how_far_it_is_off(name: str) -> None:
    errors = {error.family: error for error in read_held_out_errors(name)}
    assert errors["products"].rows >= 40
    assert 0.0 < errors["products"].percent < 12.0


def test_a_family_is_the_mean_over_its_rows() -> None:
    with (FOLDER / "h100-sxm" / "errors.csv").open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if line["what"].startswith("experts")]
    errors = [float(line["calibrated_percent"]) for line in lines for _ in range(int(line["rows"]))]
    (experts,) = [item for item in read_held_out_errors("h100-sxm") if item.family == "experts"]
    assert experts.rows == len(errors)
    assert experts.percent == pytest.approx(sum(errors) / len(errors), abs=0.051)


def test_a_forecast_has_no_errors_of_its_own() -> None:
    assert read_held_out_errors("t4") == ()


def test_the_command_shows_them(call) -> None:
    result = call("gpus", "list", "--json")
    rows = {row["name"]: row for row in json.loads(result.out)["gpus"]}
    assert rows["b200"]["coefficients"] == "calibrated"
    assert rows["b200"]["errors_percent"]["attention"] < 8.0
    assert "kernel tables" in rows["b200"]["rows"]
    assert rows["t4"]["errors_percent"] == {}
