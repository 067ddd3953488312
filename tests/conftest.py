"""Shared fixtures. Nothing here needs a GPU; what needs reference data skips, saying so."""

from __future__ import annotations

import fcntl
import gc
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.compile_once import compile_all

from wattcast.cli.command_output import Environment
from wattcast.cli.main import OBJECTS_BETWEEN_COLLECTIONS, main
from wattcast.core.strict_files import reference_folder

ROOT = Path(__file__).resolve().parent.parent
os.environ["WATTCAST_HOST"] = ""  # no host that was measured on this machine
os.environ["WATTCAST_CARDS"] = ""  # nor cards
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(
        threads, "1"
    )  # workers use all cores: threads of theirs wait for one another
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # processes that tests start need not compile the package again,
sys.dont_write_bytecode = (
    False  # nor the second half of the suite all tests: that takes longer than to import them
)
gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)  # as a command does
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell in the background hands on to its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
drawn = int(os.environ.get("WATTCAST_EXAMPLES", "50"))  # where a test names no number of its own
settings.register_profile(
    "wattcast", deadline=None, max_examples=drawn, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("wattcast")

# where tests wait for a stand-in card; a test that computes with PyTorch beside it does not wait
REALTIME_FILES = {
    "control": (
        *("test_manage_device", "test_card_states", "test_card_chaos", "test_card_leases"),
        *("test_first_run", "test_job_cards", "test_plane_sensitivity", "test_daemon_faults"),
        *("test_operator_files", "test_today_knobs"),
    ),
    "measure": (
        *("test_agree", "test_campaign", "test_card_loads", "test_chain", "test_engine_kernels"),
        *("test_model", "test_run", "test_sampler", "test_stack"),
    ),
    "microbench": ("test_micro_campaign",),
    "predictor": ("test_cold_start",),
    "web": (
        *("test_live_stream", "test_metrics_exporter", "test_page_refusals", "test_slow_clients"),
        "test_web_page",
    ),
}

QUICK_FOLDERS = {"cli", "contracts", "golden", "gpuwattch", "hardware"}
STANDINS = {"standin", "machine", "measured"}  # fixtures that are one


def has_realtime_tests(path: Path) -> bool:
    return path.stem in REALTIME_FILES.get(path.parent.name, ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other test files for a run of realtime tests alone: PyTorch takes longer than a
    card waits.
    """
    if config.option.markexpr != "realtime":
        return None
    if collection_path.is_dir():  # whose conftest.py would be imported too
        has_some = any(map(has_realtime_tests, collection_path.rglob("test_*.py")))
        return None if has_some else True
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not has_realtime_tests(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What watches the stand-in NVML library waits more than it computes: a run of its own, many
    tests at a time.

    Slow tests of the kind are not part of that run.
    """
    for item in items:
        cards = STANDINS & set(getattr(item, "fixturenames", ()))
        waits = cards and not item.get_closest_marker("slow")
        if waits and has_realtime_tests(item.path):
            item.add_marker("realtime")
        if item.get_closest_marker("realtime") and not has_realtime_tests(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} would run nowhere: name its file in REALTIME_FILES."
            )
    # Mypy takes a minute: not when others have ended. Who wants to be alone begins, while nobody
    # has to end first. Then come folders whose fixtures take long: a worker that took some of their
    # tests from another one at the end would start a server, a campaign or notebooks of its own.
    # What runs PyTorch's models stands together.
    items.sort(
        key=lambda item: (
            item.name != "test_style_and_types[mypy]",
            not is_alone(item),
            "measured"
            not in getattr(item, "fixturenames", ()),  # a campaign of half a minute, in one worker
            item.path.parent.name not in ("web", "microbench", "docs"),
            item.path.parent.name == "measure",
        )
    )
    # Each of some workers begins with a part. What the fastest one then takes from the end of
    # another's should be many quick tests: half of a file whose fixture takes long makes that
    # fixture twice.
    parts: dict[str, list[pytest.Item]] = {"others": [], "quick": [], "left out": []}
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("realtime")
        brief = item.path.parent.name in QUICK_FOLDERS or item.path.stem == "test_architecture"
        parts["left out" if slow else "quick" if brief else "others"].append(item)
    count, mixed = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), list[pytest.Item]()
    for part in range(count):
        for kind in (parts["others"], parts["quick"]):
            mixed += kind[len(kind) * part // count : len(kind) * (part + 1) // count]
    items[:] = [*mixed, *parts["left out"]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage among what tests make, not among tests and modules, which stay."""
    gc.freeze()


def is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


class SharedRoom:
    """A room that tests of all workers enter together, and one that is marked ``alone`` has for
    itself.

    Who wants to be alone holds the gate, which others pass only to enter the room, until it leaves
    the room, after the last of several such tests: between two of them all others would enter, and
    have to end first."""

    def __init__(self, folder: Path) -> None:
        self.gate, self.room = (
            os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("gate", "room")
        )
        self.alone = False

    def enter(self, alone: bool) -> None:
        if not self.alone:
            fcntl.flock(
                self.room, fcntl.LOCK_UN
            )  # nobody waits at the gate for the room that it is in
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            self.alone = alone
        if not self.alone:
            fcntl.flock(self.gate, fcntl.LOCK_UN)

    def leave(self) -> None:
        fcntl.flock(self.room, fcntl.LOCK_UN)
        fcntl.flock(self.gate, fcntl.LOCK_UN)
        self.alone = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Make fixtures of a test beside other tests; those of tests that follow one another alone are
    made alone.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    room = shared_room(item.config)
    room.enter(alone=False)
    try:
        return (yield)
    finally:
        if not (is_alone(item) and is_alone(nextitem)):
            room.leave()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Run a test that is marked ``alone`` while no other worker runs any."""
    if is_alone(item) and hasattr(item.config, "workerinput"):
        shared_room(item.config).enter(alone=True)


@cache
def shared_room(config: pytest.Config) -> SharedRoom:
    return SharedRoom(config._tmp_path_factory.getbasetemp().parent)  # of all workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Compile everything once, before workers do."""
    compile_all(config)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Iterator[int]:
    """Start a worker more than there are cores: some wait for a browser, a server or a command of
    their own.
    """
    return (yield) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep neighbours in one worker, which has their fixtures and imports already; idle workers
    take from others.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


EXPECTED_SKIPS = (  # reasons that may stand in a run that must not hide anything
    "no reference data",  # measurements of others, which are not part of the project
    "the EnergAIzer artifact is not here",
    "there is a GPU",
    "takes nothing that could be wrong",
    "no hipcc",  # the compiler for AMD GPUs, with -m slow
    "no Docker",  # containers are built with -m slow, where Docker runs
    *("no promtool", "no helm", "no ai-dynamo"),  # the workflow's job `operators` has them
)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run under ``WATTCAST_NO_SKIPS=1`` that skipped a test for a reason nobody expected.

    Under ``WATTCAST_NO_SKIPS=all`` none is expected. A missing browser, compiler or package would otherwise turn a part of the suite off without a
    word."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        os.environ.get("WATTCAST_NO_SKIPS") not in ("1", "all")
        or reporter is None
        or hasattr(session.config, "workerinput")
    ):
        return
    reasons = {
        str(report.longrepr[-1]) for report in reporter.stats.get("skipped", []) if report.longrepr
    }
    are_expected = () if os.environ["WATTCAST_NO_SKIPS"] == "all" else EXPECTED_SKIPS
    hidden = sorted(r for r in reasons if not any(expected in r for expected in are_expected))
    for reason in hidden:
        reporter.write_line(f"not tested, and it should have been: {reason}", red=True)
    if hidden and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was not tested, and why: a green run without a browser or data has not
    tested all.
    """
    skipped = [
        str(report.longrepr[-1])
        for report in terminalreporter.stats.get("skipped", [])
        if report.longrepr
    ]
    for reason, count in Counter(skipped).most_common():
        terminalreporter.write_line(
            f"not tested: {count} tests ({reason.removeprefix('Skipped: ')})", yellow=True
        )


@contextmanager
def enter_shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """Lock a folder that all workers of a run share; one of them fills it, others find it full."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def shared_folder(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], AbstractContextManager[Path]]:
    """``with shared_folder("name") as folder`` -> a folder of all workers, locked."""
    return partial(enter_shared_folder, tmp_path_factory)


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
