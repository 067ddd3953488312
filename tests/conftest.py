"""Shared fixtures. Nothing here needs a GPU; what needs reference data skips, saying so."""

from __future__ import annotations

import gc
import io
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from wattcast.cli.main import main
from wattcast.cli.shared_options import Environment
from wattcast.core.strict_files import reference_folder

ROOT = Path(__file__).resolve().parent.parent
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")  # workers use all cores: threads of theirs wait for one another
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # processes that tests start need not compile the package again
gc.disable()  # imports of a thousand modules leave no garbage: without it, collecting tests takes a fifth less
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell in the background hands on to its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("wattcast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wattcast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What polls the stand-in NVML library runs in real time: a run of its own, beside nothing else.

    Slow tests of the kind are not part of that run.
    """
    for item in items:
        if "standin" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("slow"):
            item.add_marker("realtime")


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make, not in what was imported, and less often than Python does."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


EXPECTED_SKIPS = (  # reasons that may stand in a run that must not hide anything
    "no reference data",  # measurements of others, which are not part of the project
    "the EnergAIzer artifact is not here",
    "there is a GPU",
    "takes nothing that could be wrong",
    "no hipcc",  # the compiler for AMD GPUs, with -m slow
    "no Docker",  # containers are built with -m slow, where Docker runs
)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run under ``WATTCAST_NO_SKIPS=1`` that skipped a test for a reason nobody expected.

    A missing browser, compiler or package would otherwise turn a part of the suite off without a word.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("WATTCAST_NO_SKIPS") != "1" or reporter is None or hasattr(session.config, "workerinput"):
        return
    reasons = {str(report.longrepr[-1]) for report in reporter.stats.get("skipped", []) if report.longrepr}
    hidden = sorted(r for r in reasons if not any(expected in r for expected in EXPECTED_SKIPS))
    for reason in hidden:
        reporter.write_line(f"not tested, and it should have been: {reason}", red=True)
    if hidden and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was not tested, and why: a green run without a browser or data has not tested all."""
    skipped = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr]
    for reason, count in Counter(skipped).most_common():
        terminalreporter.write_line(f"not tested: {count} tests ({reason.removeprefix('Skipped: ')})", yellow=True)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of independent measurements, or a skip that says it is not here."""
    folder = reference_folder(os.environ, ROOT)
    if folder is None:
        pytest.skip("no reference data: set WATTCAST_REFERENCE or put it in ../shared/reference")
    return folder


class Called:
    """What a command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(scope="session")
def call():
    """Call the command line in this process: ``call("predict", ...)`` -> code, out, err."""

    def run(*argv: str) -> Called:
        env = Environment(io.StringIO(), io.StringIO(), dict(os.environ))
        code = main(argv, env)
        return Called(int(code), env.stdout.getvalue(), env.stderr.getvalue())

    return run
