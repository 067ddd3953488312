"""List the rows of the ledger that commands predict, and say of the other sets what they judge.

``list_judged_rows`` is the place for a new set: rows with the command that predicts each. A set
that by its nature judges something else has a line in ``other_sets.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from wattcast.calibrate import whole_models
from wattcast.core.errors import WattcastError, unknown_name
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.validate.engine_commands import make_engine_rows
from wattcast.lab.validate.model_checks import (
    FURTHER_STEPS,
    ask_model_row,
    load_further_records,
)
from wattcast.lab.validate.public_checks.public_sets import list_public_rows
from wattcast.lab.validate.typed_commands import JudgedRow, find_rows

GPUS = ("h200",)  # with measured engines and whole models that ship
SIDES = {False: "fitting models", True: "held-out models and loads"}
BOARD_TOLD = {True: "held-out models, board told"}


@dataclass(frozen=True)
class OtherSet:
    """What a set judges that no command predicts row by row, and the command nearest to it."""

    pattern: str  # of the names of sets
    question: str  # in a word
    why: str
    command: str  # empty where there is none

    @property
    def sentence(self) -> str:
        """What to tell a reader."""
        return f"{self.why} Nearest command: `{self.command}`." if self.command else self.why


def list_judged_rows(reference: Path | None) -> list[JudgedRow]:
    """Return every measured row that a command predicts, with the command, in the order of the
    ledger.
    """
    rows: list[JudgedRow] = []
    for gpu in GPUS:
        try:
            records = load_engine_records(gpu)
            rows += make_engine_rows(records, gpu, SIDES)
            for board in list_boards(gpu):
                rows += make_engine_rows(records, gpu, BOARD_TOLD, board)
            for steps in FURTHER_STEPS:
                further = load_further_records(gpu, steps)
                for board in list_boards(gpu):
                    rows += make_engine_rows(further, gpu, steps.sides, board)
            rows += [ask_model_row(case, gpu) for case in whole_models.load_models(gpu)]
        except WattcastError:  # a database without them; the ledger says so
            continue
    return rows + list_public_rows(reference)


def list_other_sets() -> list[OtherSet]:
    """Return what the other sets judge."""
    rows = read_shipped_table("wattcast.lab.validate", "other_sets.csv")
    return [OtherSet(row["set"], row["asked"], row["why"], row["command"]) for row in rows]


def find_other_set(name: str) -> OtherSet | None:
    """Return what a set judges that no command predicts; None where it is not in the list."""
    return next((one for one in list_other_sets() if fnmatchcase(name, one.pattern)), None)


def explain_rows(name: str, reference: Path | None) -> list[JudgedRow] | OtherSet:
    """Return the judged rows of a set, or one row, by name; or what a set without commands
    judges.
    """
    rows = list_judged_rows(reference)
    matching_rows = find_rows(rows, name)
    if matching_rows:
        return matching_rows
    other_sets = list_other_sets()
    folded = name.lower()
    for other_set in other_sets:
        if fnmatchcase(folded, other_set.pattern.lower()) or folded in other_set.pattern.lower():
            return other_set
    names = [
        *dict.fromkeys(row.where for row in rows),
        *(other_set.pattern for other_set in other_sets),
    ]
    do = "`wattcast lab validate` lists the sets."
    raise unknown_name("row or set of the ledger", name, names, do)
