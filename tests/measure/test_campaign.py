"""The campaign without a GPU: rows of every kind, failures that cost one row, and continuing where
it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_gpu
import numpy as np
import pytest
from fake_gpu import FakeGpu
from synthetic import synthetic

from standin import StandIn, undisturbed
from wattcast.core.errors import CannotWrite, Refused
from wattcast.core.measured_rows import KernelRow, RowKind, row_from_plain
from wattcast.core.row_journals import Journal, read_lines
from wattcast.lab.campaigns import campaign_engine, operator_rows
from wattcast.lab.campaigns import kernel_campaign as module
from wattcast.lab.campaigns.campaign_engine import Campaign, OperatorBench
from wattcast.lab.campaigns.kernel_plan import read_kernel_plan
from wattcast.lab.campaigns.operator_rows import KernelCampaign
from wattcast.measure import steady_state
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import SettlingRule

SPECS = read_kernel_plan()[:6]


@dataclass
class Spin:
    """A spin kernel that has seen one clock."""

    def start(self, cycles: int) -> None:
        pass

    def clock_hz(self) -> float:
        return 1.85e9


@pytest.fixture
def bench(standin: StandIn) -> Iterator[OperatorBench]:
    gpu = FakeGpu()
    gpu.operands = SimpleNamespace(
        pattern="random", fill=lambda p: setattr(gpu.operands, "pattern", p)
    )
    with Sampler("nvml") as sampler:
        yield OperatorBench(gpu, sampler, "run-1", Spin(), top_clock_hz=1.98e9)


def read(path: Path) -> list[KernelRow]:
    return [row_from_plain(row, KernelRow) for row in read_lines(path)]


def test_a_disk_that_fails_at_any_write_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ended a campaign with a traceback and exit code 0, and left half a line behind."""
    fsync, calls, fails_at = os.fsync, [0], [0]

    def count_or_fail(fd: int) -> None:
        calls[0] += 1
        if calls[0] == fails_at[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", count_or_fail)
    samples = EnergySamples(np.ones((3, len(COLUMNS))))
    sampler = SimpleNamespace(healthy=True, lost=False, errors=0, since=lambda _: samples)
    bench: Any = SimpleNamespace(gpu=FakeGpu(), sampler=sampler, run="run-1")
    blanks = [
        KernelRow(f"row-{i}", RowKind.BURST, "gemm", {"op": "linear"}, latency_s=1e-5)
        for i in range(4)
    ]

    def run(out: Path) -> None:
        calls[0] = 0
        campaign = Campaign(bench, out, time.monotonic() + 100.0)
        for blank in blanks:
            campaign.record("burst", blank, lambda blank=blank: blank)
        campaign.finish()

    run(tmp_path / "whole")
    writes = calls[0]
    for fails_at[0] in range(1, writes + 1):
        out = tmp_path / f"fails-{fails_at[0]}"
        if (
            fails_at[0] == writes
        ):  # the name of the samples' file, which may be put on the disk later
            run(out)
            continue
        with pytest.raises(CannotWrite, match="No space left"):
            run(out)
        journal = out / "burst.jsonl"
        done = [row.id for row in read(journal)] if journal.exists() else []
        assert done == [f"row-{i}" for i in range(min(fails_at[0] - 1, 4))]
        assert {path.name for path in out.iterdir()} <= {"burst.jsonl"}
        failed, fails_at[0] = fails_at[0], 0
        run(out)  # goes on where it stopped
        fails_at[0] = failed
        assert journal.read_bytes() == (tmp_path / "whole" / "burst.jsonl").read_bytes()


def test_a_burst_gives_the_latency_at_the_top_clock(bench: OperatorBench) -> None:
    rows = (operator_rows.measure_burst_row(bench, SPECS[0]) for _ in range(20))
    row = next(row for row in rows if row.sm_clock_hz is not None)  # a late sampler sees no clock
    assert row.latency_s == pytest.approx(bench.gpu.call_s, rel=0.01)
    assert row.sm_clock_hz == 1.98e9
    assert 0.01 < row.duration_s < 0.06
    assert row.power_w is None
    assert row.flags == ()


def test_a_burst_below_the_top_clock_is_tried_again_and_flagged(
    bench: OperatorBench, standin: StandIn
) -> None:
    standin.follow("at -10 300 1500 4")
    rows = (operator_rows.measure_burst_row(bench, SPECS[0]) for _ in range(20))
    assert (
        "clock_low" in next(row for row in rows if row.sm_clock_hz == 1.5e9).flags
    )  # a late sampler saw no clock


def test_a_sustained_row_has_power_clock_latency_and_ticks(bench: OperatorBench) -> None:
    row = undisturbed(lambda: operator_rows.measure_sustained_row(bench, SPECS[0]))
    assert row.power_w == pytest.approx(300.0, rel=0.01)
    assert row.ticks >= 5
    assert row.latency_s == pytest.approx(bench.gpu.call_s, rel=0.01)
    assert row.effective_clock_hz == 1.85e9
    assert row.memory_power_w == 60.0
    assert row.flags == ()


def test_a_sustained_row_waits_for_the_governor(bench: OperatorBench, standin: StandIn) -> None:
    """The cap bites after 0.3 s: the row must hold the settled state, and say that it was capped."""

    def measure() -> KernelRow:
        standin.follow("at -1 750 1980", "at 0.3 690 1500 4 60 100")
        return operator_rows.measure_sustained_row(bench, SPECS[0])

    row = undisturbed(measure)
    assert row.power_w == pytest.approx(690.0, rel=0.01)
    assert row.sm_clock_hz == pytest.approx(1.5e9)
    assert row.throttle == ("sw_power_cap",)


def test_a_load_that_never_settles_is_kept_and_flagged(
    bench: OperatorBench, standin: StandIn
) -> None:
    lines = [f"at {0.15 * i:.2f} 500 {1980 - 40 * i}" for i in range(40)]
    standin.follow("at -1 500 1980", *lines)
    bench.rule = SettlingRule(longest_s=1.6, capped_settle_s=0.5)
    row = operator_rows.measure_sustained_row(bench, SPECS[0])
    assert "unsettled" in row.flags
    assert "clock_drift" in row.flags


def test_a_duty_cycle_gives_the_power_while_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean 300 W at idle 100 W and duty d: on-power must be 100 + 200 / d.

    Periods take twelve milliseconds, which no busy machine keeps: time is imagined here.
    """
    now_s = [1.0]

    def wait(length_s: float) -> None:
        now_s[0] += length_s + 1e-5  # a loop that does not wait still ends

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=wait)
    for place in (operator_rows, steady_state, fake_gpu):
        monkeypatch.setattr(place, "time", clock)
    sampler: Any = SimpleNamespace(head=0, since=lambda mark: synthetic(now_s[0]))
    gpu = FakeGpu(
        call_s=2e-5
    )  # graphs of half a millisecond, so that replays can fill half a period
    bench = OperatorBench(gpu, sampler, "run-1", None, top_clock_hz=1.98e9)
    row = operator_rows.measure_duty_row(bench, SPECS[0], 0.5, idle_power_w=100.0)
    assert row.flags == ()
    assert row.duty == pytest.approx(0.5, abs=0.04)
    assert row.on_power_w == pytest.approx(100.0 + 200.0 / row.duty, rel=0.02)
    assert row.period_s >= 0.012


def test_the_clock_row_holds_what_the_spin_kernel_saw(bench: OperatorBench) -> None:
    assert operator_rows.measure_clock_row(bench, SPECS[0]).effective_clock_hz == 1.85e9
    bench.spinner = None
    with pytest.raises(Refused, match="spin kernel"):
        operator_rows.measure_clock_row(bench, SPECS[0])


def test_idle_power_is_measured_without_work(bench: OperatorBench) -> None:
    row = undisturbed(lambda: operator_rows.measure_idle_row(bench, "top"))
    assert row.power_w == pytest.approx(300.0, rel=0.01)
    assert row.operator == {"op": "idle"}


def test_a_failing_operator_costs_one_row_and_the_next_goes_on(
    bench: OperatorBench, tmp_path: Path
) -> None:
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    specs = campaign.specs()
    bench.gpu.fails = {specs[2].id}
    module.burst_step(campaign)
    found = read(tmp_path / "burst.jsonl")
    assert len(found) == len(specs)
    assert [row.error for row in found if row.error] == ["RuntimeError: CUDA out of memory"]
    assert bench.gpu.recovered == 1


def test_a_second_run_measures_only_what_is_missing(bench: OperatorBench, tmp_path: Path) -> None:
    first = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    bench.gpu.fails = {first.specs()[2].id}
    module.burst_step(first)
    bench.gpu.fails = set()
    again = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    module.burst_step(again)
    assert again.counts == {"burst skipped": 7, "burst": 1}


def test_the_budget_ends_a_step(bench: OperatorBench, tmp_path: Path) -> None:
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 2.1, few=1)
    module.burst_step(campaign)
    assert campaign.counts["burst"] == 0


@pytest.mark.parametrize(
    ("steps", "rows"), [(["sustained"], 28), (["sustained", "repeat-sustained"], 17)]
)
def test_time_is_held_back_for_repeats_that_were_asked_for_alone(
    steps: list[str], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 68 s of a call's budget were left unused for a repeat step that was not to come."""
    bench: Any = SimpleNamespace(
        sampler=SimpleNamespace(lost=False, errors=0), run="run-1", top_clock_hz=0.0
    )

    spent_s = [0.0]

    def spend(campaign: KernelCampaign, kind: RowKind, spec: Any) -> None:
        spent_s[0] += 3.5
        campaign.counts[kind] += 1

    for place in (module, campaign_engine):
        monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: spent_s[0]))
    monkeypatch.setattr(module, "Sampler", lambda _: contextlib.nullcontext(bench.sampler))
    monkeypatch.setattr(module.CampaignGpu, "open", lambda: None)
    monkeypatch.setattr(module.OperatorBench, "open", lambda *_: bench)
    monkeypatch.setattr(operator_rows, "find_top_clock_hz", lambda *_: 1.98e9)
    monkeypatch.setattr(KernelCampaign, "finish", lambda self, keep_samples: self.counts)
    monkeypatch.setattr(module, "warm_step", lambda _: None)
    monkeypatch.setattr(module, "save_row", spend)
    monkeypatch.setitem(module.STEPS, "repeat-sustained", lambda _: None)
    assert module.run_kernel_campaign(tmp_path, steps, 100.0)["sustained"] == rows


