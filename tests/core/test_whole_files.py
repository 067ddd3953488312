"""Writing: whole or not at all, on the disk, one writer at a time, in private places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from wattcast.core.errors import BadInput, CannotWrite, Refused
from wattcast.core.measured_rows import KernelRow, RunInfo
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.row_tables import read_table, write_table
from wattcast.core.whole_files import (
    LOCK_FILE,
    append_whole,
    check_writable,
    hold_folder,
    private_cache,
    replace_whole,
    write_somewhere,
    write_whole,
)

DETAIL = {
    "op": "linear",
    "m": 8,
    "detail": {"note": 'a "quoted" \\ brace }', "list": [1, {"x": -1.5e-7}]},
}


def test_a_journal_cut_at_any_byte_loses_one_row_and_goes_on(tmp_path: Path) -> None:
    """Three of 195 cut points, those behind an inner brace, made the whole journal unreadable."""
    path = tmp_path / "rows.jsonl"
    for name in ("a", "b"):
        Journal(path).append(KernelRow(name, "burst", "linear", DETAIL, flags=("é", "x")))
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data)):
        path.write_bytes(data[:cut])
        assert [row["id"] for row in read_lines(path)][:1] == ["a"]
        Journal(path).append(KernelRow("c", "burst", "linear", DETAIL))
        assert [row["id"] for row in read_lines(path)] in (["a", "c"], ["a", "b", "c"]), cut


def test_file_and_folder_are_on_the_disk_before_the_name_changes(
    tmp_path: Path, monkeypatch
) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace(a, b))[1])
    write_whole(tmp_path / "new" / "file", b"data")
    assert seen == ["fsync", "rename", "fsync"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_writers_of_one_file_use_names_of_their_own(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replace_whole(target) as one, replace_whole(target) as other:
        assert one != other
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert target.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_pipe_a_link_and_a_private_file_stay_what_they_are(tmp_path: Path) -> None:
    """``--out /dev/null``, given by root, put a file in the place of the device; links and modes
    were lost too.
    """
    pipe, link, private, fresh = (tmp_path / name for name in ("pipe", "link", "private", "fresh"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe)
    write_whole(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    private.write_bytes(b"old")
    private.chmod(0o600)
    link.symlink_to("private")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (private.read_bytes(), private.stat().st_mode & 0o777) == (b"new", 0o600)
    before = os.umask(0o027)
    try:
        write_whole(fresh, b"new")
    finally:
        os.umask(before)
    assert fresh.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "private", "fresh"}


def test_a_full_disk_leaves_a_journal_as_it_was(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    append_whole(path, b"{}\n")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CannotWrite, match="No space left"):
        append_whole(path, b'{"a": 1}\n')
    assert path.read_bytes() == b"{}\n"


def test_a_result_that_cannot_be_had_again_finds_another_place(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    found = write_somewhere(tmp_path / "taken", b"samples")
    assert found.read_bytes() == b"samples"
    assert found.parent == tmp_path
    with pytest.raises(CannotWrite, match="directory"):
        check_writable(tmp_path / "taken")


def test_a_folder_has_one_writer_and_says_who(tmp_path: Path) -> None:
    with hold_folder(tmp_path):
        told = rf"another process \(process {os.getpid()} on .*delete .*{LOCK_FILE}"
        with pytest.raises(Refused, match=told), hold_folder(tmp_path):
            pass
        (tmp_path / LOCK_FILE).unlink()  # how a lock is broken
        with hold_folder(tmp_path):
            pass
    with hold_folder(tmp_path):
        pass


def test_a_writer_waits_for_the_one_before(tmp_path: Path) -> None:
    order: list[str] = []
    held = threading.Event()

    def first() -> None:
        with hold_folder(tmp_path):
            held.set()
            order.append("first in")
            threading.Event().wait(0.2)
            order.append("first out")

    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10.0)
    with hold_folder(tmp_path, wait_s=60.0):
        order.append("second in")
    thread.join()
    assert order == ["first in", "first out", "second in"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom wattcast.core.whole_files import hold_folder\n"
        + (f"hold_folder(Path({str(tmp_path)!r})).__enter__(); os.kill(os.getpid(), 9)")
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert (tmp_path / LOCK_FILE).exists()
    with hold_folder(tmp_path):
        pass


def test_a_damaged_table_is_told_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_table(path, [{"id": f"row-{i}", "power_w": 100.0 + i} for i in range(50)])
    assert read_table(path)[7] == {"id": "row-7", "power_w": 107.0}
    data = bytearray(path.read_bytes())
    length = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(4, length, 7):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=r"checksum|cannot be read"):
            read_table(path)


def test_the_cache_is_private_and_follows_no_link(tmp_path: Path, monkeypatch) -> None:
    """Machine code was kept in a folder under the temporary directory whose links and modes nobody
    looked at.
    """
    monkeypatch.setenv("WATTCAST_CACHE", str(tmp_path / "cache"))
    folder = private_cache("cubins")
    assert folder == tmp_path / "cache" / "cubins"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_cache("cubins") != folder
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    found = private_cache("cubins")
    assert found.resolve() != (tmp_path / "elsewhere").resolve()
    assert found.stat().st_mode & 0o777 == 0o700


def _campaign(folder: Path, number: int, rows: int = 12) -> None:
    run = f"run-{number}"
    Journal(folder / "runs.jsonl", key="run").append(RunInfo(run, "2026-11-16T00:00:00+00:00"))
    lines = [
        json.dumps(
            {"record": "row", "id": f"burst-{i}", "run": run, "kind": "burst", "family": "linear"}
            | {"operator": {"op": "linear", "m": i}, "latency_s": 1e-5}
        )
        for i in range(rows)
    ]
    append_whole(folder / "burst.jsonl", ("\n".join(lines) + "\n").encode())


def _pack_at_once(tmp_path: Path, processes: int, each: int) -> None:
    """Start ``processes`` together, each of which packs ``each`` campaigns one by one; every row is
    there once.
    """
    count = processes * each
    for number in range(count):
        _campaign(tmp_path / f"c{number}", number)
    code = (
        "import sys\nfrom pathlib import Path\nfrom wattcast.lab.campaigns.database_files import pack_database\n"
        "sys.stdin.readline()\n"
        "for name in sys.argv[2:]: pack_database([Path(name)], Path(sys.argv[1]))\n"
    )
    started = []
    for first in range(0, count, each):
        names = [str(tmp_path / f"c{number}") for number in range(first, first + each)]
        command = [sys.executable, "-c", code, str(tmp_path / "db"), *names]
        environment = os.environ | {"POLARS_MAX_THREADS": "1"}
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(500) for process in started] == [0] * processes
    found = [(row["id"], row["run"]) for row in read_table(tmp_path / "db" / "rows.parquet")]
    assert len(found) == len(set(found)) == 12 * count


def test_packs_at_once_lose_and_double_no_row(tmp_path: Path) -> None:
    """Two packs into one database: 0 of 5 trials right, 60 of 120 rows or an unreadable file."""
    _pack_at_once(tmp_path, processes=3, each=3)


@pytest.mark.slow
def test_a_hundred_packs_at_once_lose_and_double_no_row(tmp_path: Path) -> None:
    _pack_at_once(tmp_path, processes=100, each=1)
