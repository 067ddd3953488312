"""Remember what was measured on this machine, in files of the user's configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from wattcast.core.errors import BadInput
from wattcast.core.strict_files import decode_json
from wattcast.core.whole_files import write_whole

Content = TypeVar("Content", bound=msgspec.Struct)


@dataclass(frozen=True)
class RememberedFile(Generic[Content]):
    """One file of the user's configuration: its name, what is in it, and how to make it anew."""

    name: str
    variable: str  # of the environment, which names another file; where it is empty, none is read
    content: type[Content]
    noun: str  # what is remembered
    again: str  # what to do about a damaged file

    def find(self) -> Path | None:
        """Return where it is remembered; None where nothing is to be remembered."""
        named = os.environ.get(self.variable)
        if named is not None:
            return Path(named) if named else None
        folder = os.environ.get("XDG_CONFIG_HOME")
        base = Path(folder) if folder else Path.home() / ".config"
        return base / "wattcast" / self.name

    def read(self) -> Content | None:
        """Read what was remembered; None where there is nothing."""
        path = self.find()
        try:
            data = path.read_bytes() if path is not None else b""
        except OSError:
            return None
        if not data:
            return None
        try:
            return decode_json(data, self.content, str(path))
        except BadInput as error:
            raise BadInput(f"{error} {self.again}") from None

    def write(self, content: Content) -> Path:
        """Remember something and return the file."""
        path = self.find()
        if path is None:
            raise BadInput(
                f"{self.variable} is empty, so that no {self.noun} is remembered. Unset it."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(content))
        return path

    def forget(self) -> bool:
        """Remove what was remembered, and tell whether there was any."""
        path = self.find()
        if path is None or not path.exists():
            return False
        path.unlink()
        return True
