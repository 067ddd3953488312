"""Fixtures for measuring without a GPU: the stand-in NVML library, synthetic samples, recorded runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "standin"))
sys.path.insert(0, str(Path(__file__).parent))

from standin import StandIn, compile_library


@pytest.fixture(scope="session")
def standin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standin")
    if compile_library(folder) is None:
        pytest.skip("no C compiler to build the stand-in NVML library")
    return folder


@pytest.fixture
def standin(standin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in library; child processes of the test meet it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    made = StandIn(standin_folder, tmp_path / "script.txt")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    made.follow("at -10 300 1980 0 45 60")
    return made
