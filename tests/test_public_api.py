"""The verbs of the API: the names of the commands, callable whatever was imported before (types:
users_script.py).
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import wattcast
from wattcast.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


def test_every_command_that_computes_is_a_function() -> None:
    asked = {
        "predict",
        "simulate",
        "plan",
        "compare",
        "explore",
        "measure",
        "calibrate",
        "gpus",
        "models",
    }
    assert asked <= set(COMMANDS)
    for name in asked | {"predict_many", "train", "capture"}:
        assert callable(getattr(wattcast, name)), name
        assert "options" not in inspect.signature(getattr(wattcast, name)).parameters or name in (
            *("predict", "predict_many", "compare", "explore"),  # typed by ModelKeywords
        )


def test_packages_of_a_verbs_name_are_called_after_any_import() -> None:
    import wattcast.explore.sweep
    import wattcast.measure.sampler

    found = wattcast.explore("gpt2", "h200", ["batch=1,2"], seq=64)
    assert len(found.rows) == 2
    assert "slowdown" in inspect.signature(wattcast.explore).parameters
    assert wattcast.measure.__doc__
    assert hasattr(wattcast.measure("block"), "__enter__")


def test_import_is_silent_and_the_wheel_says_that_it_is_typed() -> None:
    code = "import wattcast, wattcast.explore, wattcast.measure; dir(wattcast)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert wheel["packages"] == ["src/wattcast"]  # all files below, unless git ignores them
    assert (ROOT / "src" / "wattcast" / "py.typed").is_file()
    ignored = subprocess.run(
        ["git", "check-ignore", "src/wattcast/py.typed"], cwd=ROOT, capture_output=True
    )
    assert ignored.returncode != 0


@pytest.mark.slow
def test_the_wheel_is_built_with_its_marker(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    import zipfile

    (built,) = tmp_path.glob("wattcast-*.whl")
    assert "wattcast/py.typed" in zipfile.ZipFile(built).namelist()
