"""Change each coefficient by a third and say which test notices it.

A coefficient that no test of its meaning notices is either without effect, and should go, or
without a test. Golden tables do not count: they notice every change and explain none.

Run in the repository: ``python -m wattcast.lab.validate.coefficient_trials [SUBJECT.NAME ...]``.
Each coefficient takes two runs of the tests of the room that uses it, so all of them take hours.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from wattcast.coefficients import list_subjects, read_subject
from wattcast.coefficients.coefficient_files import FACTOR_VARIABLE

FACTORS = (1.33, 0.67)
TESTS = Path("tests")
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


def list_coefficients() -> list[str]:
    """Return the names of all coefficients, such as ``governor.reaction``."""
    return [f"{subject}.{name}" for subject in list_subjects() for name in read_subject(subject)]


def find_tests(used_by: str) -> list[str]:
    """Return the test folders of the rooms that use a coefficient."""
    rooms = [path.strip().rpartition("/")[0] for path in used_by.split(",")]
    folders = [TESTS / room for room in rooms]
    while folders and not all(folder.is_dir() for folder in folders):
        folders = [folder if folder.is_dir() else folder.parent for folder in folders]
    return sorted({str(folder) for folder in folders})


def try_coefficient(place: str) -> list[str | None]:
    """Return, for each factor, the first test that fails with the coefficient changed by it."""
    subject, _, name = place.partition(".")
    folders = find_tests(read_subject(subject)[name].used_by)
    noticed_by: list[str | None] = []
    for factor in FACTORS:
        environment = os.environ | {FACTOR_VARIABLE: f"{place}={factor}"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", *folders]
        command += ["-m", "not slow and not realtime"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        failed = _FAILED.search(run.stdout)
        noticed_by.append(failed[1] if failed else None)
    return noticed_by


if __name__ == "__main__":
    for place in sys.argv[1:] or list_coefficients():
        higher, lower = try_coefficient(place)
        print(f"{place}: +33 % {higher or 'UNNOTICED'}; -33 % {lower or 'UNNOTICED'}", flush=True)
