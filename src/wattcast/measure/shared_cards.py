"""Say whether a card is a part of one, or whether other programs use it.

Time and watts of a MIG slice, of an AMD partition, or of a card that others use at the same time
are not those of the card. What the libraries answer is said in words; a library that does not know
a question says nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from wattcast.measure.energy_sources import (
    AmdSource,
    EnergySource,
    JetsonSource,
    NvmlSource,
)

MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
WHOLE_AMD_CARD = "SPX"  # the compute partition in which a card is one device


def describe_sharing(source: EnergySource, index: int) -> tuple[str, ...]:
    """Return why the card of a source is not the program's alone."""
    if isinstance(source, NvmlSource):
        import pynvml

        return describe_nvidia_sharing(pynvml, index)
    if isinstance(source, AmdSource):
        import amdsmi

        return describe_amd_sharing(amdsmi, index)
    if isinstance(source, JetsonSource):
        return ()
    return ("power is a processor's, since no GPU's could be read",)


def describe_nvidia_sharing(nvml: Any, index: int) -> tuple[str, ...]:
    """Return why the card at an NVML index is not the program's alone; empty where it is."""
    reasons = []
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        if current == MIG_ENABLED:
            reasons.append("MIG is enabled: programs run on slices of the card")
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        users = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        reasons += _describe_others(users)
    return tuple(reasons)


def describe_amd_sharing(smi: Any, index: int) -> tuple[str, ...]:
    """Return why the card at a place in amdsmi's list is not the program's alone."""
    reasons = []
    handle = smi.amdsmi_get_processor_handles()[index]
    with contextlib.suppress(smi.AmdSmiException, AttributeError):
        partition = str(smi.amdsmi_get_gpu_compute_partition(handle))
        if partition and WHOLE_AMD_CARD not in partition.upper():
            reasons.append(f"compute partition {partition}: a device is a part of the card")
    with contextlib.suppress(smi.AmdSmiException, AttributeError, KeyError):
        users = [int(process["pid"]) for process in smi.amdsmi_get_gpu_process_list(handle)]
        reasons += _describe_others(users)
    return tuple(reasons)


def _describe_others(users: list[int]) -> list[str]:
    other_processes = sorted(set(users) - {os.getpid()})
    if not other_processes:
        return []
    numbers = ", ".join(map(str, other_processes[:5]))
    return [f"{len(other_processes)} other processes use the card ({numbers})"]
