"""The GPU as the campaign uses it: one stream, one memory pool for graphs, timed replays.

A row's calls are captured in a CUDA graph, so that the GPU never waits for the host between them.
All graphs share one pool, held open by a keeper, so that no row pays for allocation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from wattcast.errors import MissingTool
from wattcast.measure.kernels.operands import Operands
from wattcast.measure.kernels.operators import Builder, Call
from wattcast.measure.kernels.spec import Spec

POOL_BYTE = {"bf16": 8 * 10**9, "fp16": 8 * 10**9, "fp32": 14 * 10**9, "fp8": 3 * 10**9}
GRAPH_S = 0.0025  # a graph should run about this long
ROTATION_S = 0.008  # or longer, up to this, to visit every operand set
MOST_COPIES = 400


@dataclass(frozen=True)
class Graph:
    """Captured copies of one call."""

    graph: Any
    copies: int
    call: Call
    guess_s: float  # of one copy, from an eager run

    def drop(self) -> None:
        """Give its memory back to the shared pool."""
        self.graph.reset()


class Gpu:
    """PyTorch on one CUDA device, set up for measuring. ``open`` starts it."""

    def __init__(self, torch: Any, operands: Operands, l2_byte: int) -> None:
        self.torch, self.operands = torch, operands
        self.builder = Builder(torch, operands, l2_byte)
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        self._events: list[Any] = []

    @classmethod
    def open(cls, pool_byte: dict[str, int] | None = None) -> Gpu:
        """Draw the operand pools and capture the keeper."""
        try:
            import torch
        except ImportError:
            raise MissingTool("measuring kernels needs PyTorch with CUDA, which is not installed.") from None
        if not torch.cuda.is_available():
            raise MissingTool("measuring kernels needs a CUDA GPU; PyTorch sees none.")
        torch.set_grad_enabled(False)
        operands = Operands(torch, "cuda", pool_byte or POOL_BYTE)
        operands.fill("random")
        gpu = cls(torch, operands, int(torch.cuda.get_device_properties(0).L2_cache_size))
        dummy = torch.zeros(32, device="cuda")
        torch.cuda.synchronize()
        gpu._capture(gpu._keeper, lambda: dummy.add(1.0))
        return gpu

    def prepare(self, spec: Spec, graph_s: float = GRAPH_S, most_copies: int = MOST_COPIES) -> Graph:
        """Build, warm up, time roughly and capture; the graph runs about ``graph_s``."""
        torch = self.torch
        call = self.builder.build(spec)
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            call.run(0)
            call.run(1)
            begin, end = self._event(0), self._event(1)
            begin.record()
            for copy in range(3):
                call.run(copy)
            end.record()
        end.synchronize()
        guess_s = begin.elapsed_time(end) / 3e3
        rotating = min(call.sets, ROTATION_S / guess_s)
        copies = int(min(max(graph_s / guess_s, min(rotating, 4 * graph_s / guess_s), 1), most_copies))
        if guess_s < 3e-5:  # three eager calls of a short kernel show the host, not the GPU
            copies = min(max(copies, 160), most_copies)
        graph = torch.cuda.CUDAGraph()
        held: list[Any] = [None] * min(call.sets, copies)

        def run() -> None:
            for copy in range(copies):
                held[copy % len(held)] = call.run(copy)

        self._capture(graph, run)
        held.clear()
        return Graph(graph, copies, call, guess_s)

    def replay(self, graph: Graph, times: int) -> None:
        """Queue replays; returns before they have run."""
        with self.torch.cuda.stream(self.stream):
            for _ in range(times):
                graph.graph.replay()

    def timed(self, graph: Graph, replays: int, warm: int = 1) -> np.ndarray:
        """Seconds per copy of each of ``replays`` replays, all queued before waiting."""
        marks = [self._event(place) for place in range(replays + 1)]
        with self.torch.cuda.stream(self.stream):
            for _ in range(warm):
                graph.graph.replay()
            marks[0].record()
            for mark in marks[1:]:
                graph.graph.replay()
                mark.record()
        marks[-1].synchronize()
        elapsed_ms = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return np.array(elapsed_ms) / 1e3 / graph.copies

    def mark(self) -> Any:
        """A fresh timing event, recorded now on the stream."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self.torch.cuda.synchronize()

    def recover(self) -> None:
        """After a failed row: give cached memory back. A broken context raises here."""
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()

    def _capture(self, graph: Any, run: Callable[[], Any]) -> None:
        with self.torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()

    def _event(self, place: int) -> Any:
        while len(self._events) <= place:
            self._events.append(self.torch.cuda.Event(enable_timing=True))
        return self._events[place]


def pause(since_s: float, least_s: float) -> None:
    """Sleep until ``least_s`` have passed since ``since_s``."""
    time.sleep(max(0.0, since_s + least_s - time.monotonic()))
