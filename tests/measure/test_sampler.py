"""The polling process against the stand-in library, through the real binding: it outlives what
drivers do.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from standin import StandIn, undisturbed
from wattcast.core.errors import MissingTool, Refused
from wattcast.measure import sampler as module
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.sampler import Sampler


def wait_for(condition, longest_s: float = 60.0) -> bool:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def seen(sampler: Sampler, length_s: float) -> SimpleNamespace:
    """Samples and steps of the next ``length_s``."""
    mark = sampler.head
    time.sleep(length_s)
    samples = sampler.since(mark)
    stepped = find_ticks(samples)
    flags = ["late_polls"] if stepped.power_doubt > 0.01 else []
    return SimpleNamespace(samples=samples, power_w=stepped.power_w, flags=flags)


def test_it_knows_the_card_and_finds_its_power(standin: StandIn) -> None:
    with Sampler("nvml") as sampler:
        found = undisturbed(lambda: seen(sampler, 1.2))
    samples = found.samples
    assert sampler.identity.name == "Stand-in H200"
    assert sampler.identity.uuid == "GPU-standin"
    assert sampler.identity.power_limit_w == 700.0
    assert sampler.identity.top_clock_hz == 1.98e9
    assert found.power_w == pytest.approx(300.0, rel=0.01)
    assert samples.last("memory_w") == 60.0
    assert samples.last("average_w") == pytest.approx(300.0, rel=0.01)
    assert samples.last("instant_w") == pytest.approx(300.0, rel=0.01)
    assert samples.last("temperature_c") == 45.0


def test_errors_of_the_driver_are_counted_and_outlived(standin: StandIn) -> None:
    with Sampler("nvml") as sampler:
        standin.follow("at -10 300 1980", "error energy 999 0 1e9", "error temperature 999 0 1e9")
        assert wait_for(lambda: sampler.errors > 0)
        standin.follow("at -10 300 1980", "error temperature 999 0 1e9")
        mark = sampler.head
        assert wait_for(lambda: sampler.since(mark).last("energy_j") is not None)
        time.sleep(0.9)
        assert sampler.healthy
        assert (
            sampler.since(mark).last("temperature_c") is None
        )  # soft readings are NaN, not an error


def test_a_vanished_device_is_reported_and_what_was_seen_is_kept(standin: StandIn) -> None:
    with Sampler("nvml") as sampler:
        assert wait_for(lambda: find_ticks(sampler.since(0)).intervals >= 5)
        standin.follow("at -10 300 1980", "lost 0.0")
        assert wait_for(lambda: sampler.lost)
        with pytest.raises(Refused, match="vanished"):
            sampler.check()
        kept = sampler.since(0)
    assert find_ticks(kept).intervals >= 5


def test_a_hanging_driver_is_noticed_by_silence_and_killed(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.4)
    sampler = Sampler("nvml")
    sampler.start()
    process = sampler._process
    assert process is not None
    try:
        standin.follow("at -10 300 1980", "hang 0.0 60")
        assert wait_for(lambda: not sampler.healthy)
        with pytest.raises(Refused, match="silent"):
            sampler.check()
        began_s = time.monotonic()
    finally:
        sampler.stop()
    assert time.monotonic() - began_s < 30.0  # it does not wait for a call that takes a minute
    assert process.poll() is not None


def test_a_restart_brings_it_back(standin: StandIn) -> None:
    with Sampler("nvml") as sampler:
        standin.follow("at -10 300 1980", "lost 0.0")
        assert wait_for(lambda: sampler.lost)
        standin.follow("at -10 200 1980")
        sampler.restart()
        found = undisturbed(lambda: seen(sampler, 0.9))
        assert sampler.healthy
        assert found.power_w == pytest.approx(200.0, rel=0.02)


def test_a_wrapping_counter_goes_on_counting(standin: StandIn) -> None:
    """32 bits of millijoules wrap after 4.3 MJ, two hours of a busy card."""
    wrap_mj = 2**32
    standin.follow(
        "at 0 300 1980", f"start_mj {wrap_mj - 900_000}", f"wrap_mj {wrap_mj}"
    )  # in three seconds
    with Sampler("nvml") as sampler:
        assert wait_for(
            lambda: (
                (sampler.since(sampler.head - 50).last("energy_j") or 0.0) > wrap_mj / 1e3 + 100.0
            )
        )
        samples = sampler.since(0)
    assert (samples.known("energy_j")[1:] >= samples.known("energy_j")[:-1]).all()
    assert samples.known("energy_j")[-1] > wrap_mj / 1e3
    assert find_ticks(samples).power_w == pytest.approx(300.0, rel=0.02)


def test_no_library_gives_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="no energy source on this machine"):
        Sampler("nvml").start()


def test_a_device_number_too_high_is_a_missing_device(standin: StandIn) -> None:
    with pytest.raises(MissingTool, match="Invalid Argument"):
        Sampler("nvml", index=3).start()


def test_the_polling_process_ends_with_its_parent(standin: StandIn) -> None:
    code = (
        "import os, sys, time\n"
        "from wattcast.measure.sampler import Sampler\n"
        "s = Sampler('nvml'); s.start(); print(s._process.pid, flush=True); os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    child = int(done.stdout)
    assert wait_for(lambda: not _running(child))


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_polling_costs_little_and_says_how_much(standin: StandIn) -> None:
    with Sampler("nvml", period_s=0.05, relaxed=True) as sampler:
        time.sleep(1.0)
        began_s, spent_s = time.monotonic(), sampler.processor_s
        time.sleep(2.0)
        share = (sampler.processor_s - spent_s) / (time.monotonic() - began_s)
    assert 0.0 < share < 0.04  # measured 0.7 % on an idle machine; the tests' machine is shared


def test_measuring_code_holds_no_setter() -> None:
    """These commands never change a card; the stand-in's setters are for management."""
    folder = os.path.dirname(module.__file__)
    for root, _, names in os.walk(folder):
        for name in names:
            if (
                name.endswith(".py") and name != "device_control.py"
            ):  # `manage run --apply` alone sets clocks
                with open(os.path.join(root, name), encoding="utf-8") as stream:
                    text = stream.read()
                assert "nvmlDeviceSet" not in text, name
                assert "nvmlDeviceReset" not in text, name
                assert "amdsmi_set" not in text, name


def test_the_real_binding_reaches_the_setters_of_the_stand_in(standin: StandIn, tmp_path) -> None:
    """Management will use them: each call is written down."""
    calls = tmp_path / "calls.txt"
    standin.follow("at 0 100 345", f"calls {calls}")
    code = (
        "import pynvml as n\n"
        "n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "n.nvmlDeviceSetGpuLockedClocks(h, 1200, 1500); n.nvmlDeviceResetGpuLockedClocks(h)\n"
        "n.nvmlDeviceSetPowerManagementLimit(h, 500000)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert calls.read_text().splitlines() == [
        "SetGpuLockedClocks 1200 1500",
        "ResetGpuLockedClocks 0 0",
        "SetPowerManagementLimit 500000 0",
    ]


def test_permission_errors_come_back_from_the_setters(standin: StandIn) -> None:
    standin.follow("at 0 100 345", "error set 4 0 1000")
    code = (
        "import pynvml as n\n"
        "n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "try:\n    n.nvmlDeviceSetGpuLockedClocks(h, 1200, 1500)\n"
        "except n.NVMLError_NoPermission:\n    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "refused\n"


def test_a_stopped_sampler_is_quietly_empty() -> None:
    idle = Sampler("nvml")
    assert not idle.healthy
    assert len(idle.since(0)) == 0
    assert math.isinf(idle.silence_s)
