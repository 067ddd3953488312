"""What this machine has of what Wattcast can use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass

from wattcast import __version__
from wattcast.reference import reference_folder


@dataclass(frozen=True)
class Check:
    """One thing looked for: whether it is there, what was found, what it is for, how to get it."""

    name: str
    ok: bool
    found: str
    purpose: str
    advice: str


_LIBRARIES = {  # distribution -> (module, what it is for, extra that installs it)
    "numpy": ("numpy", "predict", ""),
    "msgspec": ("msgspec", "predict", ""),
    "PyYAML": ("yaml", "predict", ""),
    "typer": ("typer", "the command line", ""),
    "rich": ("rich", "tables", ""),
    "scipy": ("scipy", "fitting and fleet planning", "fit"),
    "polars": ("polars", "tables of measurements", "fit"),
    "matplotlib": ("matplotlib", "--plot", "plot"),
    "fastapi": ("fastapi", "serve", "serve"),
    "uvicorn": ("uvicorn", "serve", "serve"),
    "prometheus-client": ("prometheus_client", "export prometheus", "serve"),
    "nvidia-ml-py": ("pynvml", "measuring NVIDIA GPUs", "measure"),
    "torch": ("torch", "capturing PyTorch programs, measuring kernels", "torch"),
}


def examine(variables: Mapping[str, str]) -> list[Check]:
    """All checks, in a fixed order; none of them wakes a GPU."""
    checks = [Check("wattcast", True, f"{__version__}, Python {platform.python_version()}", "", "")]
    checks += [_library(name, *spec) for name, spec in _LIBRARIES.items()]
    checks.append(_driver())
    checks.append(_tool("ncu", "hardware counters of NVIDIA GPUs", "install Nsight Compute"))
    folder = reference_folder(variables)
    found = "found" if folder is not None else ""
    checks.append(
        Check("reference data", folder is not None, found, "validation", "set WATTCAST_REFERENCE to its folder")
    )
    return checks


def _library(name: str, module: str, purpose: str, extra: str) -> Check:
    advice = f"pip install 'wattcast[{extra}]'" if extra else "pip install --force-reinstall wattcast"
    if importlib.util.find_spec(module) is None:
        return Check(name, False, "", purpose, advice)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Check(name, True, version, purpose, advice)


def _driver() -> Check:
    purpose, advice = "measuring and managing NVIDIA GPUs", "no NVIDIA driver on this machine; predictions need none"
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return Check("NVIDIA driver", False, "", purpose, advice)
    return Check("NVIDIA driver", True, "libnvidia-ml.so.1", purpose, advice)


def _tool(name: str, purpose: str, advice: str) -> Check:
    path = shutil.which(name)
    return Check(name, path is not None, path or "", purpose, advice)
