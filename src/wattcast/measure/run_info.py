"""What every campaign says of its run: its name, which card, which libraries, when; and how it talks."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import UTC, datetime
from typing import Any

from wattcast.measure.source import Identity
from wattcast.measure.spin import Spinner, spinner
from wattcast.records import RunInfo


def run_name() -> str:
    """A name for the run that starts now."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"


def run_info(run: str, identity: Identity, *, sm_count: int, l2_byte: int, **libraries: str) -> RunInfo:
    """The card as the sampler knows it, and the versions given (``cuda``, ``torch``, ``cublas``, ``cudnn``)."""
    from wattcast import __version__

    return RunInfo(
        run,
        datetime.now(UTC).isoformat(timespec="seconds"),
        card_name=identity.name,
        card_uuid=identity.uuid,
        card_serial=identity.serial,
        driver=identity.driver,
        nvml=identity.library,
        wattcast=__version__,
        power_limit_w=identity.power_limit_w,
        sm_count=sm_count,
        l2_byte=l2_byte,
        top_clock_hz=identity.top_clock_hz,
        **libraries,
    )


def torch_run_info(run: str, identity: Identity, torch: Any) -> RunInfo:
    """The same with what PyTorch and the libraries it loaded say of themselves."""
    properties = torch.cuda.get_device_properties(0)
    return run_info(
        run,
        identity,
        sm_count=properties.multi_processor_count,
        l2_byte=properties.L2_cache_size,
        cuda=str(torch.version.cuda),
        torch=str(torch.__version__),
        cublas=_cublas_version(),
        cudnn=str(torch.backends.cudnn.version()),
    )


def _cublas_version() -> str:
    """cuBLAS says its version through its own library, which PyTorch has loaded; empty where it cannot be asked."""
    import ctypes

    for name in ("libcublas.so.13", "libcublas.so.12", "libcublas.so"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            values = []
            for item in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
                number = ctypes.c_int()
                library.cublasGetProperty(item, ctypes.byref(number))
                values.append(str(number.value))
            return ".".join(values)
    return ""


def spinner_if_any(torch: Any) -> Spinner | None:
    """The spin kernel that reads the true clock, or None with the reason said: rows then lack that clock alone."""
    try:
        return spinner(torch)
    except Exception as error:
        say(f"no spin kernel: {type(error).__name__}: {error}")
        return None


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)
