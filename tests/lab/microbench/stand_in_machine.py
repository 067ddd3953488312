"""Fixtures: stand-ins for the CUDA driver and for NVML, which the real bindings load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "standin"))

from disassembly import disassemble

from standin import StandIn, compile_library
from wattcast.core.errors import MissingTool
from wattcast.measure.cuda_device import compile_cubin

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


def compiled(source: str, architecture: str) -> bytes:
    """Machine code, or a skip that says which tool is missing."""
    try:
        return compile_cubin(source, architecture)
    except MissingTool as error:
        pytest.skip(str(error))


def disassembled(source: str, architecture: str) -> str:
    """Machine code as text, or a skip that says which tool is missing."""
    cubin = compiled(source, architecture)
    try:
        return disassemble(cubin)
    except MissingTool as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Machine:
    """A machine whose GPU only keeps time: how to run ``python -m wattcast.lab`` on it."""

    environment: dict[str, str]
    nvml: StandIn
    folder: Path

    def measure(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "wattcast.lab", *arguments]
        return subprocess.run(
            command,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def python(self, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", text],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


@pytest.fixture(scope="session")
def libraries(shared_folder: Callable[[str], AbstractContextManager[Path]]) -> Path:
    """A folder with libcuda.so.1, libnvidia-ml.so.1 and the multimedia kernels compiled for the
    host.
    """
    with shared_folder("cuda-standin") as folder:
        if not (folder / "media.so").exists():
            compile_libraries(folder)
    return folder


def compile_libraries(folder: Path) -> None:
    """Compile them, the multimedia kernels last."""
    compiler = shutil.which("gcc")
    if compiler is None or shutil.which("g++") is None or compile_library(folder) is None:
        pytest.skip("no C compiler to build the stand-in libraries")
    base = ["-shared", "-fPIC", "-O2", "-Wall"]
    cuda = [compiler, *base, "-o", str(folder / "libcuda.so.1"), str(HERE / "cuda.c"), "-ldl"]
    media = ["g++", *base, "-Wno-unused", f"-I{SOURCE / 'wattcast/lab/microbench'}"]
    media += ["-o", str(folder / "media.so"), str(HERE / "media_host.cpp")]
    for command in (cuda, media):
        subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Machine:
    return stand_in_machine(libraries, tmp_path)


def stand_in_machine(libraries: Path, folder: Path) -> Machine:
    """A machine with the stand-in libraries that writes below ``folder``."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compiled('extern "C" __global__ void nothing() {}', "sm_90a")
    nvml = StandIn(libraries, folder / "script.txt")
    nvml.follow("at -10 300 1980 0 45 60")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(SOURCE),
        "STANDIN_MEDIA": str(libraries / "media.so"),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": str(libraries / "cache"),  # compiled once a run of the tests
        **nvml.environment,
    }
    return Machine(environment, nvml, libraries)


@pytest.fixture
def rows() -> Callable[[Path], list[dict[str, object]]]:
    """Rows of a JSON Lines file."""
    from wattcast.core.row_journals import read_lines

    return lambda path: list(read_lines(path))
