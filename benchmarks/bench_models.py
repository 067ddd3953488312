"""One prediction of every model in the catalogue on the GPU that was measured, once all is loaded.

A workload is new (built, lowered and predicted for the first time in this process) or known (predicted again). CPU
time, the least of several, since machines are shared. Ratios are over a thousand small steps of NumPy, of which a
prediction is made: they travel between machines, milliseconds do not. Run by hand for a table by phase:
``python benchmarks/bench_models.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from wattcast.api import predict
from wattcast.workload import models
from wattcast.workload.architectures import Kind

GPU = "h200"
BATCHES = (3, 5, 6, 7)  # a new workload each time
_PHASES = {Kind.LANGUAGE: ("prefill", "decode", "train"), Kind.ENCODER: ("forward", "train")}


def workloads() -> Iterator[tuple[str, dict[str, object]]]:
    """Every model in each of its phases, batch left open."""
    for name in models.names():
        kind = models.load(name).kind
        for phase in _PHASES.get(kind, ("forward", "train")):
            yield name, {"phase": phase} | ({} if kind is Kind.VISION else {"seq": 384})


def seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def thousand_steps() -> None:
    """What a prediction is made of: NumPy on as many numbers as a model has operators."""
    numbers = np.arange(1.0, 41.0)
    for _ in range(500):
        np.sqrt(numbers + 1.0)


def measured() -> dict[tuple[str, str], tuple[float, float]]:
    """Seconds of a new prediction and of a known one, by model and phase: the least of a few each."""
    for name in ("bert-base", "resnet50"):
        predict(name, GPU, batch=2)
    found = {}
    for name, options in workloads():
        asked = [partial(predict, name, GPU, batch=batch, **options) for batch in BATCHES]
        found[name, str(options["phase"])] = min(map(seconds, asked)), min(map(seconds, asked))
    return found


class Catalogue:
    """The whole catalogue, measured once."""

    timeout = 600

    def setup_cache(self) -> dict[str, float]:
        """New and known: median and worst in ms, and the median over a thousand steps of NumPy."""
        steps = min(seconds(thousand_steps) for _ in range(20))
        new, known = zip(*measured().values(), strict=True)
        return {
            "new_median_ms": 1e3 * statistics.median(new),
            "new_worst_ms": 1e3 * max(new),
            "known_median_ms": 1e3 * statistics.median(known),
            "known_worst_ms": 1e3 * max(known),
            "new_over_steps": statistics.median(new) / steps,
            "known_over_steps": statistics.median(known) / steps,
        }

    def track_new_median_ms(self, found: dict[str, float]) -> float:
        return found["new_median_ms"]

    def track_new_worst_ms(self, found: dict[str, float]) -> float:
        return found["new_worst_ms"]

    def track_known_median_ms(self, found: dict[str, float]) -> float:
        return found["known_median_ms"]

    def track_known_worst_ms(self, found: dict[str, float]) -> float:
        return found["known_worst_ms"]

    def track_new_over_steps(self, found: dict[str, float]) -> float:
        """How many thousand small steps of NumPy a new prediction costs."""
        return found["new_over_steps"]

    def track_known_over_steps(self, found: dict[str, float]) -> float:
        """The same of a known one."""
        return found["known_over_steps"]


if __name__ == "__main__":
    table = measured()
    for phase in dict.fromkeys(phase for _, phase in table):
        rows = {name: times for (name, of), times in table.items() if of == phase}
        for kind, times in zip(("new", "known"), zip(*rows.values(), strict=True), strict=True):
            worst = max(rows, key=lambda name: rows[name][0 if kind == "new" else 1])
            middle, most = 1e3 * statistics.median(times), 1e3 * max(times)
            print(f"{phase:8} {kind:6} {len(rows):3} models: median {middle:6.2f} ms, worst {most:6.2f} ms ({worst})")
