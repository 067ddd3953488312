"""Fixtures for managing: the stand-in NVML library, where it can be built."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

STANDIN = Path(__file__).parent.parent / "standin"


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled stand-in for ``libnvidia-ml.so.1``."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if not (STANDIN / "standin.py").is_file():
        pytest.skip("no stand-in NVML library in tests/standin")
    sys.path.insert(0, str(STANDIN))
    from standin import compile_library

    folder = tmp_path_factory.mktemp("standin")
    if compile_library(folder) is None:
        pytest.skip("no C compiler to build the stand-in NVML library")
    return folder


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Any:
    """A stand-in card: ``standin.follow(...)`` scripts it, ``standin.environment`` points processes at it."""
    if os.geteuid() != 0:
        pytest.skip("locking clocks needs root, even on a stand-in")
    from standin import StandIn

    made = StandIn(standin_library, tmp_path / "script.txt")
    made.follow("at -10 300 1980 0 45 60", f"calls {tmp_path / 'calls.txt'}")
    return made
