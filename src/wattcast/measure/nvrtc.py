"""CUDA C compiled at run time (NVRTC) and launched through NVIDIA's CUDA bindings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wattcast.errors import MissingTool, WattcastError


class CudaError(WattcastError):
    """A CUDA or NVRTC call failed."""


def compile_cubin(source: str, architecture: str = "sm_90", name: str = "kernel.cu") -> bytes:
    """Machine code of CUDA C ``source``; needs no GPU."""
    nvrtc = bindings("nvrtc")
    try:
        program = _check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    except RuntimeError as error:  # the bindings look for the library at the first call
        raise MissingTool(f"NVRTC cannot be loaded (pip install nvidia-cuda-nvrtc): {str(error)[:200]}") from None
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(f"{name} does not compile: {log.decode(errors='replace').strip()}")
    cubin: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel; the current CUDA context must be the one it was loaded in."""

    driver: Any
    function: Any

    def launch(self, stream: int, grid: int, block: int, arguments: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
        """Launch on a stream handle; ``arguments`` are values and their ctypes, None for pointers."""
        launch = self.driver.cuLaunchKernel
        _check(launch(self.function, grid, 1, 1, block, 1, 1, 0, stream, arguments, 0))


def load(cubin: bytes, name: str) -> Kernel:
    """The kernel ``name`` (``extern "C"``) of ``cubin``, in the current context."""
    driver = bindings("driver")
    module = _check(driver.cuModuleLoadData(cubin))
    return Kernel(driver, _check(driver.cuModuleGetFunction(module, name.encode())))


def bindings(part: str) -> Any:
    """A part of NVIDIA's CUDA bindings (``nvrtc`` or ``driver``), or a sentence that says how to get them."""
    try:
        from importlib import import_module

        return import_module(f"cuda.bindings.{part}")
    except ImportError:
        raise MissingTool("NVIDIA's CUDA bindings are not installed (pip install cuda-bindings).") from None


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"a CUDA call failed: {status!r}.")
    return values[0] if values else None
