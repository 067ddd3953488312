"""Metrics for operators: the right numbers, under the right names, without waking an idle card."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from serving import SOURCE
from wattcast.measure.energy_sources import DeviceIdentity, ReadError, SlowReadings
from wattcast.web.metrics_exporter import (
    MetricsCollector,
    WatchedCard,
    model_workload,
    write_metrics,
)

prometheus = pytest.importorskip("prometheus_client.parser", reason="no prometheus-client")


class Clock:
    """Time that stands still until told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeSource:
    """A card whose readings are set by the test, and counted."""

    energy_range_j: float | None = 2.0**32 / 1e3

    def __init__(self) -> None:
        self.reads = 0
        self.joules, self.throttle, self.error = 100.0, 0.0, None

    def energy_j(self) -> float:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.joules

    def sm_clock_hz(self) -> float:
        return 1.5e9

    def slow(self) -> SlowReadings:
        return SlowReadings(instant_w=512.0, temperature_c=55.0, throttle=self.throttle)


def card(source: FakeSource, clock: Clock) -> WatchedCard:
    return WatchedCard(
        0, source, DeviceIdentity("NVIDIA H200", uuid="GPU-1", power_limit_w=700.0), now=clock
    )


def samples(text: bytes) -> dict[str, dict[tuple, float]]:
    found: dict[str, dict[tuple, float]] = {}
    for family in prometheus.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(text: bytes, name: str) -> float:
    (only,) = samples(text)[name].values()
    return only


def test_a_busy_card_is_read_at_most_every_five_seconds_and_an_idle_one_every_minute() -> None:
    source, clock = FakeSource(), Clock()
    mine = card(source, clock)
    for _ in range(60):  # a minute of scrapes, one a second
        write_metrics([mine], [])
        clock.now_s += 1.0
    assert source.reads == 12
    source.throttle = 1.0  # gpu_idle
    clock.now_s += 5.0
    mine.look()
    before = source.reads
    for _ in range(600):
        write_metrics([mine], [])
        clock.now_s += 1.0
    assert source.reads - before <= 10
    assert value(write_metrics([mine], []), "wattcast_idle") == 1.0
    assert value(write_metrics([mine], []), "wattcast_reading_age_seconds") <= 60.0


def test_numbers_reach_the_metrics_and_what_is_unknown_is_left_out() -> None:
    source, clock = FakeSource(), Clock()
    source.throttle = 4.0
    text = write_metrics([card(source, clock)], [])
    assert value(text, "wattcast_power_watts") == 512.0
    assert value(text, "wattcast_energy_joules_total") == 100.0
    assert value(text, "wattcast_clock_hertz") == 1.5e9
    assert value(text, "wattcast_power_limit_watts") == 700.0
    assert "wattcast_memory_power_watts" not in samples(text), "absent is not zero"
    held = {
        dict(labels)["reason"]: on for labels, on in samples(text)["wattcast_clock_held"].items()
    }
    assert held["sw_power_cap"] == 1.0
    assert sum(held.values()) == 1.0


def test_the_energy_counter_never_falls_when_the_driver_wraps_it() -> None:
    source, clock = FakeSource(), Clock()
    mine, seen = card(source, clock), []
    for joules in (4294900.0, 4294960.0, 20.0, 90.0):
        source.joules = joules
        seen.append(mine.look().energy_j)
        clock.now_s += 10.0
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(4294967.296 + 90.0)


def test_a_counter_that_restarts_stands_still_or_leaps_is_doubtful() -> None:
    """A counter at 4.0 MJ that began anew was exported as one that had wrapped."""
    source, clock = FakeSource(), Clock()
    mine = card(source, clock)
    doubts = []
    for joules in (3.9e6, 3.903e6, 4.0e6, 5.0, 5.0, 3005.0):
        source.joules = joules
        doubts.append(mine.look().doubtful)
        clock.now_s += 10.0
    assert doubts == [False, False, True, True, True, False]
    assert mine.look().energy_j < 1e4
    assert value(write_metrics([mine], []), "wattcast_energy_doubtful") == 1.0, (
        "it stood still again"
    )


def test_a_lost_card_is_said_and_does_not_end_the_exporter() -> None:
    source, clock = FakeSource(), Clock()
    mine = card(source, clock)
    source.error = ReadError("gone", lost=True)
    text = write_metrics([mine], [])
    assert value(text, "wattcast_lost") == 1.0
    assert value(text, "wattcast_reading_errors_total") == 1.0
    assert "wattcast_power_watts" not in samples(text)


def test_a_driver_that_hangs_is_said_and_read_again_when_it_answers() -> None:
    source, clock, go = FakeSource(), Clock(), threading.Event()
    mine = card(source, clock)
    write_metrics([mine], [])
    clock.now_s += 5.0
    source.energy_j = lambda: go.wait(60) and 100.0
    until_s = time.monotonic() + 0.05
    assert mine.look(until_s).hung
    assert math.isnan(mine.look(until_s).power_w)
    assert mine.readings == 2, "one thread waits for the driver, however often it is asked"
    go.set()
    assert mine.look().power_w == 512.0


