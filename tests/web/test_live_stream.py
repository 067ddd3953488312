"""The live view: a card through a stand-in driver, recordings good and bad, and who may watch."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from pathlib import Path

import numpy as np
import pytest

from serving import Server
from wattcast.core.errors import BadInput, MissingTool
from wattcast.measure.energy_samples import EnergySamples
from wattcast.web import live_stream
from wattcast.web.live_stream import FeedWatchers, choose_feed, read_points, recorded_feed

DATA = Path(__file__).parents[1] / "measure" / "data"


def test_a_card_is_shown_while_somebody_looks_and_left_alone_after(standin) -> None:
    standin.follow("at -10 333 1620 0 50 70")
    server = Server("--live", "gpu", "--workers", "1", more=standin.environment)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("GET", "/api/live")
        answer = connection.getresponse()
        watts: list[float] = []
        hertz: list[float] = []
        end_s = time.monotonic() + 60
        while (len(watts) < 12 or not hertz) and time.monotonic() < end_s:
            line = answer.readline().decode()
            if line.startswith("data: ["):
                found = json.loads(line.removeprefix("data: "))
                watts += [p["power_w"] for p in found if "power_w" in p]
                hertz += [p["clock_hz"] for p in found if "clock_hz" in p]
        assert np.median(watts) == pytest.approx(333.0, rel=0.05)
        assert hertz[-1] == 1620e6
        if Path("/proc").is_dir():
            assert _polling(server.process.pid) == 1
        answer.close()
        connection.close()
        end_s = time.monotonic() + 60
        while _polling(server.process.pid) and time.monotonic() < end_s:
            time.sleep(0.2)
        assert _polling(server.process.pid) == 0, "nobody looks, nobody polls"
    finally:
        server.stop()


def _polling(parent: int) -> int:
    """How many samplers a process has started and not ended."""
    found = 0
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            command = Path(f"/proc/{pid}/cmdline")
            found += (
                command.exists() and b"wattcast.measure.polling_process" in command.read_bytes()
            )
    return found


def test_points_are_the_steps_of_the_counter() -> None:
    samples = EnergySamples.load(DATA / "h200_sensor.npz")
    found = read_points(samples, float(samples["time_s"][0]))
    watts = [p["power_w"] for p in found if "power_w" in p]
    assert min(watts) == pytest.approx(127, abs=2)
    assert np.median(watts[-20:]) == pytest.approx(600, abs=8)
    energy_j = [p["energy_j"] for p in found if "energy_j" in p]
    assert energy_j[-1] == pytest.approx(0.1 * sum(watts), rel=0.01)


def test_recordings_good_and_bad(tmp_path: Path) -> None:
    assert len(recorded_feed(DATA / "h200_softmax.npz").found) > 20
    shipped = recorded_feed()
    assert shipped.about.gpu == "h200"
    assert shipped.about.duration_s == pytest.approx(2.9, abs=0.2)
    bad = tmp_path / "bad.npz"
    for content in (b"", b"PK\x03\x04 not a zip", b"x" * 1000):
        bad.write_bytes(content)
        with pytest.raises(BadInput, match=r"bad\.npz"):
            recorded_feed(bad)
    with pytest.raises(BadInput):
        recorded_feed(tmp_path / "missing.npz")
    np.savez(bad, columns=np.array(["time_s"]), rows=np.array([object()]), allow_pickle=True)
    with pytest.raises(BadInput, match=r"bad\.npz"):
        recorded_feed(bad)


def test_a_machine_without_a_card_replays_unless_a_card_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*arguments: object) -> None:
        raise MissingTool("no card.")

    monkeypatch.setattr("wattcast.measure.energy_sources.open_source", nothing)
    assert choose_feed("auto", None).about.recorded
    with pytest.raises(MissingTool):
        choose_feed("gpu", None)


def test_only_so_many_may_watch_and_each_leaves_its_place() -> None:
    async def run() -> None:
        watchers = FeedWatchers(recorded_feed(), most=1)
        stream = watchers.events(100.0)
        assert b"event: about" in await anext(stream)
        assert watchers.now == 1
        with pytest.raises(live_stream.TooManyStreams):
            watchers.begin("10.0.0.1")
        await stream.aclose()
        assert watchers.now == 0
        short = FeedWatchers(recorded_feed(), longest_s=0.3)
        events = [event async for event in short.events(0.1)]
        assert events[-1].startswith(b"event: end")
        assert sum(event.startswith(b"event: points") for event in events) <= 3

    asyncio.run(run())
    assert live_stream.MOST_WATCHERS <= 16


def test_a_run_saved_by_measure_is_replayed(standin, tmp_path: Path, call) -> None:
    standin.follow("at -10 250 1500 0 50 70")
    kept, figure = tmp_path / "run.npz", tmp_path / "run.svg"
    argv = ["measure", "run", "--source", "nvml", "--save", str(kept), "--plot", str(figure)]
    against = ["--against", "gpt2", "--gpu", "h200", "--seq", "128"]
    done = call(*argv, *against, "--json", "--", "sleep", "1.5")
    assert done.code == 0, done.err
    watts = [p["power_w"] for p in recorded_feed(kept).found if "power_w" in p]
    assert np.median(watts) == pytest.approx(250.0, rel=0.05)
    assert figure.read_bytes().startswith(b"<?xml")
    assert call(*argv[:4], "--save", "run.txt", "--", "true").code == 2
