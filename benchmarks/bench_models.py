"""One prediction of every model in the catalogue on the GPU that was measured, once all is loaded.

A workload is first (of a model in a phase that this process has not met), new (at a batch not met
before) or known (predicted again); all but the last are built, lowered and predicted for the first
time. Told is what reading all of a prediction adds (parts, operators, interval, support). Ninety
workloads, evenly from the catalogue, go through ``predict_many``, likewise. CPU time, the least of
several, since machines are shared. Ratios are over a thousand small steps of NumPy, of which a
prediction is made: they travel between machines, milliseconds do not. Run by hand for a table by
phase: ``python benchmarks/bench_models.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from wattcast.predictor.api import predict, predict_many
from wattcast.predictor.prediction import Prediction
from wattcast.workload import model_catalogue
from wattcast.workload.model_catalogue import ModelKind

GPU = "h200"
FIRST_BATCHES, NEW_BATCHES = (3, 5), (7, 9, 10, 11)  # a workload not met before each time
MANY_BATCHES = {True: (12, 13, 14, 15), False: (17, 18, 19, 21)}  # with training, without
FIRST_LENGTHS = (320, 352)  # which no structure met before has
MANY = 90
LIMIT_S = 5e-3
_PHASES = {
    ModelKind.LANGUAGE: ("prefill", "decode", "train"),
    ModelKind.ENCODER: ("forward", "train"),
}


def workloads() -> Iterator[tuple[str, dict[str, object]]]:
    """Every model in each of its phases, batch left open."""
    for name in model_catalogue.list_models():
        kind = model_catalogue.load_model(name).kind
        for phase in _PHASES.get(kind, ("forward", "train")):
            yield name, {"phase": phase} | ({} if kind is ModelKind.VISION else {"seq": 384})


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


def told(prediction: Prediction) -> None:
    """Read what a report shows."""
    _ = (
        prediction.interval,
        prediction.support,
        prediction.peak_power_w,
        prediction.modules,
        prediction.ops,
    )


def measured() -> dict[tuple[str, str], tuple[float, float, float, float]]:
    """Seconds of a first, a new and a known prediction, and of reading it, by model and phase; the
    least of a few.
    """
    for name in ("bert-base", "resnet50"):
        told(predict(name, GPU, batch=2))
    found = {}
    for name, options in workloads():
        ask = partial(predict, name, GPU, **options)
        first = min(seconds(partial(ask, batch=batch)) for batch in FIRST_BATCHES)
        new, known = (
            min(seconds(partial(ask, batch=batch)) for batch in NEW_BATCHES) for _ in range(2)
        )
        read = min(seconds(partial(told, ask(batch=batch))) for batch in NEW_BATCHES)
        found[name, str(options["phase"])] = first, new, known, read
    return found


def ninety(batch: int, training: bool, length: int = 0) -> list[tuple[str, dict[str, object]]]:
    """Ninety different workloads: evenly from the catalogue, or its inference and some of that at a
    larger batch.
    """
    of = [
        (name, options | ({"seq": length} if length and "seq" in options else {}))
        for name, options in workloads()
        if training or options["phase"] != "train"
    ]
    if len(of) >= MANY:
        return [
            (name, options | {"batch": batch})
            for name, options in (of[i * len(of) // MANY] for i in range(MANY))
        ]
    return [
        (name, options | {"batch": batch + 20 * (i // len(of))})
        for i, (name, options) in enumerate(of * 2)
    ][:MANY]


def many_s(training: bool) -> float:
    """Seconds of ninety new workloads in one go: the least of a few."""
    return min(
        seconds(partial(predict_many, ninety(batch, training), GPU))
        for batch in MANY_BATCHES[training]
    )


def first_many_s(training: bool) -> float:
    """The same of models at lengths of sequences not met before."""
    lengths = [length + training for length in FIRST_LENGTHS]
    return min(
        seconds(partial(predict_many, ninety(22, training, length), GPU)) for length in lengths
    )


class Catalogue:
    """The whole catalogue, measured once."""

    timeout = 600

    def setup_cache(self) -> dict[str, float]:
        """New and known: median and worst in ms, and the median over a thousand steps of NumPy."""
        steps = min(seconds(thousand_steps) for _ in range(20))
        first, new, known, read = zip(*measured().values(), strict=True)
        return {
            "first_median_ms": 1e3 * statistics.median(first),
            "new_median_ms": 1e3 * statistics.median(new),
            "new_worst_ms": 1e3 * max(new),
            "new_within_limit": sum(s < LIMIT_S for s in new) / len(new),
            "known_median_ms": 1e3 * statistics.median(known),
            "known_worst_ms": 1e3 * max(known),
            "told_median_ms": 1e3 * statistics.median(read),
            "many_s": many_s(training=True),
            "many_inference_s": many_s(training=False),
            "first_many_s": first_many_s(training=True),
            "new_over_steps": statistics.median(new) / steps,
            "known_over_steps": statistics.median(known) / steps,
        }

    def track_first_median_ms(self, found: dict[str, float]) -> float:
        """Of a model that this process has not met."""
        return found["first_median_ms"]

    def track_new_median_ms(self, found: dict[str, float]) -> float:
        return found["new_median_ms"]

    def track_new_worst_ms(self, found: dict[str, float]) -> float:
        return found["new_worst_ms"]

    def track_new_within_limit(self, found: dict[str, float]) -> float:
        """Share of the catalogue whose new predictions take less than 5 ms."""
        return found["new_within_limit"]

    def track_told_median_ms(self, found: dict[str, float]) -> float:
        """What reading all of a prediction adds."""
        return found["told_median_ms"]

    def track_many_s(self, found: dict[str, float]) -> float:
        """Ninety new workloads, evenly from the catalogue."""
        return found["many_s"]

    def track_many_inference_s(self, found: dict[str, float]) -> float:
        """Ninety new workloads, inference alone."""
        return found["many_inference_s"]

    def track_first_many_s(self, found: dict[str, float]) -> float:
        """Ninety workloads of lengths not met before."""
        return found["first_many_s"]

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


def main() -> None:
    """Print the table by phase."""
    steps_ms = 1e3 * min(seconds(thousand_steps) for _ in range(20))
    table = measured()
    for phase in dict.fromkeys(phase for _, phase in table):
        rows = {name: times for (name, of), times in table.items() if of == phase}
        for i, kind in enumerate(("first", "new", "known", "told")):
            worst = max(rows, key=lambda name: rows[name][i])
            middle, most = (
                1e3 * statistics.median(times[i] for times in rows.values()),
                1e3 * rows[worst][i],
            )
            within = sum(times[i] < LIMIT_S for times in rows.values())
            print(
                f"{phase:8} {kind:6} median {middle:6.2f} ms, worst {most:6.2f} ms ({worst}), "
                f"{within} of {len(rows)} under {1e3 * LIMIT_S:g} ms"
            )
    for i, kind in enumerate(("first", "new")):
        every = [times[i] for times in table.values()]
        within = sum(s < LIMIT_S for s in every)
        print(
            f"all      {kind:6} median {1e3 * statistics.median(every):6.2f} ms, {within} of {len(every)} under 5 ms"
        )
    for kind, of in (("first", first_many_s), ("new", many_s)):
        print(
            f"{MANY} {kind} in one go: {of(True):.2f} s evenly from the catalogue, {of(False):.2f} s inference alone"
        )
    print(f"a thousand small steps of NumPy: {steps_ms:.2f} ms")


if __name__ == "__main__":
    main()
