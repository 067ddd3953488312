"""Stream measured power, clock and energy, from the GPU of this machine or from a recorded run.

A card is read only while somebody looks: the sampler starts with the first watcher and ends with
the last, so that an open page does not keep an idle card awake."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import BadInput, files
from wattcast.core.errors import MissingTool
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.sampler import Sampler

MOST_RECORDING_BYTE = 64 << 20
MOST_WATCHERS = 8
CLIENT_WATCHERS = 2  # streams of one client
LONGEST_S = 3600.0  # of one stream
SECURE_S = 60.0  # after which a stream may have to make room for somebody who waits
PERIOD_S = 0.2
CLOCK_EVERY_S = 0.05
WINDOW_S = 20.0  # of samples from which the counter's steps are told
PointStream = AsyncGenerator[
    list[dict[str, float]], None
]  # time_s with power_w and energy_j, or with clock_hz


class FeedInfo(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream shows."""

    title: str
    device: str = ""
    date: str = ""
    gpu: str = ""  # catalogue name
    workload: dict[str, Any] | None = None  # what ran, as a workload file
    recorded: bool = True
    duration_s: float | None = None
    shown: bool = True  # False: nobody asked for a recording, and there is no card


def read_points(
    samples: EnergySamples,
    origin_s: float,
    base_j: float | None = None,
) -> list[dict[str, float]]:
    """Turn steps of the energy counter into power at their middle, and the clock now and then, in
    order of time.

    Times count from ``origin_s``, energies from ``base_j`` (default: the first step).
    """
    stepped = find_ticks(samples)
    points: list[dict[str, float]] = []
    if len(stepped.time_s) > 1:
        middle_s = 0.5 * (stepped.time_s[1:] + stepped.time_s[:-1]) - origin_s
        energy_j = stepped.energy_j[1:] - (stepped.energy_j[0] if base_j is None else base_j)
        points += [
            {
                "time_s": round(float(t), 4),
                "power_w": round(float(w), 2),
                "energy_j": round(float(e), 3),
            }
            for t, w, e in zip(middle_s, stepped.interval_w, energy_j, strict=True)
        ]
    has_clock = np.isfinite(samples["sm_clock_hz"])
    time_s = samples["time_s"][has_clock] - origin_s
    clock_hz = samples["sm_clock_hz"][has_clock]
    last_s = -np.inf
    for t, hz in zip(time_s, clock_hz, strict=True):
        if t - last_s >= CLOCK_EVERY_S:
            points.append({"time_s": round(float(t), 4), "clock_hz": float(hz)})
            last_s = t
    return sorted(points, key=lambda point: point["time_s"])


@dataclass(frozen=True)
class ReplayFeed:
    """Plays a recorded run at the speed it happened or faster."""

    about: FeedInfo
    found: list[dict[str, float]] = field(repr=False)

    async def stream(self, speed: float) -> PointStream:
        """The points, each no earlier than its time."""
        at = 0
        now_s = 0.0
        while at < len(self.found):
            now_s += PERIOD_S * speed
            upto = bisect_right(self.found, now_s, key=lambda point: point["time_s"])
            yield self.found[at:upto]
            at = upto
            await asyncio.sleep(PERIOD_S)


class CardFeed:
    """Samples the GPU of this machine in a process of its own while there are watchers."""

    def __init__(
        self,
        index: int | None,
        title: str,
    ) -> None:
        self.about = FeedInfo(title, recorded=False)
        self._index = index
        self._sampler: Sampler | None = None
        self._watchers = 0
        self._starting = asyncio.Lock()

    async def stream(self, speed: float) -> PointStream:
        """Points as they are measured; ``speed`` does not matter to what is happening now."""
        sampler = await self._join()
        mark = sampler.head
        sent_s = -np.inf
        origin_s = base_j = None
        try:
            while sampler.healthy:
                await asyncio.sleep(PERIOD_S)
                samples = sampler.since(mark)
                if not len(samples):
                    yield []
                    continue
                origin_s = float(samples["time_s"][0]) if origin_s is None else origin_s
                if base_j is None and len(counter_j := samples.known("energy_j")):
                    base_j = float(counter_j[0])
                recent = samples.between(float(samples["time_s"][-1]) - WINDOW_S, np.inf)
                fresh = [p for p in read_points(recent, origin_s, base_j) if p["time_s"] > sent_s]
                sent_s = fresh[-1]["time_s"] if fresh else sent_s
                yield fresh
        finally:  # without waiting, since whoever leaves may be a cancelled task
            self._watchers -= 1
            if self._watchers == 0 and self._sampler is not None:
                sampler = self._sampler
                self._sampler = None
                threading.Thread(target=sampler.stop, daemon=True).start()

    async def _join(self) -> Sampler:
        async with self._starting:
            self._watchers += 1
            if self._sampler is None:
                sampler = Sampler("nvml", self._index, period_s=0.05, relaxed=True)
                try:
                    await asyncio.to_thread(sampler.start)
                except BaseException:
                    self._watchers -= 1
                    raise
                self._sampler = sampler
                self.about.device = (
                    f"{sampler.identity.name}, driver {sampler.identity.driver or 'unknown'}"
                )
            return self._sampler


