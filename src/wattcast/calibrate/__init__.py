"""Move the forecast of a card by what a user's own rows, or public tables, say of it.

The package can be called: ``wattcast.calibrate(...)``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from wattcast import VerbPackage

if TYPE_CHECKING:
    from wattcast.calibrate.calibration_rows import calibrate as calibrate

__all__ = ["calibrate"]


def __getattr__(name: str) -> Any:
    """Import the verb when it is called: reading rows needs none of what it imports."""
    if name != "calibrate":
        raise AttributeError(f"module 'wattcast.calibrate' has no attribute {name!r}")
    from wattcast.calibrate.calibration_rows import calibrate

    return calibrate


sys.modules[__name__].__class__ = VerbPackage
