"""A million-sample metric trace to a power trace, against polars reading the one file and writing
the other.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 1_000_000


class MillionSamples:
    """Plain CSV, 30 counters in, 18 components and a total out."""

    timeout = 900
    number = 1
    repeat = 3
    warmup_time = 0

    def setup_cache(self) -> str:
        """One metric trace for all timings, and the power trace that belongs to it."""
        import polars as pl

        from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

        folder = Path(tempfile.mkdtemp(prefix="bench_trace_"))
        random = np.random.default_rng(7)
        columns = {
            c.column: np.rint(random.exponential(10.0 ** (1 + i % 5), ROWS))
            for i, c in enumerate(dialect_counters(SimulatorDialect.GPUWATTCH))
        }
        columns |= {
            "PIPE_A": np.round(random.random(ROWS) * 0.8, 6),
            "IDLE_CORE_N": np.round(random.random(ROWS) * 8.0, 6),
            "CONST_DYNAMICN": np.zeros(ROWS),
        }
        pl.DataFrame(columns).write_csv(folder / "metric_trace.log", float_precision=6)
        _power_trace(folder, folder / "out")
        return str(folder)

    def setup(self, folder: str) -> None:
        import polars as pl

        self.folder = Path(folder)
        self.out = Path(tempfile.mkdtemp(prefix="bench_out_"))
        text = (self.folder / "out" / "power_trace.log").read_bytes().replace(b",\n", b"\n")
        self.power = pl.read_csv(text)

    def teardown(self, folder: str) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def time_power_trace(self, folder: str) -> None:
        """Our pass: read, mark kernels, compute, count, write power trace and report."""
        _power_trace(self.folder, self.out)

    def time_polars(self, folder: str) -> None:
        """polars reading the metric trace and writing the power trace, both whole."""
        self._polars()

    def time_polars_in_blocks(self, folder: str) -> None:
        """The same in blocks of 25,000 rows, as we do."""
        self._polars_in_blocks()

    def track_ratio(self, folder: str) -> float:
        """Our pass over polars on whole files, best of three each, taken in turns. At most 1.5."""
        return _ratio(lambda: _power_trace(self.folder, self.out), self._polars)

    def track_ratio_in_blocks(self, folder: str) -> float:
        """Our pass over polars in blocks. At most 1.5."""
        return _ratio(lambda: _power_trace(self.folder, self.out), self._polars_in_blocks)

    def peakmem_power_trace(self, folder: str) -> None:
        """Memory does not grow with the trace."""
        _power_trace(self.folder, self.out)

    def _polars(self) -> None:
        import polars as pl

        pl.read_csv(self.folder / "metric_trace.log")
        with (self.out / "polars.csv").open("wb") as stream:
            self.power.write_csv(stream, float_precision=6)

    def _polars_in_blocks(self) -> None:
        import polars as pl

        with (
            (self.folder / "metric_trace.log").open("rb") as source,
            (self.out / "polars.csv").open("wb") as stream,
        ):
            schema: dict[str, Any] = dict.fromkeys(
                source.readline().decode().strip().split(","), pl.Float64
            )
            rest, done = b"", 0
            while data := source.read(8 << 20):
                text = rest + data
                cut = text.rfind(b"\n") + 1
                rows = pl.read_csv(text[:cut], has_header=False, schema=schema).height
                rest = text[cut:]
                self.power[done : done + rows].write_csv(
                    stream, include_header=False, float_precision=6
                )
                done += rows


def _power_trace(folder: Path, out: Path) -> None:
    from wattcast.lab.gpuwattch.architecture import read_architecture
    from wattcast.lab.gpuwattch.component_build import build_component_model
    from wattcast.lab.gpuwattch.component_set import read_component_set
    from wattcast.lab.gpuwattch.energy_table import read_energies
    from wattcast.lab.gpuwattch.trace_reading import (
        SimulatorDialect,
        TraceSampling,
        open_metric_trace,
    )
    from wattcast.lab.gpuwattch.trace_run import TraceRun, run_trace

    components = read_component_set(SimulatorDialect.GPUWATTCH, compat=True)
    chip = Path(__file__).parents[1] / "examples" / "made_up_chip"
    architecture = read_architecture(chip / "architecture.xml")
    energies = read_energies(chip / "energies.yaml")
    model = build_component_model(architecture, energies, components).model
    trace = open_metric_trace(folder / "metric_trace.log", SimulatorDialect.GPUWATTCH)
    wanted = ("power_report", "power_trace")
    run_trace(TraceRun(trace, model, components, TraceSampling(500, 1e9), out, wanted=wanted))


def _ratio(ours: Callable[[], None], theirs: Callable[[], None]) -> float:
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(3)]
    return min(a for a, _ in pairs) / min(b for _, b in pairs)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
