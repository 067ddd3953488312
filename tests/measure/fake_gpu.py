"""A GPU that only keeps time: a stream that is busy until some moment, so that rows can be measured
without one.

Work that follows a mark runs right after it, however late the host queues it: a host that was
stalled by other programs would leave gaps that no GPU with a full queue has."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.operator_calls import OperatorCall
from wattcast.lab.campaigns.operator_rows import CapturedGraph


@dataclass
class FakeEvent:
    """A moment on the fake stream."""

    at_s: float

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at_s - time.monotonic()))

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


@dataclass
class FakeGpu:
    """Same methods as ``Gpu``; every call takes ``call_s``."""

    call_s: float = 1e-4
    fails: set[str] = field(default_factory=set)  # spec ids that raise
    operands: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(pattern="random"))
    free_s: float = 0.0
    is_streaming: bool = False  # whether the next work follows a mark or other work
    recovered: int = 0

    def prepare(self, spec: OperatorSpec, graph_s: float = 0.0025) -> CapturedGraph:
        if spec.id in self.fails:
            raise RuntimeError("CUDA out of memory")
        call = OperatorCall(lambda copy: None, sets=4, fixed_byte=1000, set_byte=10)
        return CapturedGraph(SimpleNamespace(reset=lambda: None), 25, call)

    def replay(self, graph: CapturedGraph, times: int) -> None:
        self.begin_stream()
        self.free_s += times * graph.copies * self.call_s

    def timed(self, graph: CapturedGraph, replays: int, warm: int = 1) -> np.ndarray:
        self.replay(graph, replays + warm)
        self.synchronize()
        return np.full(replays, self.call_s) * (1.0 + 1e-4 * np.arange(replays))

    def mark(self) -> FakeEvent:
        self.begin_stream()
        return FakeEvent(self.free_s)

    def begin_stream(self) -> None:
        """Start at the present moment where nothing ran before."""
        if not self.is_streaming:
            self.free_s = max(self.free_s, time.monotonic())
        self.is_streaming = True

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.free_s - time.monotonic()))
        self.is_streaming = False

    def recover(self) -> None:
        self.recovered += 1
