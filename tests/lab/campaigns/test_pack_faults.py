"""``lab pack`` and ``lab pack-engine`` under a fault at every allocation and every disk call.

Each table is the old one or the new one, whole, nothing is left beside it, the folder is not held
any longer, and the same command does the rest once the fault is over.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.standin.failing_calls import FailingDisk, FailingSites, Site

pytest.importorskip("polars", reason="no polars: pip install 'wattcast[measure]'")

from wattcast.core.errors import ExitCode
from wattcast.core.whole_files import LOCK_FILE

pytestmark = [  # a fault between opening a file and closing it leaves it to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
FILES = (
    *("lab/campaigns/database_files", "lab/campaigns/nsight_counters", "lab/fit/engine_records"),
    *("core/row_journals", "core/measured_rows", "core/row_tables", "core/column_ranges"),
    *("core/whole_files", "core/regular_files"),
)
COMMANDS = {
    "pack": ("lab", "pack", "rows", "--out", "out"),
    "pack-engine": ("lab", "pack-engine", "engine", "--out", "out"),
}
SCOPES = [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.slow)]


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_campaign(latency_s: float) -> None:
    """Write what ``lab kernels`` and ``lab models`` leave, with rows of every kind."""
    operator = {"op": "linear", "m": 8, "n": 8, "k": 8}
    write_lines(
        Path("rows/rows.jsonl"),
        {"record": "run", "run": "r1", "date": "2026-11-16T00:00:00+00:00"},
        {
            **{"record": "row", "id": "burst-1", "run": "r1", "kind": "burst"},
            **{"family": "linear", "latency_s": latency_s, "operator": operator},
        },
        {"record": "names", "spec": "linear", "names": ["gemm_kernel"]},
        {
            **{"record": "model", "id": "m1", "run": "r1", "model": "gpt2", "phase": "prefill"},
            **{"batch": 1, "dtype": "bf16", "attention": "flash", "stack": "eager", "graph": False},
        },
        {
            **{"record": "chain", "id": "c1", "run": "r1", "name": "x"},
            **{"specs": ["a"], "alone_s": [latency_s]},
        },
    )


def write_engine(latency_s: float) -> None:
    """Write what ``measure engine`` leaves."""
    write_lines(Path("engine/runs.jsonl"), {"run": "r1", "card_uuid": "GPU-1"})
    write_lines(
        Path("engine/rows.jsonl"),
        {
            **{"id": "m/a", "kind": "prefill", "model": "m", "run": "r1", "held_out": False},
            **{"latency_s": latency_s, "flags": []},
        },
        {"id": "m/t", "kind": "traffic", "model": "m", "run": "r1", "ttft_s": {"p50": 0.25}},
    )
    write_lines(Path("engine/requests.jsonl"), {"run": "m/t", "number": 0, "arrival_s": 0.5})
    write_lines(
        Path("engine/steps.jsonl"), {"run": "m/t", "begin_s": [0.0, 1.0], "device_s": [None, 0.5]}
    )


class Packing:
    """A database that a first campaign stands in, and a command that adds the second one."""

    def __init__(self, call: Any, name: str) -> None:
        self.call = call
        self.argv = COMMANDS[name]
        self.write_journals(1e-5)
        self.pack()
        self.before = self.read_tables()
        self.write_journals(2e-5)
        self.journals = read_files("rows") | read_files("engine")
        self.pack()
        self.after = self.read_tables()
        assert len(self.before) >= 3
        assert all(self.after[name] != data for name, data in self.before.items() if is_new(name))

    def write_journals(self, latency_s: float) -> None:
        write_campaign(latency_s)
        write_engine(latency_s)

    def pack(self, story: str = "") -> None:
        done = self.call(*self.argv)
        assert done.code == ExitCode.OK, f"{story}: {done.err}"

    def read_tables(self) -> dict[str, bytes]:
        return {name: data for name, data in read_files("out").items() if LOCK_FILE not in name}

    def run(
        self, failing: AbstractContextManager[None], story: Callable[[], str], lasts: bool = False
    ) -> None:
        """Pack with a fault, and hold what is promised.

        A disk that does not recover keeps what was written beside a table, which nobody can remove.
        """
        for name, data in self.before.items():
            Path(name).write_bytes(data)
        handles = list_handles()
        with failing:
            done = self.call(*self.argv)
        for handle in list_handles() - handles:
            os.close(handle)  # the process would have ended

        assert done.code in (ExitCode.OK, ExitCode.FAILED, ExitCode.BAD_INPUT, ExitCode.REFUSED)
        assert (done.code == ExitCode.OK) == (not done.err), f"{story()}: {done.err}"
        assert "internal error" not in done.err, f"{story()}: {done.err}"
        assert "Traceback" not in done.err, f"{story()}: {done.err}"
        if lasts:
            for path in Path("out").glob(".*.parquet.*"):
                path.unlink()
        tables = self.read_tables()
        assert set(tables) == set(self.before), f"{story()}: {done.err}"
        for name, data in tables.items():
            assert data in (self.before[name], self.after[name]), f"{story()}: {name}"
        if done.code == ExitCode.OK:
            assert tables == self.after, story()
        assert read_files("rows") | read_files("engine") == self.journals, story()

        self.pack(story())
        assert self.read_tables() == self.after, story()


def is_new(name: str) -> bool:
    """Tell whether the second campaign changes a table."""
    return Path(name).stem in ("rows", "chains", "engine_steps")


def read_files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def list_handles() -> set[int]:
    """Return the handles of this process that lie in its folder, such as a lock that is held."""
    handles = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{os.getcwd()}/"):
                handles.add(int(name))
        except OSError:
            continue
    return handles


@pytest.fixture
def packing(
    request: pytest.FixtureRequest, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Packing:
    monkeypatch.chdir(tmp_path)
    return Packing(call, request.param)


@pytest.mark.parametrize("packing", COMMANDS, indirect=True)
@pytest.mark.parametrize("is_thorough", SCOPES)
def test_no_memory_at_any_site(packing: Packing, is_thorough: bool) -> None:
    """A MemoryError was an internal error, and one at a bad moment left a hidden file behind."""
    sites = FailingSites(*FILES)

    def run(site: Site | None, turn: int) -> None:
        packing.run(sites.failing_at(site, turn, here=True), lambda: f"no memory at {site}, {turn}")

    run(None, 0)
    faults = sites.list_faults()
    assert len(faults) > 300
    step = 1 if is_thorough else len(faults) // 8
    for site, turn in faults[::step]:
        run(site, turn)
        assert sites.has_failed, site
    print(f"{len(faults)} faults, {len(faults[::step])} tried")


@pytest.mark.parametrize("packing", COMMANDS, indirect=True)
@pytest.mark.parametrize("is_thorough", SCOPES)
@pytest.mark.parametrize("code", [pytest.param(errno.EIO, marks=pytest.mark.slow), errno.ENOSPC])
def test_a_disk_that_fails_at_any_call(
    packing: Packing, is_thorough: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading fails as well as writing, once or from some moment on."""
    disk = FailingDisk(monkeypatch, "out", "rows", "engine", os.getcwd())

    def run(number: int, is_lasting: bool) -> None:
        failing = disk.failing_at(number, code, is_lasting)
        packing.run(failing, lambda: f"disk: {disk.failed_at}", is_lasting)

    run(0, False)
    count = disk.count
    assert count > 20
    step = 1 if is_thorough else count // 10
    for place, number in enumerate(range(1, count + 1, step)):
        for is_lasting in (False, True) if is_thorough else (place % 2 == 1,):
            run(number, is_lasting)
