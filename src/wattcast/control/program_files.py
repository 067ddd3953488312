"""Exchange numbers with a running program through files: the work it has done, the SMs it may use.

A program names its progress in the file of ``WATTCAST_PROGRESS``. The number of SMs is a knob that
only the program can turn: green contexts (CUDA 12.4 and later) are changed from inside it. Before
each unit of work it reads how many SMs to use from the file named in ``WATTCAST_UNITS`` and runs
that unit in a green context of that size. A program that does not look keeps all SMs; time and
power then do not change with the knob, and the controller leaves it where it was. MPS, in contrast,
fixes a program's share when it starts (``limit_sm_share``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wattcast.control import plants
from wattcast.core import Refused, bad_value
from wattcast.core.regular_files import open_regular
from wattcast.core.whole_files import write_whole

PROGRESS_VARIABLE = "WATTCAST_PROGRESS"
SM_COUNT_VARIABLE = "WATTCAST_UNITS"
BUSY_VARIABLE = "WATTCAST_BUSY"
RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DEFAULT_PIPE = "/tmp/nvidia-mps"  # noqa: S108  (NVIDIA's own default)
READ_BYTE = 2**20  # of a progress file, at a time


@dataclass(frozen=True)
class SmCountFile:
    """Tell a program through a file how many of a card's SMs to use."""

    path: Path
    total: int

    def __post_init__(self) -> None:
        if self.total < 2 * plants.SM_GRAIN:
            raise bad_value("--sms", f"{2 * plants.SM_GRAIN} SMs or more", self.total)

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the counts that a program can be told."""
        return plants.list_sm_counts(self.total)

    def set(self, count: float) -> None:
        """Ask for this many; a reader sees the old number or the new one."""
        write_whole(self.path, f"{count:.0f}\n".encode())

    def reset(self) -> None:
        """Ask for all of them again."""
        self.set(self.total)


def limit_sm_share(percent: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give a program a share of the SMs through MPS; Refused where no MPS
    server listens.
    """
    if not 1 <= percent <= 100:
        raise bad_value("--sm-percent", "1 to 100", percent)
    pipe = Path(variables.get(MPS_PIPE, MPS_DEFAULT_PIPE)) / "control"
    if not pipe.exists():
        raise Refused(
            f"--sm-percent needs an MPS server; none listens at {pipe}. Start "
            "nvidia-cuda-mps-control -d."
        )
    return {MPS_SHARE: str(percent)}


class BusyFolder:
    """Read how long each rank of a job was busy in its steps, waiting for others left out.

    Rank r appends a line with the seconds of each of its steps to ``rank-r`` in the folder."""

    def __init__(
        self,
        path: Path,
        count: int,
    ) -> None:
        self._files = [_BusyFile(path / f"rank-{rank}") for rank in range(count)]
        self._seconds: list[list[float]] = [[] for _ in range(count)]  # not asked for yet

    def read(self) -> tuple[float, ...] | None:
        """Return the mean seconds of each rank's steps since the last answer; None as long as a
        rank has reported none.
        """
        for file, seconds in zip(self._files, self._seconds, strict=True):
            seconds += file.read_new()
        if not all(self._seconds):
            return None
        means_s = tuple(math.fsum(seconds) / len(seconds) for seconds in self._seconds)
        self._seconds = [[] for _ in self._files]
        return means_s


class _BusyFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._incomplete = b""

    def read_new(self) -> list[float]:
        """Return the lines that came since the last call."""
        try:
            with open_regular(self._path) as stream:
                stream.seek(self._read)
                data = stream.read(READ_BYTE)
        except OSError:
            return []
        self._read += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        seconds = []
        for line in lines:
            with suppress(ValueError):
                value = float(line)
                if 0.0 < value < math.inf:
                    seconds.append(value)
        return seconds


def find_local_rank(variables: Mapping[str, str]) -> int:
    """Return the rank of this process on its node, as torchrun, Slurm or Open MPI tell; else 0."""
    for name in RANK_VARIABLES:
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return 0


class ProgressFile:
    """Count units of work done so far from a file the program appends to.

    Every byte is a unit. A file that starts with "+" has lines instead, each a "+" and an amount,
    such as "+4096"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._sum = 0.0
        self._incomplete = b""  # a line that has not ended yet

    def count(self) -> float:
        """Return the units done so far; 0 before the program made the file."""
        try:
            with open_regular(self._path) as stream:
                if stream.read(1) != b"+":
                    return float(os.fstat(stream.fileno()).st_size)
                stream.seek(self._read)
                data = stream.read(READ_BYTE)
        except FileNotFoundError:
            return 0.0
        except OSError as error:
            reason = error.strerror or "none"
            raise bad_value(str(self._path), "a file the program appends to", reason) from None
        self._read += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                amount = float(line)
                if 0.0 <= amount < math.inf:
                    self._sum += amount
        return self._sum
