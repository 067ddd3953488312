"""Time launches of a kernel that does nothing: one after another, waited for, and in graphs.

``launch_queued`` is the time of a launch in a long queue: the host's or the device's, whichever is
slower. ``launch_waited`` is what the host waits from a launch to its end. ``launch_graph_N`` is the
time of a graph of N such kernels, each after the one before, launched one after another. No power
is measured. These have run on no card yet, only on a stand-in for the driver that keeps time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.lab.microbench.microbench_results import MicroRow, micro_row_id
from wattcast.measure.cuda_device import CudaDevice, CudaKernel, compile_cubin

EMPTY_KERNEL = "launch_nothing"
EMPTY_SOURCE = f'extern "C" __global__ void {EMPTY_KERNEL}() {{}}'
GRAPH_CURVE = "graph"
_ROUNDS = 20  # stretches that are timed
_QUEUED = 1000  # launches of a stretch
_QUICK_ROUNDS = 5
_QUICK_QUEUED = 100
_WAITED = 10  # launches waited for, in a stretch
_SMALL_BLOCK = 32  # threads: one warp, of one block


def blank_launch_row(
    name: str,
    run: str,
    repeat: int,
) -> MicroRow:
    """Return a row that names what is to be timed."""
    nodes = count_nodes(name)
    return MicroRow(
        micro_row_id(name, repeat),
        name,
        "launch",
        "node" if nodes else "launch",
        curve=GRAPH_CURVE if nodes else "",
        at=float(nodes),
        repeat=repeat,
        run=run,
        threads=_SMALL_BLOCK,
        blocks=1,
        operations=float(nodes or 1),
    )


def count_nodes(name: str) -> int:
    """Return the nodes of the graph that a name means, 0 of a launch without one.

    >>> count_nodes("launch_graph_16"), count_nodes("launch_queued")
    (16, 0)
    """
    text = name.rpartition("_")[2]
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True)
class LaunchTimer:
    """An empty kernel on a device, and how long its launches are watched."""

    device: CudaDevice
    kernel: CudaKernel
    quick: bool = False

    @classmethod
    def load(cls, device: CudaDevice, quick: bool = False) -> LaunchTimer:
        """Compile and load the empty kernel."""
        cubin = compile_cubin(EMPTY_SOURCE, device.architecture, f"{EMPTY_KERNEL}.cu")
        return cls(device, device.load(cubin, EMPTY_KERNEL), quick)

    def launch(self) -> None:
        """Put one launch on the stream."""
        self.device.launch(self.kernel, 1, _SMALL_BLOCK, (), ())

    def measure(self, row: MicroRow) -> MicroRow:
        """Return the row with the time of a launch, or of a graph."""
        nodes = count_nodes(row.name)
        if row.name == "launch_waited":
            return describe_launches(row, self._wait_for_launches(), _WAITED)
        if nodes == 0:
            return self._measure_queued(row, self.launch, self._queue_length)
        with make_graph(self.device, self.launch, nodes) as graph:
            length = max(self._queue_length // nodes, 4)
            return self._measure_queued(row, graph, length)

    @property
    def _queue_length(self) -> int:
        return _QUICK_QUEUED if self.quick else _QUEUED

    @property
    def _rounds(self) -> int:
        return _QUICK_ROUNDS if self.quick else _ROUNDS

    def _measure_queued(
        self,
        row: MicroRow,
        enqueue: Callable[[], Any],
        length: int,
    ) -> MicroRow:
        """Time stretches of ``length`` launches between two marks, once one has warmed up."""
        stretch_s = []
        for _ in range(self._rounds + 1):
            begin = self.device.mark()
            for _ in range(length):
                enqueue()
            end = self.device.mark()
            end.synchronize()
            stretch_s.append(begin.elapsed_time(end) / 1e3)  # from milliseconds
            self.device.recycle([begin, end])
        return describe_launches(row, np.array(stretch_s[1:]) / length, length)

    def _wait_for_launches(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Time the host from each launch to its end, ``(stretch,)`` means of a few."""
        self.launch()
        self.device.call("cuStreamSynchronize", self.device.stream)
        means_s = []
        for _ in range(self._rounds):
            began_s = time.perf_counter()
            for _ in range(_WAITED):
                self.launch()
                self.device.call("cuStreamSynchronize", self.device.stream)
            means_s.append((time.perf_counter() - began_s) / _WAITED)
        return np.array(means_s)


def describe_launches(
    row: MicroRow,
    launch_s: np.ndarray[Any, np.dtype[np.float64]],
    length: int,
) -> MicroRow:
    """Return the row with the median time of its stretches: a host that stalls makes one long."""
    return replace(
        row,
        launches=length * len(launch_s),
        launch_s=float(np.median(launch_s)),
        launch_spread_s=float(launch_s.std(ddof=1)) if len(launch_s) > 1 else None,
    )


@contextmanager
def make_graph(
    device: CudaDevice,
    launch: Callable[[], None],
    nodes: int,
) -> Iterator[Callable[[], Any]]:
    """Capture ``nodes`` launches as a graph, and yield what launches it."""
    driver = device.driver
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    device.call("cuStreamBeginCapture", device.stream, mode)
    try:
        for _ in range(nodes):
            launch()
    finally:
        graph = device.call("cuStreamEndCapture", device.stream)
    executable = device.call("cuGraphInstantiate", graph, 0)
    try:
        yield lambda: device.call("cuGraphLaunch", executable, device.stream)
        device.synchronize()
    finally:
        device.call("cuGraphExecDestroy", executable)
        device.call("cuGraphDestroy", graph)
