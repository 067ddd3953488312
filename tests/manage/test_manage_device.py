"""The real binding against a stand-in driver: what is set, and that nothing stays set. No GPU is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wattcast.core.errors import ExitCode

READ = (
    "import math, sys; from wattcast.measure.device_control import NvmlCard\n"
    "card = NvmlCard(0, timeout_s=1.0); card.open(); r = card.read()\n"
    "print(card.name, card.uuid, r.core_hz, r.energy_j, math.isnan(r.work_per_s), card.clocks_hz()[0][-1])"
)
SLEEP = (sys.executable, "-c", "import time; time.sleep(30)")


def command(standin: Any, tmp_path: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, **standin.environment, "PYTHONPATH": source}
    return [sys.executable, "-m", "wattcast", "manage", *arguments], environment


def run_it(standin: Any, tmp_path: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    argv, environment = command(standin, tmp_path, *arguments)
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout)


def controlling(tmp_path: Path, *more: str) -> list[str]:
    return ["run", "--apply", "--period", "100ms", "--state", str(tmp_path / "state"), *more, "--"]


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def notes(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "state").glob("*.json"))


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def is_set(tmp_path: Path) -> bool:
    return any(line.startswith("SetGpuLockedClocks") for line in calls(tmp_path))


def test_readings_come_from_the_driver_and_what_it_lacks_is_nan(standin: Any, tmp_path: Path) -> None:
    _, environment = command(standin, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    core_hz, energy_j, no_work, top_hz = done.stdout.split()[-4:]
    assert float(core_hz) == float(top_hz) == 1980e6
    assert float(energy_j) > 0
    assert no_work == "True"


def test_a_dry_run_sets_nothing_and_starts_nothing(standin: Any, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    done = run_it(standin, tmp_path, "run", "--", sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert done.returncode == 0, done.stderr
    assert "--apply" in done.stderr
    assert calls(tmp_path) == []
    assert not mark.exists()


def test_a_program_runs_clocks_are_locked_and_reset_and_logged(standin: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = (
        "import os, time\n"
        "for _ in range(40):\n"
        "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * 20); time.sleep(0.05)\n"
        "raise SystemExit(3)"
    )
    arguments = controlling(tmp_path, "--progress", str(told))
    done = run_it(standin, tmp_path, *arguments, sys.executable, "-c", script)
    assert done.returncode == 3, done.stderr
    made = calls(tmp_path)
    locked = [line for line in made if line.startswith("SetGpuLockedClocks")]
    assert len(locked) >= 2
    assert any(line != locked[0] for line in locked)
    assert made[-2:] == ["ResetGpuLockedClocks 0 0", "ResetMemoryLockedClocks 0 0"]
    assert done.stderr.count("core: set") >= 2
    assert notes(tmp_path) == []


def test_permission_denied_starts_nothing_and_leaves_nothing(standin: Any, tmp_path: Path) -> None:
    standin.follow("at -10 300 1980 0 45 60", "error set 4 0 1e9", f"calls {tmp_path / 'calls.txt'}")
    mark = tmp_path / "started"
    script = f"open({str(mark)!r}, 'w')"
    done = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", script)
    assert done.returncode == ExitCode.REFUSED
    assert "permission" in done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists()
    assert calls(tmp_path) == []
    assert notes(tmp_path) == []


def test_a_card_lost_in_mid_run_hangs_nothing_and_the_program_ends_by_itself(standin: Any, tmp_path: Path) -> None:
    standin.follow("at -10 300 1980 0 45 60", "lost 4", f"calls {tmp_path / 'calls.txt'}")
    done = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "import time; time.sleep(6)")
    assert done.returncode == 0, done.stderr
    assert "lost" in done.stderr
    standin.follow("at -10 300 1980 0 45 60", f"calls {tmp_path / 'calls.txt'}")  # the card is back
    again = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "pass")
    assert again.returncode == 0, again.stderr
    assert notes(tmp_path) == []
    assert calls(tmp_path)[-2].startswith("Reset")


def test_clocks_refused_in_mid_run_end_control_and_not_the_program(standin: Any, tmp_path: Path) -> None:
    arguments = controlling(tmp_path, "--progress", str(tmp_path / "told"))
    script = (
        "import os, time\n"
        "for _ in range(100):\n"
        "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * 20); time.sleep(0.05)"
    )
    argv, environment = command(standin, tmp_path, *arguments, sys.executable, "-c", script)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: is_set(tmp_path))
        standin.follow("at -10 300 1980 0 45 60", "error set 2 0 2", f"calls {tmp_path / 'calls.txt'}")
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "control ends" in said
    assert calls(tmp_path)[-2].startswith("Reset")
    assert notes(tmp_path) == []


def test_a_driver_that_hangs_does_not_hang_us(standin: Any, tmp_path: Path) -> None:
    standin.follow("at -10 300 1980 0 45 60", "hang 4 60", f"calls {tmp_path / 'calls.txt'}")
    began = time.monotonic()
    done = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "import time; time.sleep(5)")
    assert time.monotonic() - began < 55
    assert "not answered" in done.stderr or "no longer answers" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_the_program_and_reset_the_clocks(standin: Any, tmp_path: Path, number: signal.Signals) -> None:
    argv, environment = command(standin, tmp_path, *controlling(tmp_path), *SLEEP)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE) as process:
        wait_for(lambda: is_set(tmp_path))
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(30) != 0
    assert calls(tmp_path)[-2:] == ["ResetGpuLockedClocks 0 0", "ResetMemoryLockedClocks 0 0"]
    assert notes(tmp_path) == []


def end_group(leader: int) -> None:
    """End the orphaned program, which is ours, unless it has ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def test_kill_9_in_mid_run_is_mended_by_the_watchdog(standin: Any, tmp_path: Path) -> None:
    argv, environment = command(standin, tmp_path, *controlling(tmp_path), *SLEEP)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_for(lambda: is_set(tmp_path))
        before = len(calls(tmp_path))
        process.kill()
        process.wait(10)
        wait_for(lambda: not notes(tmp_path))
        assert any(line.startswith("ResetGpuLockedClocks") for line in calls(tmp_path)[before:])
        end_group(process.pid)
    done = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "pass")
    assert done.returncode == 0, done.stderr  # the watchdog has let go of the card