Feed = ReplayFeed | CardFeed


def recorded_feed(path: Path | None = None) -> ReplayFeed:
    """Return a recording of ``measure run --save``; without a path, one of an H200 that ships."""
    if path is None:
        folder = files("wattcast.web").joinpath("recorded")
        about = decode_json(
            folder.joinpath("h200-linear.json").read_bytes(), FeedInfo, "h200-linear.json"
        )
        samples = EnergySamples.load(folder / "h200-linear.npz")
    else:
        read_bytes(path, MOST_RECORDING_BYTE)  # there, a file, and not too large
        samples = EnergySamples.load(path)
        about = FeedInfo(path.stem)
    if not len(samples):
        raise BadInput(f"{about.title}: the recording is empty.")
    points = read_points(samples, float(samples["time_s"][0]))
    about.duration_s = points[-1]["time_s"] if points else 0.0
    return ReplayFeed(about, points)


def choose_feed(
    live: str,
    replay: Path | None,
    index: int | None = None,
) -> Feed:
    """Choose a feed: ``gpu`` this machine's card, ``replay`` a recording, ``auto`` the card where
    there is one.
    """
    if live == "replay" or replay is not None:
        return recorded_feed(replay)
    from wattcast.measure.energy_sources import open_source

    try:
        opened, identity = open_source("nvml", index)
        opened.close()
    except MissingTool:
        if live == "gpu":
            raise
        shipped = recorded_feed(None)
        shipped.about.shown = False
        return shipped
    return CardFeed(index, identity.name)


class TooManyStreams(Exception):
    """No stream may begin now; the text says why."""


@dataclass(eq=False)
class _Stream:
    """One stream that runs: whose it is, since when, and whether it has to make room."""

    client: str
    began_s: float
    must_end: asyncio.Event = field(default_factory=asyncio.Event)


class FeedWatchers:
    """Sends streams as server-sent events, to a limited number of watchers for a limited time.

    One client has two streams at most. Where all places are taken, the oldest stream that had its
    minute makes room for a newcomer, so that nobody holds them all for an hour."""

    def __init__(
        self,
        feed: Feed,
        most: int = MOST_WATCHERS,
        longest_s: float = LONGEST_S,
        secure_s: float = SECURE_S,
    ) -> None:
        self.feed = feed
        self._most = most
        self._longest_s = longest_s
        self._secure_s = secure_s
        self._streams: list[_Stream] = []  # the oldest first

    @property
    def now(self) -> int:
        """Number of streams that run."""
        return len(self._streams)

    def begin(self, client: str = "") -> _Stream:
        """Take a place for a client; TooManyStreams where it has enough, or nobody can make
        room.
        """
        if sum(stream.client == client for stream in self._streams) >= CLIENT_WATCHERS:
            raise TooManyStreams(f"this client watches {CLIENT_WATCHERS} streams already.")
        staying = [stream for stream in self._streams if not stream.must_end.is_set()]
        if len(staying) >= self._most:
            oldest = staying[0]
            if time.monotonic() - oldest.began_s < self._secure_s:
                raise TooManyStreams("as many are watching as may; try again later.")
            oldest.must_end.set()
        stream = _Stream(client, time.monotonic())
        self._streams.append(stream)
        return stream

    async def events(
        self,
        speed: float,
        gone: Callable[[], Awaitable[bool]] | None = None,
        place: _Stream | None = None,
    ) -> AsyncIterator[bytes]:
        """Yield what a browser's EventSource reads, until ``gone`` says that nobody reads any
        more.
        """
        place = self.begin() if place is None else place
        stream = self.feed.stream(speed)
        try:
            yield _encode_event("about", self.feed.about)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._longest_s):
                    async for batch in stream:
                        if place.must_end.is_set() or (gone is not None and await gone()):
                            break
                        if batch:
                            yield _encode_event("points", batch)
            yield _encode_event("end", {})
        except MissingTool as error:
            yield _encode_event("end", {"error": str(error)})
        finally:
            self.finish(place)
            await stream.aclose()

    def finish(self, place: _Stream) -> None:
        """Give a place back; one that was given back already stays so."""
        with contextlib.suppress(ValueError):
            self._streams.remove(place)


def _encode_event(name: str, data: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
