"""The stand-in machine, for every test here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stand_in_machine import libraries, machine, rows

__all__ = ["libraries", "machine", "rows"]
