"""A million-sample metric trace to a power trace, against what polars needs to read the one and write the other."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS = 1_000_000
PARTS = 18


class MillionSamples:
    """Plain CSV, 30 counters in, 18 components and a total out."""

    timeout = 600
    number = 1
    repeat = 3
    warmup_time = 0

    def setup_cache(self) -> str:
        """One trace for all timings; counts of very different sizes, a duty and idle SMs."""
        import polars as pl

        from wattcast.activity.simulated import Dialect, counters

        folder = tempfile.mkdtemp(prefix="bench_trace_")
        random = np.random.default_rng(7)
        columns = {
            c.column: np.rint(random.exponential(10.0 ** (1 + i % 5), ROWS))
            for i, c in enumerate(counters(Dialect.GPUWATTCH))
        }
        columns |= {
            "PIPE_A": np.round(random.random(ROWS) * 0.8, 6),
            "IDLE_CORE_N": np.round(random.random(ROWS) * 8.0, 6),
            "CONST_DYNAMICN": np.zeros(ROWS),
        }
        pl.DataFrame(columns).write_csv(Path(folder) / "metric_trace.log", float_precision=6)
        return folder

    def setup(self, folder: str) -> None:
        self.folder = Path(folder)
        self.out = Path(tempfile.mkdtemp(prefix="bench_out_"))

    def teardown(self, folder: str) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def time_power_trace(self, folder: str) -> None:
        """Our pass: read, mark kernels, compute, count, write the power trace."""
        _power_trace(self.folder, self.out)

    def time_polars(self, folder: str) -> None:
        """polars reading the metric trace and writing a power trace of the same size."""
        _polars(self.folder, self.out)

    def track_ratio(self, folder: str) -> float:
        """Our pass over polars, the best of three each, taken in turns."""
        ours, theirs = [], []
        for _ in range(3):
            ours.append(_seconds(_power_trace, self.folder, self.out))
            theirs.append(_seconds(_polars, self.folder, self.out))
        return min(ours) / min(theirs)

    def peakmem_power_trace(self, folder: str) -> None:
        """Memory must not grow with the trace."""
        _power_trace(self.folder, self.out)


def _power_trace(folder: Path, out: Path) -> None:
    from wattcast.activity.simulated import Dialect, Sampling, open_metric_trace
    from wattcast.power.component.build import build
    from wattcast.power.component.components import component_set
    from wattcast.power.component.demo import demo_architecture, demo_energies
    from wattcast.power.component.run import TraceRun, Wanted, run_trace

    components = component_set(Dialect.GPUWATTCH, compat=True)
    model = build(demo_architecture(), demo_energies(), components).model
    trace = open_metric_trace(folder / "metric_trace.log", Dialect.GPUWATTCH)
    wanted = Wanted(report=True, power_trace=True, metric_trace=False, steady=False, parquet=False)
    run_trace(TraceRun(trace, model, components, Sampling(500, 1e9), out, wanted=wanted))


def _polars(folder: Path, out: Path) -> None:
    import polars as pl

    frame = pl.read_csv(folder / "metric_trace.log")
    with (out / "polars.csv").open("wb") as stream:
        frame.select(frame.columns[: PARTS + 1]).write_csv(stream, float_precision=6)


def _seconds(work: object, folder: Path, out: Path) -> float:
    assert callable(work)
    start = time.perf_counter()
    work(folder, out)
    return time.perf_counter() - start
