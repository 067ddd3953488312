"""A full or failing disk at every write of every command that writes: an exit code, a sentence, and the old files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from wattcast.core.measured_rows import read_table
from wattcast.gpuwattch.architecture import write_architecture
from wattcast.gpuwattch.component_build import demo_architecture, demo_energies
from wattcast.gpuwattch.energy_table import format_energy_table
from wattcast.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

PREDICT = ("gpt2", "--gpu", "h100-sxm", "--batch", "1", "--seq", "64")
COMMANDS = {
    "plot": ("predict", *PREDICT, "--plot", "out/plot.svg"),
    "export": ("export", "grafana", "--out", "out/board.json"),
    "designs": ("explore", "designs", *PREDICT, "--vary", "sm_count=66,132", "--out", "out/designs.parquet"),
    "designs csv": ("explore", "designs", *PREDICT, "--vary", "sm_count=66,132", "--out", "out/designs.csv"),
    "export table": ("manage", "simulate", "--export", "out/table.csv"),
    "simulate": (
        *("simulate", "gpt2", "--gpu", "h100-sxm", "--rate", "4/s", "--seconds", "1", "--prompt", "16"),
        *("--output", "4", "--out", "out/requests.parquet"),
    ),
    "pack": ("lab", "pack", "campaign", "--out", "out"),
    "workload": ("models", "save", "gpt2", "out/workload.json", "--seq", "64"),
    "energies": ("gpus", "show", "chip.xml", "--energies", "--save", "out/energies.yaml"),
    "microbench": ("lab", "microbench", "--show", "h200", "--write", "out/page.md"),
    "counters": (
        *("lab", "fit", "counters", "counters.csv", "--columns", "columns.yaml", "--folds", "3", "--no-advice"),
        *("--out", "out/model.yaml"),
    ),
    "trace": (
        *("lab", "power-trace", "metric.log", "--config", "chip.xml", "--energies", "table.yaml"),
        *("--sample-cycles", "500", "--out", "out"),
    ),
    "calibrate": ("calibrate", "--gpu", "a100-sxm", "rows.csv", "--out", "out"),
    "report": ("report", *PREDICT, "--out", "out/report.html"),
}
SLOW = ("calibrate", "counters", "export table", "microbench", "report", "trace")


def _campaign(folder: Path) -> None:
    folder.mkdir()
    rows = [
        {"record": "run", "run": "r1", "date": "2026-11-16T00:00:00+00:00"},
        {"record": "row", "id": "burst-1", "run": "r1", "kind": "burst", "family": "linear", "latency_s": 1e-5}
        | {"operator": {"op": "linear", "m": 8, "n": 8, "k": 8}},
        {"record": "model", "id": "m1", "run": "r1", "model": "gpt2", "phase": "prefill", "batch": 1, "dtype": "bf16"}
        | {"attention": "flash", "stack": "eager", "graph": False},
        {"record": "chain", "id": "c1", "run": "r1", "name": "x", "specs": ["a"], "alone_s": [1e-6]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _instruments(folder: Path) -> None:
    """Files that commands of instruments read: a chip with its energies and a trace, counters, measured models."""
    write_architecture(demo_architecture(), folder / "chip.xml")
    (folder / "table.yaml").write_bytes(format_energy_table(demo_energies()))
    columns = [c.column for c in dialect_counters(SimulatorDialect.GPUWATTCH)]
    rows = ["".join(f"{1.0 + 0.01 * i + j:f}," for j in range(len(columns))) for i in range(6)]
    (folder / "metric.log").write_text("\n".join([",".join(columns), *rows]) + "\n")
    (folder / "columns.yaml").write_text(
        "benchmark: work\npower: {column: watts, unit: W}\nclock: {column: core, unit: MHz}\n"
        "memory_clock: {column: memory, unit: MHz}\ndefault: {clock: 1000 MHz, memory_clock: 2000 MHz}\n"
        "events:\n  int_busy_cycle: {column: int, rate: true}\n  dram_busy_cycle: {column: dram, rate: true}\n"
    )
    counted = ["work,watts,core,memory,int,dram"]
    for i in range(48):
        core, memory, integer, dram = 700 + 100 * (i % 4), 1600 + 400 * (i % 3 % 2), i % 7 / 10, i % 5 / 8
        counted.append(
            f"b{i % 12},{30 + core * (0.05 + 0.1 * integer) + memory * 0.03 * dram},{core},{memory},{integer},{dram}"
        )
    (folder / "counters.csv").write_text("\n".join(counted) + "\n")
    names = ["workload", "batch", "seq", "attention", "head", "latency_ms", "energy_j", "clock_mhz", "temperature_c"]
    models = [
        ["gpt2", 8, 128, "eager", "none", 6.0, 1.5, 1200, 45],
        ["gpt2", 32, 512, "eager", "none", 60, 17, 1200, 45],
    ]
    (folder / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in [names, *models]) + "\n")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".wattcast.lock"
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in COMMANDS])
def test_the_nth_write_may_fail(name: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``measure kernels`` exited with 0 after a traceback, and half a table stood where a whole one had been."""
    monkeypatch.chdir(tmp_path)
    fsync, calls, fails_at = os.fsync, [0], [0]

    def count_or_fail(fd: int) -> None:  # every file that is written goes through here
        calls[0] += 1
        if calls[0] == fails_at[0]:
            code = errno.EIO if calls[0] % 2 else errno.ENOSPC
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", count_or_fail)
    _campaign(tmp_path / "campaign")
    _instruments(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    assert call(*COMMANDS[name]).code == 0
    whole, writes = _files(out), calls[0]
    assert writes
    old = dict.fromkeys(whole, b"what stood there before") if name != "pack" else whole
    for fails_at[0] in range(1, writes + 1):
        shutil.rmtree(out)
        for path, data in old.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_bytes(data)
        calls[0] = 0
        found = call(*COMMANDS[name])
        after = {path: data for path, data in _files(out).items() if ".parts/" not in path}
        if found.code == 0:  # the folder could not be synchronised: the file itself is there, whole
            assert set(after) == set(whole)
            continue
        assert "internal error" not in found.err
        assert "Traceback" not in found.err
        assert "No space left" in found.err or "Input/output error" in found.err
        assert set(after) == set(old)
        for path, data in after.items():
            unchanged = data == old[path]
            assert unchanged or (read_table(out / path) if path.endswith(".parquet") else data == whole[path])
