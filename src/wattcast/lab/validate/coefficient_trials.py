"""Change each coefficient by a third and say whether the test that it names notices.

A coefficient names in ``noticed_by`` the test of what it means. Here it is raised and lowered by a
third, one at a time, and that test must fail at least once. A coefficient without such a test, or
whose test passes with both, is listed as unnoticed: it should go, or get a test. Golden tables do
not count: they notice every change and explain none.

Run in the repository: ``python -m wattcast.lab.validate.coefficient_trials [SUBJECT[.NAME] ...]``.
With ``--jobs 2`` two trials run at a time. The exit status is 1 if fewer than 95 % are noticed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from wattcast.coefficients import list_subjects
from wattcast.coefficients.coefficient_entries import read_subject
from wattcast.coefficients.coefficient_files import FACTOR_VARIABLE

FACTORS = (1.33, 0.67)
LEAST_SHARE_NOTICED = 0.95
TESTS_FAILED = 1  # pytest's exit status where it ran tests and some of them failed


@dataclass(frozen=True)
class Trial:
    """What happened to the test of one coefficient."""

    coefficient: str
    test: str
    is_noticed: bool
    remark: str

    def __str__(self) -> str:
        verdict = "noticed" if self.is_noticed else "UNNOTICED"
        return f"{self.coefficient}: {verdict}, {self.remark}"


def list_coefficients(patterns: list[str]) -> list[str]:
    """Return the coefficients of the subjects or names asked for, or all of them."""
    names = []
    for subject in list_subjects():
        for name in read_subject(subject):
            place = f"{subject}.{name}"
            if not patterns or subject in patterns or place in patterns:
                names.append(place)
    return names


def try_coefficient(place: str) -> Trial:
    """Run the test that a coefficient names with the coefficient raised and lowered by a third."""
    subject, _, name = place.partition(".")
    test = read_subject(subject)[name].noticed_by
    if not test:
        return Trial(place, test, False, "it names no test")
    if run_test(test, environment={}) != 0:
        return Trial(place, test, False, f"{test} fails already or does not exist")
    for factor in FACTORS:
        if run_test(test, environment={FACTOR_VARIABLE: f"{place}={factor}"}) == TESTS_FAILED:
            return Trial(place, test, True, f"times {factor} fails {test}")
    return Trial(place, test, False, f"{test} passes either way")


def run_test(test: str, environment: dict[str, str]) -> int:
    """Run one test, or several separated by blanks, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test.split()]
    variables = os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, check=False).returncode


def main() -> int:
    """Try the coefficients named on the command line and print what noticed them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("coefficients", nargs="*", metavar="SUBJECT[.NAME]")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    names = list_coefficients(arguments.coefficients)
    noticed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for trial in pool.map(try_coefficient, names):
            noticed += trial.is_noticed
            print(trial, flush=True)
    print(f"{noticed} of {len(names)} are noticed")
    return 0 if noticed >= LEAST_SHARE_NOTICED * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
