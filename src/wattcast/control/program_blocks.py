"""Read seconds and watts of programs by memory and core clock, from text in blocks of one program
each.
"""

from __future__ import annotations

import math
import re
from itertools import count

from wattcast.core.errors import bad_value

MHZ = 1e6
ENERGY_TOLERANCE = 0.02  # of power times time
LONGEST_NAME = 80
ROW_FORM = "memory MHz, core MHz, time ms, power W and, if known, energy mJ"

Block = dict[tuple[float, float], tuple[float, float]]  # by memory and core Hz: seconds, watts

_NUMBER = re.compile(r"[-+.\deE]+")


def parse_program_blocks(text: str, where: str) -> dict[str, Block]:
    """Return seconds and watts of each program by memory and core clock in Hz.

    A program's name stands on a line of its own, then rows of memory MHz, core MHz, ms, W and,
    where known, mJ, which must be power times time. A program that starts over without a name is
    one of its own, called ``name#2``."""
    blocks: dict[str, Block] = {}
    name = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        place = f"{where}: line {number}"
        if not line or line.startswith("#"):
            continue
        if "," not in line:
            _check_name(line, place)
            name = _begin_block(blocks, line)
            continue
        if not name:
            raise bad_value(place, "an application's name before its rows", line)
        memory_mhz, core_mhz, time_ms, power_w = _parse_row(line, place)
        clocks_hz = (memory_mhz * MHZ, core_mhz * MHZ)
        if clocks_hz in blocks[name]:
            name = _begin_block(blocks, name.split("#")[0])
        blocks[name][clocks_hz] = (time_ms * 1e-3, power_w)
    for name, rows in blocks.items():
        if not rows:
            raise bad_value(f"{where}: {name}", "rows below the name", "none")
    return blocks


def _check_name(line: str, place: str) -> None:
    is_text = line.isprintable() and not _NUMBER.fullmatch(line)
    if not is_text or len(line) > LONGEST_NAME:
        raise bad_value(place, "an application's name, or five numbers", line)


def _begin_block(blocks: dict[str, Block], program: str) -> str:
    """Begin a block under this name, or under ``name#2`` and on where there is one already."""
    name = program
    numbers = count(2)
    while name in blocks:
        name = f"{program}#{next(numbers)}"
    blocks[name] = {}
    return name


def _parse_row(line: str, place: str) -> tuple[float, float, float, float]:
    """Return memory MHz, core MHz, ms and W of a row; raise an error where they cannot be right."""
    try:
        numbers = [float(part) for part in line.split(",")]
    except ValueError:
        raise bad_value(place, ROW_FORM, line) from None
    if len(numbers) not in (4, 5):
        raise bad_value(place, ROW_FORM, line)
    if not all(0 < number < math.inf for number in numbers):
        raise bad_value(place, "finite numbers above zero", line)
    memory_mhz, core_mhz, time_ms, power_w = numbers[:4]
    expected_mj = time_ms * power_w  # which is zero where both are next to nothing
    if len(numbers) == 5:
        difference_mj = abs(numbers[4] - expected_mj)
        if not difference_mj <= ENERGY_TOLERANCE * expected_mj:
            raise bad_value(place, "energy equal to power times time", line)
    return memory_mhz, core_mhz, time_ms, power_w
