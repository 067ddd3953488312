"""Fixtures for managing: the stand-in NVML library, where it can be built."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wattcast.control import card_notes

if TYPE_CHECKING:
    from standin_node import Node

STANDIN = Path(__file__).parent.parent / "standin"


@pytest.fixture(scope="session")
def standin_library(shared_folder: Callable[[str], AbstractContextManager[Path]]) -> Path:
    """A folder with the compiled stand-in for ``libnvidia-ml.so.1``."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if not (STANDIN / "standin.py").is_file():
        pytest.skip("no stand-in NVML library in tests/standin")
    sys.path.insert(0, str(STANDIN))
    from standin import compile_library

    with shared_folder("standin") as folder:
        if not (folder / "libnvidia-ml.so.1").exists() and compile_library(folder) is None:
            pytest.skip("no C compiler to build the stand-in NVML library")
    return folder


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in card: ``standin.follow(...)`` scripts it, ``standin.environment`` points processes
    at it.

    Notes and locks of cards lie in one place of the machine; every test has a place of its own.
    """
    if os.geteuid() != 0:
        pytest.skip("locking clocks needs root, even on a stand-in")
    from standin import StandIn

    monkeypatch.setattr(card_notes, "FOLDER", tmp_path / "notes")
    uuid = f"GPU-test-{os.getpid()}-{time.time_ns()}"
    always = (f"uuid {uuid}", f"card {tmp_path / 'card'}", f"calls {tmp_path / 'calls.txt'}")
    made = StandIn(standin_library, tmp_path / "script.txt", always)
    made.follow("at -10 300 1980 0 45 60")
    return made


@pytest.fixture
def node(standin: Any, tmp_path: Path) -> Iterator[Node]:
    """A node with the stand-in card; its processes are ended after the test."""
    from standin_node import Node

    made = Node(standin, tmp_path)
    yield made
    made.end()