@pytest.mark.parametrize(
    ("clocks_mhz", "waited_s"), [([1980.0], 4.0), ([1980.0] * 9 + [1200.0] * 30 + [345.0], 9.0)]
)
def test_a_clock_that_does_not_fall_is_not_waited_for(
    clocks_mhz: list[float], waited_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards keep the top clock while a context is open, and every idle step waited 25 s for it to
    fall.
    """
    slept, left = [0.0], [1e6 * clock for clock in clocks_mhz]

    def wait(length_s: float) -> None:
        slept[0] += length_s

    def last(_: str) -> float:
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: slept[0], sleep=wait))
    monkeypatch.setattr(module, "_warm_idle_w", lambda *_: None)
    monkeypatch.setattr(
        operator_rows,
        "measure_idle_row",
        lambda _, name, __: KernelRow(name, RowKind.IDLE, "idle", {"op": "idle"}),
    )
    sampler = SimpleNamespace(head=20, since=lambda _: SimpleNamespace(last=last))
    bench: Any = SimpleNamespace(sampler=sampler, top_clock_hz=1.98e9)
    module.idle_step(KernelCampaign(bench, tmp_path, 100.0, listed=[SPECS[0]]))
    assert slept[0] == pytest.approx(waited_s, abs=0.3)
    assert [row.id for row in read(tmp_path / "idle.jsonl")] == ["rest"]


def test_a_device_lost_mid_run_stops_the_step_and_keeps_every_row(
    bench: OperatorBench, standin: StandIn, tmp_path: Path
) -> None:
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    module.save_row(campaign, RowKind.SUSTAINED, SPECS[0])
    standin.follow("at -10 300 1980", "lost 0.2")
    with pytest.raises(Refused, match="vanished"):
        module.save_row(campaign, RowKind.SUSTAINED, SPECS[1])
    (kept,) = read(tmp_path / "sustained.jsonl")
    assert kept.power_w == pytest.approx(300.0, rel=0.01)


def test_a_hanging_driver_costs_one_row(
    bench: OperatorBench, standin: StandIn, tmp_path: Path, monkeypatch
) -> None:
    from wattcast.measure import sampler as sampler_module

    monkeypatch.setattr(sampler_module, "SILENCE_S", 0.4)
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    standin.follow("at -10 300 1980", "hang 0.1 2.0")

    def recover() -> None:
        standin.follow("at -10 300 1980")

    bench.gpu.recover = recover
    module.save_row(campaign, RowKind.SUSTAINED, SPECS[0])
    monkeypatch.setattr(sampler_module, "SILENCE_S", 3.0)
    module.save_row(campaign, RowKind.SUSTAINED, SPECS[1])
    failed, good = read(tmp_path / "sustained.jsonl")
    assert "silent" in failed.error
    assert good.power_w == pytest.approx(300.0, rel=0.02)


def test_duty_takes_capped_kernels_only(
    bench: OperatorBench, standin: StandIn, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "CAPPED_WANTED", 1)
    monkeypatch.setattr(module, "CAPPED", {"linear": 2})
    standin.follow("at -10 300 1980")
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 60)
    module.duty_step(campaign)
    assert campaign.counts["duty not capped"] == 2
    assert not (tmp_path / "duty.jsonl").exists()


def test_all_kernels_of_a_list_are_duty_cycled(
    bench: OperatorBench, standin: StandIn, tmp_path: Path, monkeypatch
) -> None:
    """Whoever lists kernels knows that they meet the cap: no fixed number, and no guess at which
    ones may.
    """
    monkeypatch.setattr(module, "CAPPED_WANTED", 1)
    monkeypatch.setattr(module, "is_likely_capped", lambda spec: False)
    monkeypatch.setattr(module, "DUTIES", (0.5,))
    monkeypatch.setattr(
        module, "find_last_row", lambda journal, row_id: {"throttle": ["sw_power_cap"]}
    )
    standin.follow("at -10 300 1980")
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 120, listed=list(SPECS[:2]))
    module.duty_step(campaign)
    assert {row.detail["spec"] for row in read(tmp_path / "duty.jsonl")} == {
        spec.id for spec in SPECS[:2]
    }


def test_patterns_of_a_list_include_random_values(
    bench: OperatorBench, tmp_path: Path, monkeypatch
) -> None:
    """No other step of the campaign measures them, as the sustained one does for the plan."""
    monkeypatch.setattr(module, "choose_patterns", lambda spec: True)
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 120, listed=[SPECS[0]])
    module.pattern_step(campaign)
    assert {row.data for row in read(tmp_path / "sustained.jsonl")} == {
        "zeros",
        "relu",
        "ones",
        "random",
    }


def test_patterns_are_measured_under_their_own_ids(bench: OperatorBench, tmp_path: Path) -> None:
    campaign = KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1)
    module.pattern_step(campaign)
    found = read(tmp_path / "sustained.jsonl")
    assert {row.data for row in found} == {"zeros"}
    assert all("-zeros" in row.id for row in found)


def test_rows_wait_on_disk_not_in_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "burst.jsonl")
    journal.append(KernelRow("a", "burst", "linear", {}))
    assert (tmp_path / "burst.jsonl").read_bytes().endswith(b"\n")
