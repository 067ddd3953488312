"""The same stand-in machine as the microbenchmarks have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "microbench"))

from stand_in_machine import libraries, machine, rows

__all__ = ["libraries", "machine", "rows"]
