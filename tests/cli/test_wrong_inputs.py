"""Every wrong input gets one sentence, exit code 2 and no traceback, before anything is computed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("wrong_inputs.txt").read_text(encoding="utf-8")
ROWS = [tuple(line.split(" | ")) for line in TABLE.splitlines() if not line.startswith("#")]


def test_the_table_is_long_and_every_command_is_in_it() -> None:
    from wattcast.cli.main import walk_commands

    assert len(ROWS) >= 170
    for words, _ in walk_commands():
        assert any(f"{line} ".startswith(f"{words} ") for line, _ in ROWS), words


@pytest.mark.parametrize(("line", "says"), ROWS, ids=[line for line, _ in ROWS])
def test_a_wrong_input_gets_one_sentence(
    call, tmp_path: Path, monkeypatch, line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("workload,latency_ms\n")
    done = call(*shlex.split(line))
    said = done.err or done.out  # a group without a command prints its help
    assert done.code == 2, said
    assert says in said
    assert "Traceback" not in said
    assert "internal error" not in said
    assert done.err.count("\n") <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
