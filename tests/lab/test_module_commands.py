"""Modules of the lab that are run as commands, where what they need is not around."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from wattcast.lab.module_commands import run_module

PUBLIC = "wattcast.lab.validate.public_checks"


@pytest.mark.parametrize(
    ("module", "arguments", "sentence"),
    [
        ("wattcast.lab.fit.random_routing", ["MODEL"], "unknown measured engine model 'MODEL'"),
        (f"{PUBLIC}.training_family_checks", [], "set WATTCAST_REFERENCE to their folder"),
        (f"{PUBLIC}.learn_distances", [], "set WATTCAST_REFERENCE to their folder"),
        (f"{PUBLIC}.served_watts", ["--reference", "nowhere"], "no such file or folder"),
        ("wattcast.lab.fit.ship_calibrations", ["--reference", "nowhere"], "no such file or fold"),
    ],
)
def test_a_module_that_lacks_something_says_so_in_a_sentence(
    module: str,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Three of them ended with a traceback outside the clone."""
    monkeypatch.setenv("WATTCAST_REFERENCE", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        run_module(importlib.import_module(module).main)
    assert ended.value.code == 2
    words = capsys.readouterr().err.strip().splitlines()
    assert len(words) == 1
    assert sentence in words[0]
