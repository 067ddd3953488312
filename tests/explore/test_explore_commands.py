"""``wattcast explore`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wattcast.core.errors import ExitCode
from wattcast.explore import sweep

DESIGNS = ("explore", "designs", "gpt2", "--gpu", "h200", "--batch", "8", "--seq", "128")
VARY = ("--vary", "sm_count=64:192:32", "--vary", "clock=600MHz:1980MHz:345MHz")


def test_designs_prints_the_front_and_saves_every_point(call, tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    out = tmp_path / "points.parquet"
    done = call(*DESIGNS, *VARY, "--where", "power<=400W", "--out", str(out), "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    points = pl.read_parquet(out)
    assert told["points"] == 25
    assert told["kept"] == len(points)
    assert told["best"]["energy_j"]["energy_j"] == points["energy_j"].min()
    assert [a["column"] for a in told["space"]["axes"]] == ["sm_count", "asked_clock_hz"]
    assert f"{len(points)} points saved" in done.err
    text = call(*DESIGNS, *VARY)
    assert text.code == 0
    assert "Pareto front of latency_s and power_w" in text.out
    assert "idle power, leakage and the energy of L2 follow the area" in " ".join(text.out.split())


def test_designs_sampled_and_with_other_objectives(call) -> None:
    pytest.importorskip("scipy")
    argv = (
        "--vary",
        "sm_count=64:192",
        "--sample",
        "sobol:64",
        "--seed",
        "7",
        "--front",
        "latency_s,sm_count,energy_j",
    )
    done = call(*DESIGNS, *argv, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["space"]["seed"] == 7
    assert any("seed 7" in note for note in told["notes"])
    assert json.loads(call(*DESIGNS, *argv, "--json").out) == told


@pytest.mark.parametrize(
    "more", [(), ("--heat-map", "clock,sm_count"), ("--heat-map", "clock,sm_count,latency_s")]
)
def test_designs_draws(call, tmp_path: Path, more: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    done = call(*DESIGNS, *VARY, "--plot", str(path), *more)
    assert done.code == 0, done.err
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ((*DESIGNS, "--vary", "smcuont=1,2"), ExitCode.BAD_INPUT, "Closest: sm_count"),
        ((*DESIGNS, "--vary", "batch=1,2"), ExitCode.BAD_INPUT, "explore sweep"),
        ((*DESIGNS, "--vary", "clock=1GHz", "--clock", "1GHz"), ExitCode.BAD_INPUT, "both"),
        (
            (*DESIGNS, *VARY, "--where", "power<=1W"),
            ExitCode.BAD_INPUT,
            "power_w<=1 W holds for 0.0%",
        ),
        ((*DESIGNS, *VARY, "--out", "points.xls"), ExitCode.BAD_INPUT, ".parquet"),
        ((*DESIGNS, *VARY, "--front", "latency_s,pwr"), ExitCode.BAD_INPUT, "unknown column"),
        ((*DESIGNS, *VARY, "--heat-map", "clock,sm_count"), ExitCode.BAD_INPUT, "--plot"),
        ((*DESIGNS, *VARY, "--workers", "0"), ExitCode.BAD_INPUT, "workers"),
        ((*DESIGNS, *VARY, "--seed", "-1", "--sample", "random:3"), ExitCode.BAD_INPUT, "seed"),
        ((*DESIGNS, "--vary", "clock=600MHz:1.9GHz:1Hz"), ExitCode.BAD_INPUT, "larger step"),
        (
            (*DESIGNS, "--vary", "clock=600MHz:1.9GHz:1kHz", "--vary", "sm_count=1:200:1"),
            ExitCode.REFUSED,
            "--yes",
        ),
        (DESIGNS, ExitCode.BAD_INPUT, "--vary"),
    ],
)
def test_a_mistake_gets_one_paragraph(
    call, tmp_path: Path, monkeypatch, argv, code: ExitCode, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*argv)
    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_inside_a_lock_is_still_an_interrupt(call, tmp_path: Path, monkeypatch) -> None:
    """Once in many runs Ctrl-C fell into a lock of the pool: "internal error (release unlocked
    lock)".
    """

    def run_sweep(*_: object) -> None:
        with lock:
            lock.release()
            raise KeyboardInterrupt

    lock = threading.Lock()
    monkeypatch.setattr(sweep, "run_sweep", run_sweep)
    done = call(*DESIGNS, *VARY, "--out", str(tmp_path / "points"))
    assert done.code == ExitCode.INTERRUPTED, done.err
    assert "the same command continues" in done.err


@pytest.mark.slow  # in one process: the test above, and killed runs that continue in test_sweep
def test_ctrl_c_keeps_finished_parts_and_the_same_command_continues(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    script = "from wattcast.cli import main; main.entry()"
    axes = (
        "--vary",
        "clock=600MHz:1980MHz:15MHz",
        "--vary",
        "sm_count=64:192:1",
        "--vary",
        "voltage=0.5:1.4:0.01",
    )
    argv = [
        sys.executable,
        "-c",
        script,
        *DESIGNS,
        *axes,
        "--workers",
        "2",
        "--out",
        str(tmp_path / "points"),
    ]
    running = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while (
        not list(tmp_path.glob("points/part-*"))
        and time.monotonic() < deadline
        and running.poll() is None
    ):
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: the whole group
    out, err = running.communicate(timeout=60)
    assert running.returncode == ExitCode.INTERRUPTED, err
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert out == ""
    kept = sorted(path.name for path in tmp_path.glob("points/part-*"))
    assert kept
    again = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while (
        len(list(tmp_path.glob("points/part-*"))) <= len(kept)
        and time.monotonic() < deadline
        and again.poll() is None
    ):
        time.sleep(0.1)
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=60)
    assert again.returncode == ExitCode.INTERRUPTED
    assert set(kept) < {path.name for path in tmp_path.glob("points/part-*")}