def test_kill_9_of_controller_and_watchdog_is_mended_at_the_next_start(standin: Any, tmp_path: Path) -> None:
    argv, environment = command(standin, tmp_path, *controlling(tmp_path), *SLEEP)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_for(lambda: is_set(tmp_path))
        children = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True
        )
        watchdogs = [int(line.split()[0]) for line in children.stdout.splitlines() if "watchdog" in line]
        assert len(watchdogs) == 1
        os.kill(watchdogs[0], signal.SIGKILL)
        process.kill()
        process.wait(10)
        end_group(process.pid)
    assert len(notes(tmp_path)) == 1
    done = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "pass")
    assert done.returncode == 0, done.stderr
    assert "left clocks" in done.stderr
    assert notes(tmp_path) == []


def test_two_controllers_at_once(standin: Any, tmp_path: Path) -> None:
    argv, environment = command(standin, tmp_path, *controlling(tmp_path), *SLEEP)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE) as process:
        wait_for(lambda: is_set(tmp_path))
        second = run_it(standin, tmp_path, *controlling(tmp_path), sys.executable, "-c", "pass")
        assert second.returncode == ExitCode.REFUSED
        assert "another controller" in second.stderr
        assert len(notes(tmp_path)) == 1  # the first one's
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert notes(tmp_path) == []


def test_watching_sets_nothing(standin: Any, tmp_path: Path) -> None:
    done = run_it(standin, tmp_path, "watch", "--count", "2", "--period", "200ms", "--json")
    assert done.returncode == 0, done.stderr
    assert '"advice": null' in done.stdout  # the stand-in tells no utilisation
    assert calls(tmp_path) == []


def test_no_driver_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "LD_LIBRARY_PATH": str(tmp_path)}
    argv = [sys.executable, "-m", "wattcast", "manage", "watch", "--device", "99"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.MISSING
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "fault",
    [("tick_ms 1e9",), ("error energy 3 -1 1e9", "error power 3 -1 1e9")],
    ids=["the energy counter stands still", "neither energy nor power can be read"],
)
def test_readings_that_end_in_mid_run_give_the_clocks_back(
    standin: Any, tmp_path: Path, fault: tuple[str, ...]
) -> None:
    """Blind, the controller leaves the card as the vendor has it; the program runs on."""
    arguments = controlling(tmp_path, "--progress", str(tmp_path / "told"))
    stop = tmp_path / "stop"
    script = (
        "import os, time\n"
        f"while not os.path.exists({str(stop)!r}):\n"
        "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * 20); time.sleep(0.05)"
    )
    argv, environment = command(standin, tmp_path, *arguments, sys.executable, "-c", script)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len({line for line in calls(tmp_path) if line.startswith("SetGpu")}) > 1)
        standin.follow("at -10 300 1980 0 45 60", *fault, f"calls {tmp_path / 'calls.txt'}")
        wait_for(lambda: calls(tmp_path)[-1].startswith("Reset"))
        before = len(calls(tmp_path))
        time.sleep(0.6)  # several periods: it stays so
        assert process.poll() is None
        assert len(calls(tmp_path)) == before
        stop.touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert notes(tmp_path) == []
