"""Traces: any block size, any damage. Good samples before a fault are kept and its place is named."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwattch.conftest import COLUMNS, TraceMaker, sample_rows, trace_text
from wattcast.core.errors import BadInput, MissingEvents, UnknownName
from wattcast.lab.gpuwattch import trace_reading
from wattcast.lab.gpuwattch.trace_reading import (
    CYCLES,
    SimulatorDialect,
    TraceFault,
    TraceFile,
    TraceSampling,
    open_metric_trace,
    open_trace,
)
from wattcast.lab.gpuwattch.trace_run import run_trace


def read(trace: TraceFile, block_byte: int = 1 << 20) -> tuple[np.ndarray, str]:
    """All good rows, and the complaint if there was one."""
    rows: list[np.ndarray] = []
    good, said = None, ""
    try:
        for block in trace.blocks(block_byte):
            assert block.first == sum(len(r) for r in rows)
            assert block.text.count(b"\n") == len(block)
            rows.append(block.value)
    except TraceFault as fault:
        good, said = fault.rows, str(fault)
    assert good in (None, sum(len(r) for r in rows))
    return np.concatenate([np.zeros((0, len(trace.columns))), *rows]), said


@given(
    block_byte=st.integers(50, 5000),
    count=st.integers(0, 40),
    members=st.booleans(),
    comma=st.booleans(),
)
def test_any_block_size_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    block_byte: int,
    count: int,
    members: bool,
    comma: bool,
) -> None:
    rows = sample_rows(count, seed=count)
    text = trace_text(rows) if comma else trace_text(rows).replace(",\n", "\n")
    path = tmp_path_factory.mktemp("t") / "m.log"
    lines = text.encode().splitlines(keepends=True)
    path.write_bytes(b"".join(gzip.compress(line) for line in lines) if members else text.encode())
    found, fault = read(open_trace(path), block_byte)
    assert fault == ""
    assert (found == rows).all()
    assert found.shape == (count, 30)


def test_windows_line_ends_and_a_missing_last_one(tmp_path: Path) -> None:
    rows = sample_rows(5)
    path = tmp_path / "m.log"
    path.write_bytes(trace_text(rows).rstrip("\n").replace("\n", "\r\n").encode())
    found, fault = read(open_trace(path))
    assert fault == ""
    assert (found == rows).all()


def edited(rows: np.ndarray, line: int, new: str) -> bytes:
    lines = trace_text(rows).splitlines()
    lines[line - 1] = new
    return ("\n".join(lines) + "\n").encode()


GOOD = ",".join(["1.0"] * 30) + ","


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (GOOD + "1.0,", "expected 30 counters, got 31"),
        (",".join(["1.0"] * 29) + ",", "expected 30 counters, got 29"),
        ("", "empty line"),
        (GOOD.replace("1.0", "one", 1), "expected numbers, got 'one'"),
        (GOOD.replace("1.0", "nan", 1), "finite counters"),
        (GOOD.replace("1.0", "inf", 1), "finite counters"),
        (GOOD.replace("1.0", "-5", 1), "zero or more, got -5"),
        (GOOD.replace("1.0", '"1"', 1), "expected numbers"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_row_names_its_line_and_keeps_the_rows_before(
    tmp_path: Path, line: str, complaint: str, compressed: bool
) -> None:
    rows = sample_rows(20)
    data = edited(rows, 12, line)
    path = tmp_path / "m.log"
    path.write_bytes(gzip.compress(data) if compressed else data)
    found, fault = read(open_trace(path), 2000)
    assert complaint in fault
    assert "m.log: line 12" in fault
    assert "10 samples before it are good" in fault
    assert (found == rows[:10]).all()


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.97])
@pytest.mark.parametrize("members", [False, True])
def test_a_truncated_gzip_keeps_its_good_samples(tmp_path: Path, cut: float, members: bool) -> None:
    rows = sample_rows(200)
    lines = trace_text(rows).encode().splitlines(keepends=True)
    data = b"".join(map(gzip.compress, lines)) if members else gzip.compress(b"".join(lines))
    path = tmp_path / "m.log.gz"
    path.write_bytes(data[: int(cut * len(data)) + 3])
    found, fault = read(open_trace(path))
    assert "break off at byte" in fault
    assert 20 < len(found) < 200
    assert (found == rows[: len(found)]).all()


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    """One member a row, as the simulator writes: the rows before the damaged member are whole."""
    rows = sample_rows(50)
    members = [gzip.compress(line) for line in trace_text(rows).encode().splitlines(keepends=True)]
    members[31] = members[31][:20] + b"\xff\xff\xff\xff" + members[31][24:]
    path = tmp_path / "m.log.gz"
    path.write_bytes(b"".join(members))
    found, fault = read(open_trace(path))
    assert "damaged gzip near byte" in fault
    assert len(found) >= 30
    assert (found[:30] == rows[:30]).all()


def test_garbage_after_the_last_member_is_named(tmp_path: Path) -> None:
    rows = sample_rows(5)
    path = tmp_path / "m.log.gz"
    path.write_bytes(gzip.compress(trace_text(rows).encode()) + b"garbage")
    found, fault = read(open_trace(path))
    assert "damaged gzip" in fault
    assert (found == rows).all()


@pytest.mark.parametrize("members", [False, True])
def test_a_trace_beyond_the_limit_keeps_its_first_samples(
    write_trace: TraceMaker, monkeypatch: pytest.MonkeyPatch, members: bool
) -> None:
    rows = sample_rows(40)
    trace = open_trace(write_trace(rows, members=members))
    monkeypatch.setattr(trace_reading, "MAX_COUNTER_TRACE_BYTE", len(trace_text(rows)) // 2)
    found, fault = read(trace, 1000)
    assert "bytes when unpacked, got 'more'" in fault
    assert 0 < len(found) < 40
    assert (found == rows[: len(found)]).all()


def test_a_gzip_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    engine = zlib.compressobj(9, wbits=31)
    bomb = engine.compress(b"TOT_INST\n") + b"".join(
        engine.compress(b"0" * (1 << 20)) for _ in range(120)
    )
    path = tmp_path / "bomb.gz"
    path.write_bytes(bomb + engine.flush())
    tracemalloc.start()
    with pytest.raises(BadInput, match=r"at most 400:1|lines of at most"):
        for _ in open_trace(path).blocks():
            pass
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_a_bomb_of_short_lines_is_refused_too(tmp_path: Path) -> None:
    engine = zlib.compressobj(9, wbits=31)
    bomb = engine.compress(b"TOT_INST\n") + b"".join(
        engine.compress(b"\n" * (1 << 20)) for _ in range(64)
    )
    path = tmp_path / "bomb.gz"
    path.write_bytes(bomb + engine.flush())
    with pytest.raises(BadInput):
        for _ in open_trace(path).blocks():
            pass


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no line at all"),
        (b"a,b,a\n", "a twice"),
        (b"a,,c\n", "a name for every column"),
        (b"\xff\xfe\n", "no text"),
        (b"x" * (3 << 20), "at most"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=complaint):
        open_trace(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        open_trace(tmp_path / "none.log")


def test_unknown_and_missing_counters_are_named(tmp_path: Path, write_trace: TraceMaker) -> None:
    strange = [*COLUMNS[:-1], "TOT_INTS"]
    with pytest.raises(UnknownName, match=r"TOT_INTS.*TOT_INST"):
        open_metric_trace(write_trace(sample_rows(2), strange), SimulatorDialect.GPUWATTCH)
    fewer = [c for c in COLUMNS if c != "TC_H"]
    with pytest.raises(MissingEvents, match="TC_H are missing"):
        open_metric_trace(write_trace(sample_rows(2)[:, :29], fewer), SimulatorDialect.GPUWATTCH)
    with pytest.raises((UnknownName, MissingEvents)):
        open_metric_trace(write_trace(sample_rows(2)), SimulatorDialect.ACCELWATTCH)


def test_columns_may_stand_in_any_order(write_trace: TraceMaker) -> None:
    rows = sample_rows(4)
    order = np.random.default_rng(3).permutation(30)
    mixed = open_metric_trace(
        write_trace(rows[:, order], [COLUMNS[i] for i in order]), SimulatorDialect.GPUWATTCH
    )
    plain = open_metric_trace(write_trace(rows, name="p.log"), SimulatorDialect.GPUWATTCH)
    sampling = TraceSampling(500, 1e9)
    a, b = (next(iter(t.blocks())) for t in (mixed, plain))
    first, second = mixed.activity(a, sampling), plain.activity(b, sampling)
    for event in second.events:
        assert (first.event_values(event) == second.event_values(event)).all()


def test_a_sample_without_time_is_a_fault_at_its_line(write_trace: TraceMaker, demo_run) -> None:
    rows = np.column_stack([sample_rows(10), np.full(10, 500.0)])
    rows[6, -1] = 0.0
    path = write_trace(rows, [*COLUMNS, CYCLES])
    result = run_trace(demo_run(path))
    assert result.fault is not None
    assert "line 8" in str(result.fault)
    assert result.samples == 6


@pytest.mark.parametrize(
    ("cycles", "clock"), [(0, 1e9), (500, 0.0), (float("nan"), 1e9), (500, float("inf"))]
)
def test_samples_that_last_no_time_are_refused(cycles: float, clock: float) -> None:
    with pytest.raises(BadInput, match="above zero"):
        TraceSampling(cycles, clock)
