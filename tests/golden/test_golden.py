"""What is frozen stays frozen; `python tests/golden/make.py` after a deliberate change."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("make_golden", HERE / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
_spec = importlib.util.spec_from_file_location("golden_predictions", HERE / "predictions.py")
predictions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(predictions)

GPUS = (
    "v100-sxm a100-pcie-40gb a100-sxm-80gb a10 a40 l4 l40s h100-pcie h100-sxm h200 b200 gtx-titan-x quadro-gv100 "
    "tegra-k1 gtx-660 gtx-480 quadro-fx-5600 hd-7970 rtx-4090 l40 rtx-a6000 a30 t4 h100-nvl h200-nvl v100-pcie "
    "p100-pcie quadro-rtx-6000 mi300x mi325x mi355x rtx-5090 rtx-pro-6000 gb200 gb300 b300 h20 a16 gh200 "
    "jetson-agx-orin jetson-nano jetson-orin-nano jetson-orin-nx jetson-thor rtx-3070 rtx-3090"
).split()
OPTIONS = (
    "gpu batch seq tokens phase dtype attention head stack clock power-limit host-launch temperature data "
    "tp pp dp json plot"
).split()
FIELDS = (
    "name gpu latency_s power_w energy_j clock_hz effective_clock_hz capped interval support memory_byte modules ops "
    "assumptions"
).split()


@pytest.mark.parametrize("name", sorted(make.MAKERS))
def test_golden_file_is_current(name: str) -> None:
    assert make.text(name) == make.path(name).read_text(encoding="utf-8"), (
        f"{name} changed: run tests/golden/make.py"
    )


def test_names_users_were_promised_are_there() -> None:
    """Written out by hand, so that a renamed option cannot pass by regenerating the golden file."""
    from wattcast import hardware

    assert sorted(hardware.gpu_names()) == sorted(GPUS)
    options = json.loads((HERE / "options.json").read_text(encoding="utf-8"))
    assert {f"--{name}" for name in OPTIONS} <= {
        o for entry in options.values() for o in entry["names"]
    }
    output = json.loads((HERE / "output.json").read_text(encoding="utf-8"))
    assert set(FIELDS) <= set(output["$defs"]["PredictionOut"]["required"])
    assert set(output["$defs"]["PredictOut"]["required"]) == {"wattcast", "predictions"}


@pytest.fixture(scope="module")
def predicted() -> list[list[float] | str]:
    return predictions.predict_table(predictions.read_table())


@pytest.mark.parametrize(
    ("place", "row"),
    list(enumerate(predictions.read_table())),
    ids=[f"{row[0]}-{row[1]}-{row[2].get('phase')}" for row in predictions.read_table()],
)
def test_predictions_are_those_of_the_table(predicted, place, row) -> None:
    *_, expected = row
    if isinstance(expected, str):
        assert predicted[place] == expected
    else:
        np.testing.assert_allclose(predicted[place], expected, rtol=predictions.RTOL)


def test_table_is_of_the_configurations_it_says() -> None:
    assert [row[:3] for row in predictions.read_table()] == predictions.draw_configurations()
