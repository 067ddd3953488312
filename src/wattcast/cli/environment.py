"""What a command may touch of the world: streams and variables, handed in so that tests can."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Environment:
    """Streams and variables of one call of the command line."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    traceback: bool = False

    def console(self) -> Console:
        """A console for results. Away from a terminal it is wide enough that nothing is cut."""
        from rich.console import Console

        width = None if self.stdout.isatty() else 160
        return Console(file=self.stdout, width=width, soft_wrap=False)

    def json(self, out: object) -> None:
        """Results as JSON, to stdout."""
        from wattcast.report.plain import encode

        self.stdout.write(encode(out).decode() + "\n")

    def say(self, text: str) -> None:
        """Progress and warnings, to stderr."""
        self.stderr.write(text + "\n")
