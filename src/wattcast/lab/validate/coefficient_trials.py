"""Change each coefficient by a third and say whether the test that it names notices.

A coefficient names in ``noticed_by`` the test of what it means. Here it is raised and lowered by a
third, one at a time, and that test must fail at least once. A coefficient without such a test, or
whose test passes with both, is listed as unnoticed: it should go, or get a test. Golden tables do
not count: they notice every change and explain none.

Run in the repository: ``python -m wattcast.lab.validate.coefficient_trials [SUBJECT[.NAME] ...]``.
With ``--record`` the results go to ``coefficients/trials.csv``, and ``--summary`` says what that
table holds without a trial. The exit status is 1 if fewer than 95 % are noticed.

Each trial is a fork of this process, which has imported pytest and what it needs, but nothing of
Wattcast: the coefficients are read anew, with one of them changed, and only the named tests run.
With ``--quick`` all tests run in one session first, each again with its coefficients changed in
memory, and forks try what was not noticed so: what a module computed when it was imported, or kept,
has the old value there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattcast.coefficients import list_subjects
from wattcast.coefficients.coefficient_entries import (
    TrialRecord,
    is_noticed,
    read_subject,
    read_trials,
    write_trials,
)
from wattcast.coefficients.coefficient_files import FACTOR_VARIABLE, change_coefficient
from wattcast.core.errors import UnknownName

FACTORS = (1.33, 0.67)
LEAST_SHARE_NOTICED = 0.95
TESTS_PASSED = 0  # pytest's exit status
TESTS_FAILED = 1  # pytest's exit status where it ran tests and some of them failed
NO_RUN = 99  # the exit status of a trial that pytest did not end
# What tests import and a trial need not import again.
PRELOADED = ("pytest", "numpy", "msgspec", "typer", "scipy.optimize", "pyarrow")


@dataclass(frozen=True)
class Trial:
    """What happened to the test of one coefficient."""

    coefficient: str
    test: str
    noticed_factors: tuple[float, ...]
    remark: str

    @property
    def is_noticed(self) -> bool:
        """Whether the test failed with the coefficient changed."""
        return bool(self.noticed_factors)

    def __str__(self) -> str:
        verdict = "noticed" if self.is_noticed else "UNNOTICED"
        return f"{self.coefficient}: {verdict}, {self.remark}"


def list_coefficients(patterns: Iterable[str]) -> list[str]:
    """Return the coefficients of the subjects or names asked for, or all of them."""
    patterns = set(patterns)
    names = []
    for subject in list_subjects():
        for name in read_subject(subject):
            place = f"{subject}.{name}"
            if not patterns or subject in patterns or place in patterns:
                names.append(place)
    return names


class TrialRunner:
    """Runs the tests of coefficients; a test that passes unchanged is run unchanged once."""

    def __init__(self, tries_both: bool) -> None:
        self.tries_both = tries_both
        self._status_unchanged: dict[str, int] = {}

    def try_coefficient(self, place: str) -> Trial:
        """Run the test that a coefficient names with it raised and lowered by a third."""
        subject, _, name = place.partition(".")
        test = read_subject(subject)[name].noticed_by
        if not test:
            return Trial(place, test, (), "it names no test")
        if self._run_unchanged(test) != TESTS_PASSED:
            return Trial(place, test, (), f"{test} fails already or does not exist")
        noticed_factors: list[float] = []
        for factor in FACTORS:
            if run_tests(test, f"{place}={factor}") == TESTS_FAILED:
                noticed_factors.append(factor)
                if not self.tries_both:
                    break
        if not noticed_factors:
            return Trial(place, test, (), f"{test} passes either way")
        factors = " and ".join(str(factor) for factor in noticed_factors)
        return Trial(place, test, tuple(noticed_factors), f"times {factors} fails {test}")

    def _run_unchanged(self, test: str) -> int:
        if test not in self._status_unchanged:
            self._status_unchanged[test] = run_tests(test, "")
        return self._status_unchanged[test]


class SessionTrials:
    """A plugin of pytest that runs each test again with its coefficients changed in memory."""

    def __init__(self, places_by_test: Mapping[str, Sequence[str]], tries_both: bool) -> None:
        self.places_by_test = places_by_test
        self.tries_both = tries_both
        self.noticed_factors: dict[str, tuple[float, ...]] = {}

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Run a test unchanged, with each coefficient changed, and unchanged again."""
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}

        def run() -> None:
            pyfuncitem.obj(**arguments)

        run()
        test = pyfuncitem.nodeid
        if test not in self.places_by_test:  # an entry may name a test with all its parameters
            test = test.partition("[")[0]
        noticed = {}
        for place in self.places_by_test[test]:
            noticed[place] = self.noticed_factors.get(place) or self._try(place, run)
        run()  # a test that fails the second time says nothing about what was changed between
        self.noticed_factors |= noticed
        return True

    def _try(self, place: str, run: Callable[[], None]) -> tuple[float, ...]:
        """Return the factors with which a test fails."""
        noticed: list[float] = []
        for factor in FACTORS:
            if noticed and not self.tries_both:
                break
            try:
                with change_coefficient(place, factor):
                    try:
                        run()
                    except Exception:
                        noticed.append(factor)
            except UnknownName:  # the test loads no such coefficient
                break
        return tuple(noticed)


