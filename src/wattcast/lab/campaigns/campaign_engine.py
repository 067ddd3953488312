"""The campaign engine: measure each row once, save it as soon as it is there, and stop within a
budget of time.

A row whose id is on file is not measured again, so that a campaign continues where it stopped. A
row that fails is saved with its error and costs only itself, unless the device is gone."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wattcast.core import MissingTool, Refused
from wattcast.core.measured_rows import (
    ChainRow,
    KernelRow,
    ModelKernels,
    ModelRow,
)
from wattcast.core.row_journals import Journal
from wattcast.measure.cuda_device import ClockSpinner
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    SettlingRule,
    make_run_name,
    make_torch_run_info,
    say,
    try_spinner,
)

Row = TypeVar(
    "Row",
    KernelRow,
    ChainRow,
    ModelRow,
    ModelKernels,
)
Item = TypeVar("Item")


class TorchDevice:
    """PyTorch on the first CUDA device, with a stream of its own."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()

    def mark(self) -> Any:
        """Return a fresh timing event, recorded now on the stream."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def issue(
        self,
        run: Callable[[], Any],
        times: int,
    ) -> None:
        """Queue calls of ``run`` on the stream; what is no graph is launched by the host as it
        goes.
        """
        with self.torch.cuda.stream(self.stream):
            for _ in range(times):
                run()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self.torch.cuda.synchronize()

    def recover(self) -> None:
        """Give cached memory back after a failed row; a broken context raises here."""
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()


def time_calls(
    device: Any,
    run: Callable[[], Any],
    times: int,
    warm: int = 1,
) -> np.ndarray:
    """Return the seconds of each of ``times`` calls, all queued before waiting."""
    device.issue(run, warm)
    marks = [device.mark()]
    for _ in range(times):
        device.issue(run, 1)
        marks.append(device.mark())
    marks[-1].synchronize()
    return np.array([a.elapsed_time(b) for a, b in pairwise(marks)]) / 1e3


def list_trace_events(profiler: Any) -> list[dict[str, Any]]:
    """Return the events that PyTorch's profiler recorded, as its chrome trace lists them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def import_cuda_torch(what: str) -> Any:
    """Import PyTorch where it sees a CUDA device; otherwise say what is missing for ``what``."""
    try:
        import torch
    except ImportError:
        raise MissingTool(f"{what} needs PyTorch with CUDA, which is not installed.") from None
    if not torch.cuda.is_available():
        raise MissingTool(f"{what} needs a CUDA GPU; PyTorch sees none.")
    return torch


@dataclass
class OperatorBench:
    """What measuring a row needs."""

    gpu: Any  # a TorchDevice, or a stand-in
    sampler: Sampler
    run: str
    spinner: ClockSpinner | None = None
    top_clock_hz: float = 0.0
    rule: SettlingRule = field(default_factory=SettlingRule)
    rested_s: float = 0.0  # when the last load ended
    tired_s: float = 0.0  # how long a pause it asks for
    patience: int = 25  # waits for the top clock that may fail before no more are tried

    @classmethod
    def open(
        cls,
        gpu: TorchDevice,
        sampler: Sampler,
        out: Path,
        **options: Any,
    ) -> OperatorBench:
        """Start a run: describe card and libraries in ``runs.jsonl``, and load the spin kernel."""
        out.mkdir(parents=True, exist_ok=True)
        run = make_run_name()
        top_hz = sampler.identity.top_clock_hz or 0.0
        Journal(out / "runs.jsonl", key="run").append(
            make_torch_run_info(run, sampler.identity, gpu.torch)
        )
        return cls(
            gpu,
            sampler,
            run,
            try_spinner(gpu.torch),
            top_hz,
            **options,
        )


@dataclass
class Campaign:
    """One call of a campaign: where rows go, what was done, and when to stop."""

    bench: OperatorBench
    out: Path
    deadline_s: float
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    journals: dict[str, Journal] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - time.monotonic()

    def journal(
        self,
        kind: str,
        key: str = "id",
    ) -> Journal:
        """Return the file of one kind of row."""
        return self.journals.setdefault(kind, Journal(self.out / f"{kind}.jsonl", key=key))

    def record(
        self,
        kind: str,
        blank: Row,
        make: Callable[[], Row],
        label: str = "",
    ) -> Row | None:
        """Measure one row unless its id is on file; save it, or ``blank`` with the reason it
        failed.
        """
        journal = self.journal(kind)
        if blank.id in journal.ids:
            self.counts[f"{kind} skipped"] += 1
            return None
        try:
            row = make()
        except Exception as error:
            row = replace(blank, error=f"{type(error).__name__}: {error}"[:400])
            self.counts[f"{kind} errors"] += 1
            self.errors[f"{label or blank.id} {kind}: {row.error}"[:160]] += 1
            if isinstance(error, Refused) and self.bench.sampler.lost:
                raise
            self.recover()
            if not self.bench.sampler.healthy:
                self.bench.sampler.restart()
        journal.append(row)
        self.counts[str(kind)] += 1
        return row

    def recover(self) -> None:
        """Bring the device back to a clean state after a failed row; a dead context ends the
        campaign.
        """
        self.bench.gpu.recover()

    def within(
        self,
        items: Sequence[Item],
        each_s: float,
        label: str,
        every: int = 200,
    ) -> Iterator[Item]:
        """Yield items while there is time for another, with progress."""
        for place, item in enumerate(items):
            if self.left_s < each_s + 2.0:
                say(f"{label}: budget spent after {place} of {len(items)}")
                self.counts[f"{label} left for another call"] += len(items) - place
                return
            if place % every == 0:
                say(f"{label}: {place} of {len(items)}, {self.left_s:.0f} s left")
            yield item

    def finish(self, keep_samples: bool = True) -> Counter[str]:
        """Keep the samples of the run, print the commonest errors and return what was done."""
        sampler = self.bench.sampler
        if keep_samples:
            sampler.since(0).save(self.out / f"samples-{self.bench.run}.npz")
        self.counts["sampler read errors"] += sampler.errors
        for text, count in self.errors.most_common(15):
            say(f"{count} x {text}")
        return self.counts
