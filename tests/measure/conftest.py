"""Fixtures for measuring without a GPU: the stand-in NVML library, synthetic samples, recorded
runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "standin"))
sys.path.insert(0, str(Path(__file__).parent))

from fake_gpu import FakeGpu

from standin import StandIn, compile_library
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.measure.sampler import Sampler


@pytest.fixture(scope="session")
def standin_folder(shared_folder) -> Path:
    with shared_folder("standin") as folder:
        if not (folder / "libnvidia-ml.so.1").exists() and compile_library(folder) is None:
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


@pytest.fixture
def bench(standin: StandIn) -> Iterator[OperatorBench]:
    """What measuring a row needs, on a GPU that only keeps time."""
    gpu = FakeGpu()
    gpu.operands = SimpleNamespace(pattern="random")
    with Sampler("nvml") as sampler:
        yield OperatorBench(gpu, sampler, "run-1", None, top_clock_hz=1.98e9)