def test_the_predicted_saving_is_that_of_a_sweep_over_clocks(call) -> None:
    from wattcast.predictor import api

    options = {"batch": 8, "seq": 512}
    p = api.predict("llama3-8b", "h200", **options)
    found = model_workload("llama3-8b", api.find_gpu("h200"), p, "5%", **options)
    sizes = ["--batch", "8", "--seq", "512", "--slowdown", "5%"]
    best = json.loads(
        call(
            "explore",
            "sweep",
            "llama3-8b",
            "--gpu",
            "h200",
            "--vary",
            "clock=all",
            *sizes,
            "--json",
        ).out
    )["best"]
    row = best["energy"]
    assert found.best["asked_clock_hz"] == pytest.approx(row["asked_clock_hz"])
    assert found.saving == pytest.approx(1.0 - row["energy_j"] / float(p.energy_j))
    assert 0.0 <= found.saving < 1.0
    text = write_metrics([], [found])
    assert value(text, "wattcast_model_saving_ratio") == pytest.approx(found.saving)
    assert value(text, "wattcast_model_power_watts") == pytest.approx(float(p.power_w))


def test_the_dashboard_asks_only_for_metrics_there_are(call, tmp_path: Path) -> None:
    path = tmp_path / "dashboard.json"
    assert call("export", "grafana", "--out", str(path)).code == 0
    board = json.loads(path.read_text())
    kinds = {f"wattcast_{name}" for name in exporter_names()}
    asked = set(re.findall(r"wattcast_\w+", json.dumps([board["panels"], board["templating"]])))
    assert asked <= kinds, asked - kinds
    assert {
        "wattcast_power_watts",
        "wattcast_model_saving_ratio",
        "wattcast_energy_joules_total",
    } <= asked
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in board["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24


def exporter_names() -> set[str]:
    from wattcast.web.metrics_exporter import MEASURED, PREDICTED

    measured = {
        f"{name}_total" if kind == "counter" else name for name, (kind, _, _) in MEASURED.items()
    }
    return measured | {f"model_{name}" for name in PREDICTED} | {"clock_held"}


def test_every_family_has_a_name_with_its_unit() -> None:
    for family in MetricsCollector([card(FakeSource(), Clock())], []).collect():
        assert re.fullmatch(r"wattcast_[a-z_]+", family.name)
        assert family.documentation


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wattcast", "export", "prometheus", *arguments]


def environment(more: dict[str, str]) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"} | more


def test_a_card_through_the_real_binding(standin) -> None:
    standin.follow("at -10 420 1755 4 61 80")
    argv = command(
        "--once", "--source", "nvml", "--workload", "gpt2", "--gpu", "h200", "--seq", "128"
    )
    done = subprocess.run(
        argv, env=environment(standin.environment), capture_output=True, timeout=120, check=True
    )
    assert value(done.stdout, "wattcast_power_watts") == pytest.approx(420.0, rel=0.02)
    assert value(done.stdout, "wattcast_clock_hertz") == 1755e6
    assert math.isfinite(value(done.stdout, "wattcast_energy_joules_total"))
    assert value(done.stdout, "wattcast_model_latency_seconds") > 0


def scrape(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read()


def scrape_reading(address: str) -> bytes:
    """Scrape until the first reading is there: a busy machine may not have it within the second it
    waits.
    """
    for _ in range(60):
        if value(text := scrape(address), "wattcast_hung") == 0.0:
            break
        time.sleep(0.5)
    return text


def test_it_is_scraped_through_a_hanging_driver_and_ends_at_ctrl_c(standin) -> None:
    argv = command("--port", "0", "--source", "nvml", "--interval", "0.1s")
    running = subprocess.Popen(
        argv, env=environment(standin.environment), stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stderr is not None
        said = running.stderr.readline()
        address = re.search(r"http://\S+/metrics", said)
        assert address is not None, said
        assert "127.0.0.1" in said
        assert value(scrape_reading(address[0]), "wattcast_power_watts") > 0
        foreign = urllib.request.Request(address[0], headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(foreign, timeout=60)
        standin.follow("at -10 300 1980 0 45 60", "hang 0 3600")
        deadline_s = time.monotonic() + 120.0
        while value(scrape(address[0]), "wattcast_hung") != 1.0:
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
        began_s = time.monotonic()
        text = scrape(address[0])
        assert time.monotonic() - began_s < 30.0, "a driver that hangs for an hour held a scrape"
        assert "wattcast_power_watts" not in samples(text), (
            "nothing is known of a card that does not answer"
        )
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        running.stderr.close()


def test_without_a_card_and_without_a_workload_there_is_nothing_to_export(call) -> None:
    done = call("export", "prometheus", "--source", "none", "--once")
    assert done.code == 2
    assert "--workload" in done.err
    done = call("export", "prometheus", "--workload", "gpt2", "--once")
    assert done.code == 2
    assert "--gpu" in done.err
