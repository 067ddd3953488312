"""Remember what issuing an operator costs the host of this machine.

``wattcast doctor --host`` writes the file, ``predict`` reads it and says so, and ``wattcast doctor
--forget-host`` removes it. ``WATTCAST_HOST`` names another file; where it is empty, none is read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from wattcast.core.errors import bad_value
from wattcast.core.remembered_files import RememberedFile

# no host issues an operator faster or slower
LEAST_S = 1e-7
MOST_S = 1e-3


class OwnHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host of this machine: seconds to issue an operator, and how they were measured."""

    host_s_per_operator: float
    measured: str
    date: str

    def __post_init__(self) -> None:
        if not LEAST_S <= self.host_s_per_operator <= MOST_S:
            expected = f"seconds from {LEAST_S:g} to {MOST_S:g}"
            raise bad_value("host_s_per_operator", expected, self.host_s_per_operator)


_FILE = RememberedFile(
    "host.json",
    "WATTCAST_HOST",
    OwnHost,
    "host",
    "Measure it anew: wattcast doctor --host; or forget it: wattcast doctor --forget-host.",
)


def read_own_host() -> OwnHost | None:
    """Read the host that was measured on this machine; None where there is none."""
    return _FILE.read()


def write_own_host(host: OwnHost) -> Path:
    """Remember a host and return the file."""
    return _FILE.write(host)


def forget_own_host() -> bool:
    """Remove what was remembered, and tell whether there was any."""
    return _FILE.forget()
