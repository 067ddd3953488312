"""Read seconds and watts of programs by memory and core clock, from text in blocks of one program
each.
"""

from __future__ import annotations

import math
import re
from itertools import chain, count

from wattcast.core.errors import bad_value

MHZ = 1e6
ENERGY_TOLERANCE = 0.02  # of power times time


_NUMBER = re.compile(r"[-+.\deE]+")


def parse_program_blocks(
    text: str, where: str
) -> dict[str, dict[tuple[float, float], tuple[float, float]]]:
    """Return seconds and watts of each program by memory and core clock in Hz.

    A program's name stands on a line of its own, then rows of memory MHz, core MHz, ms, W and,
    where known, mJ, which must be power times time. A program that starts over without a name is
    one of its own, called ``name#2``."""
    blocks: dict[str, dict[tuple[float, float], tuple[float, float]]] = {}
    name = ""
    wanted = "memory MHz, core MHz, time ms, power W and, if known, energy mJ"

    def begin(program: str) -> str:
        """Begin a block under this name, or under ``name#2`` and on where it is taken."""
        names = chain([program], (f"{program}#{i}" for i in count(2)))
        full = next(name for name in names if name not in blocks)
        blocks[full] = {}
        return full

    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        place = f"{where}: line {number}"
        if not line or line.startswith("#"):
            continue
        if "," not in line:
            if not line.isprintable() or len(line) > 80 or _NUMBER.fullmatch(line):
                raise bad_value(place, "an application's name, or five numbers", line)
            name = begin(line)
            continue
        if not name:
            raise bad_value(place, "an application's name before its rows", line)
        try:
            memory, core, time_ms, power_w, *energy_mj = numbers = [
                float(part) for part in line.split(",")
            ]
        except ValueError:
            raise bad_value(place, wanted, line) from None
        if len(energy_mj) > 1:
            raise bad_value(place, wanted, line)
        if not all(0 < n < math.inf for n in numbers):
            raise bad_value(place, "finite numbers above zero", line)
        expected_mj = time_ms * power_w  # which is zero where both are next to nothing
        if energy_mj and not abs(energy_mj[0] - expected_mj) <= ENERGY_TOLERANCE * expected_mj:
            raise bad_value(place, "energy equal to power times time", line)
        clocks = memory * MHZ, core * MHZ
        if clocks in blocks[name]:
            name = begin(name.split("#")[0])
        blocks[name][clocks] = time_ms * 1e-3, power_w
    if empty := [name for name, rows in blocks.items() if not rows]:
        raise bad_value(f"{where}: {empty[0]}", "rows below the name", "none")
    return blocks
