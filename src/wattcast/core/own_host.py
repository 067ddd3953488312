"""Remember what issuing an operator costs the host of this machine.

``wattcast doctor --host`` writes the file, ``predict`` reads it and says so, and ``wattcast doctor
--forget-host`` removes it. ``WATTCAST_HOST`` names another file; where it is empty, none is read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from wattcast.core.errors import BadInput, bad_value
from wattcast.core.strict_files import decode_json
from wattcast.core.whole_files import write_whole

VARIABLE = "WATTCAST_HOST"
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


def find_host_file() -> Path | None:
    """Return where the host is remembered; None where nothing is to be remembered."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = os.environ.get("XDG_CONFIG_HOME")
    base = Path(folder) if folder else Path.home() / ".config"
    return base / "wattcast" / "host.json"


def read_own_host() -> OwnHost | None:
    """Read the host that was measured on this machine; None where there is none."""
    path = find_host_file()
    try:
        data = path.read_bytes() if path is not None else b""
    except OSError:
        return None
    if not data:
        return None
    try:
        return decode_json(data, OwnHost, str(path))
    except BadInput as error:
        do = "Measure it anew: wattcast doctor --host; or forget it: wattcast doctor --forget-host."
        raise BadInput(f"{error} {do}") from None


def write_own_host(host: OwnHost) -> Path:
    """Remember a host and return the file."""
    path = find_host_file()
    if path is None:
        raise BadInput(f"{VARIABLE} is empty, so that no host is remembered. Unset it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(host))
    return path


def forget_own_host() -> bool:
    """Remove what was remembered, and tell whether there was any."""
    path = find_host_file()
    if path is None or not path.exists():
        return False
    path.unlink()
    return True
