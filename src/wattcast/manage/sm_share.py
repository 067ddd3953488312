"""The number of SMs as a knob of a real card.

MPS fixes a program's share when it starts (:func:`share_of_units`), so that one is set once. Green contexts (CUDA
12.4 and later) can be changed while a program runs, but only from inside it. So the program turns this knob: before
each unit of work it reads how many SMs to use from the file named in ``WATTCAST_UNITS`` and runs that unit in a
green context of that size (:class:`Units` writes the file). A program that does not look keeps all SMs: time and
power then do not change with the knob, and the controller leaves it where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wattcast.errors import Refused, bad_value
from wattcast.files import write_whole

UNITS = "WATTCAST_UNITS"
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
GRAIN = 8  # SMs: green contexts on compute capability 9.0 and later come in multiples of it (CUDA driver API)
SHARES = (0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True)
class Units:
    """A file that tells a program how many of a card's SMs to use."""

    path: Path
    total: int

    def __post_init__(self) -> None:
        if self.total < 2 * GRAIN:
            raise bad_value("--sms", f"{2 * GRAIN} SMs or more", self.total)

    @property
    def levels(self) -> tuple[float, ...]:
        """Counts that can be asked for: about eighths of the card down to a half, and all of it."""
        lower = {GRAIN * round(share * self.total / GRAIN) for share in SHARES}
        return tuple(float(n) for n in sorted({n for n in lower if n < self.total} | {self.total}))

    def set(self, count: float) -> None:
        """Ask for this many; a reader sees the old number or the new one."""
        write_whole(self.path, f"{count:.0f}\n".encode())

    def reset(self) -> None:
        """All of them again."""
        self.set(self.total)


def share_of_units(percent: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a program a share of the SMs through MPS; Refused where no MPS server listens."""
    if not 1 <= percent <= 100:
        raise bad_value("--sm-percent", "1 to 100", percent)
    pipe = Path(variables.get(MPS_PIPE, "/tmp/nvidia-mps")) / "control"  # noqa: S108  (NVIDIA's own default)
    if not pipe.exists():
        raise Refused(f"--sm-percent needs an MPS server; none listens at {pipe}. Start nvidia-cuda-mps-control -d.")
    return {MPS_SHARE: str(percent)}