def try_in_session(places: Iterable[str], tries_both: bool) -> list[Trial]:
    """Try coefficients in one session of pytest; return those that were noticed."""
    places_by_test: dict[str, list[str]] = {}
    tests: dict[str, str] = {}
    for place in places:
        subject, _, name = place.partition(".")
        tests[place] = read_subject(subject)[name].noticed_by
        if tests[place] and " " not in tests[place]:
            places_by_test.setdefault(tests[place], []).append(place)
    if not places_by_test:
        return []
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "noticed.json"
        process = os.fork()  # so that what the session imports does not meet the forks to come
        if process == 0:
            plugin = SessionTrials(places_by_test, tries_both)
            pytest = importlib.import_module("pytest")
            options = ["-q", "-p", "no:cacheprovider", "-m", ""]
            status = int(pytest.main([*options, *places_by_test], plugins=[plugin]))
            answer.write_text(json.dumps(plugin.noticed_factors))
            sys.stdout.flush()
            os._exit(status)
        os.waitpid(process, 0)
        noticed_factors = json.loads(answer.read_text())
    trials = []
    for place, factors in noticed_factors.items():
        if factors:
            text = " and ".join(str(factor) for factor in factors)
            remark = f"times {text} fails {tests[place]}"
            trials.append(Trial(place, tests[place], tuple(factors), remark))
    return trials


def run_tests(tests: str, change: str) -> int:
    """Run tests, separated by blanks, in a fork with a coefficient changed.

    Return pytest's exit status.
    """
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os._exit(_run_in_fork(tests, change))
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def _run_in_fork(tests: str, change: str) -> int:
    """Forget Wattcast, change a coefficient and run pytest without a word."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.environ[FACTOR_VARIABLE] = change
        for module in list(sys.modules):
            if module.partition(".")[0] == "wattcast":
                del sys.modules[module]
        pytest = importlib.import_module("pytest")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", ""]
        return int(pytest.main([*options, *tests.split()]))
    except BaseException:
        traceback.print_exc()
        return NO_RUN


def update_records(trials: Iterable[Trial]) -> None:
    """Write what the trials found to the table, and drop what is no coefficient any more."""
    records = {f"{record.subject}.{record.name}": record for record in read_trials()}
    for trial in trials:
        subject, _, name = trial.coefficient.partition(".")
        value = read_subject(subject)[name].value
        records[trial.coefficient] = TrialRecord(
            subject,
            name,
            str(value),
            trial.test,
            trial.noticed_factors,
        )
    places = list_coefficients([])
    write_trials([records[place] for place in places if place in records])


def list_unnoticed(coefficients: Iterable[str]) -> list[str]:
    """Return those that no current record says a test notices."""
    records = read_trials()
    unnoticed = []
    for coefficient in coefficients:
        subject, _, name = coefficient.partition(".")
        if not is_noticed(subject, name, records):
            unnoticed.append(coefficient)
    return unnoticed


def summarise_records(names: Iterable[str]) -> int:
    """Say how many coefficients the recorded trials noticed, and name the others.

    A record counts while value and test of its coefficient are still those that were tried. Return
    the exit status.
    """
    records = {f"{record.subject}.{record.name}": record for record in read_trials()}
    noticed = 0
    total = 0
    for place in names:
        subject, _, name = place.partition(".")
        entry = read_subject(subject)[name]
        record = records.get(place)
        total += 1
        if record is None or not record.is_current(entry):
            print(f"{place}: not tried")
        elif record.noticed_factors:
            noticed += 1
        else:
            print(f"{place}: unnoticed")
    print(f"{noticed} of {total} are noticed ({noticed / max(total, 1):.1%})")
    return 0 if noticed >= LEAST_SHARE_NOTICED * total else 1


def main() -> int:
    """Try the coefficients named on the command line and print what noticed them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("coefficients", nargs="*", metavar="SUBJECT[.NAME]")
    parser.add_argument("--record", action="store_true", help="write the table of results")
    parser.add_argument("--summary", action="store_true", help="say what the table holds")
    parser.add_argument("--quick", action="store_true", help="try all in one session first")
    parser.add_argument("--unnoticed", action="store_true", help="those not noticed yet alone")
    parser.add_argument("--both", action="store_true", help="lower what was noticed when raised")
    arguments = parser.parse_args()
    if arguments.summary:
        return summarise_records(list_coefficients(arguments.coefficients))
    names = list_coefficients(arguments.coefficients)
    if arguments.unnoticed:
        names = list_unnoticed(names)
    trials = try_in_session(names, arguments.both) if arguments.quick else []
    if arguments.quick and arguments.record:
        update_records(trials)
    for module in PRELOADED:
        importlib.import_module(module)
    runner = TrialRunner(arguments.both)
    quickly_noticed = {trial.coefficient for trial in trials}
    for name in names:
        if name in quickly_noticed:
            continue
        trial = runner.try_coefficient(name)
        trials.append(trial)
        print(trial, flush=True)
    if arguments.record:
        update_records(trials)
    noticed = sum(trial.is_noticed for trial in trials)
    print(f"{noticed} of {len(names)} are noticed")
    return 0 if noticed >= LEAST_SHARE_NOTICED * len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
