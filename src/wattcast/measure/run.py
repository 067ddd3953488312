"""``measure run -- COMMAND``: what a whole program took, without touching it.

The sampler reads ever more rarely as the command runs on, so that it costs less than one percent of the
run; what it took is shown, as a share of the processors there are. The command's exit code passes
through, and an interrupt goes to the command first: what was measured until then is still reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass

from wattcast.errors import BadInput
from wattcast.measure.measurement import Measurement, measured
from wattcast.measure.sampler import Sampler
from wattcast.measure.samples import Samples
from wattcast.measure.source import Identity

PERIOD_S = 0.05
LEAD_S = 1.1  # before the command, to learn the counter's period
TAIL_S = 0.25  # after it, to see the counter step once more


@dataclass(frozen=True)
class Run:
    """A finished command: its measurement, its exit code, the device and the samples."""

    command: tuple[str, ...]
    exit_code: int
    measurement: Measurement
    identity: Identity
    samples: Samples
    started_s: float

    def plain(self) -> dict[str, object]:
        """For JSON."""
        device = {"name": self.identity.name, "uuid": self.identity.uuid, "driver": self.identity.driver}
        return {
            "command": list(self.command),
            "exit_code": self.exit_code,
            "device": device,
            **self.measurement.plain(),
        }


def run_command(
    command: list[str], source: str = "auto", index: int = 0, period_s: float = PERIOD_S, pass_output: bool = True
) -> Run:
    """Run ``command`` to its end beside the sampler; with ``pass_output`` false its stdout goes to our stderr."""
    if not command:
        raise BadInput("measure run: expected a command after --, got none. Example: measure run -- python train.py")
    with Sampler(source, index, period_s, relaxed=True) as sampler:
        time.sleep(LEAD_S)
        spent_s, started_s = sampler.processor_s, time.monotonic()
        exit_code = _run(command, pass_output)
        ended_s = time.monotonic()
        overhead = (sampler.processor_s - spent_s) / (ended_s - started_s) / processors()
        sampler.quick(True)
        time.sleep(TAIL_S)
        samples, identity = sampler.since(0), sampler.identity
    label = command[0].rsplit("/", 1)[-1]
    result = measured(label, samples, started_s, ended_s, overhead)
    return Run(tuple(command), exit_code, result, identity, samples, started_s)


def _run(command: list[str], pass_output: bool) -> int:
    """Exit code of the command as a shell would give it; Ctrl-C is the command's to handle."""
    try:
        process = subprocess.Popen(command, stdout=None if pass_output else 2)
    except FileNotFoundError:
        raise BadInput(f"measure run: there is no command {command[0]!r}.") from None
    except PermissionError:
        raise BadInput(f"measure run: {command[0]!r} may not be run.") from None
    previous = signal.signal(signal.SIGINT, lambda number, frame: _forward(process, number))
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
    return code if code >= 0 else 128 - code


def _forward(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def processors() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
