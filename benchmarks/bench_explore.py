"""Explorations as ratios: against a loop over single predictions, against the bare core, and by
workers.

Run with ``asv run --python=same``. Ratios travel between machines; seconds do not. By hand,
``python benchmarks/bench_explore.py`` times a million designs in one process and in two.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from wattcast.explore import explorations, sweep
from wattcast.explore import sweep as cluster
from wattcast.explore.study import configure_points, tabulate_points
from wattcast.predictor.prediction import predict_graph

AXES = ("clock=600MHz:1980MHz:15MHz", "sm_count=64:192:4", "memory.bandwidth=2TB/s:8TB/s:100GB/s")


def million():
    """A million designs of a whole prefill, with the governor: as many as a Sobol sample is asked
    for.
    """
    axes = ["clock=600MHz:1980MHz", "sm_count=64:192", "memory.bandwidth=2TB/s:8TB/s"]
    return explorations.build_study(
        "llama3-8b", "h200", axes, sample="random:1000000", batch=8, seq=1024
    )


def timed(workers: int) -> tuple[float, float]:
    """Seconds by the clock and of processor time, workers' included, of a million designs to
    Parquet.
    """
    before_s, start_s = _processor_s(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sweep.run_sweep(
            million(), Path(folder) / "points.parquet", runner=sweep.process_runner(workers)
        )
    return time.perf_counter() - start_s, _processor_s() - before_s


def _processor_s() -> float:
    """Processor time of this process and of those it has waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Explore:
    """One model over many designs."""

    timeout = 600

    def setup(self) -> None:
        self.study = explorations.build_study("llama3-8b", "h200", list(AXES), batch=8, seq=1024)

    def time_million_points_to_parquet(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            sweep.run_sweep(million(), Path(folder) / "points.parquet")

    time_million_points_to_parquet.number = 1
    time_million_points_to_parquet.repeat = (1, 3, 120.0)

    def peakmem_million_points_to_parquet(self) -> None:
        self.time_million_points_to_parquet()

    def track_loop_over_sweep(self) -> float:
        """How many times faster a point of a sweep is than a single prediction in a Python loop."""
        points = 20
        start = time.process_time()
        for number in range(points):
            one = {
                name: values[0]
                for name, values in self.study.space.points(number, number + 1).items()
            }
            predict_graph(self.study.graph, *configure_points(self.study, one))
        middle = time.process_time()
        tabulate_points(self.study, 0, 50_000)
        return (middle - start) / points / ((time.process_time() - middle) / 50_000)

    def track_run_over_table(self) -> float:
        """What parts, the front, encoding and files cost on top of the evaluation itself."""
        start = time.process_time()
        tabulate_points(self.study, 0, self.study.space.size)
        middle = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            sweep.run_sweep(self.study, Path(folder) / "points.parquet")
        return (time.process_time() - middle) / (middle - start)

    def track_two_processes_over_one(self) -> float:
        """How many times faster two processes are than one, on a machine with two free cores."""
        return self._wall(sweep.process_runner(1)) / self._wall(sweep.process_runner(2))

    def track_processor_time_of_two_processes_over_one(self) -> float:
        """What starting and feeding a second process costs: 1 is nothing."""
        return timed(2)[1] / timed(1)[1]

    def track_two_dask_workers_over_one(self) -> float:
        """How many times faster two Dask workers are than one, on a machine with two free cores."""
        return self._wall(cluster.cluster_runner("local", 1)) / self._wall(
            cluster.cluster_runner("local", 2)
        )

    def _wall(self, runner: sweep.Runner) -> float:
        start = time.perf_counter()
        sweep.run_sweep(million(), runner=runner, part_points=50_000)
        return time.perf_counter() - start

    def track_peak_memory_mb(self) -> float:
        """Most memory this process held, in MB."""
        self.time_million_points_to_parquet()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":  # workers that are spawned import this file again
    for count in (1, 2) * 4:
        wall_s, processor_s = timed(count)
        print(
            f"{count} worker{'s' * (count > 1)}: {wall_s:5.2f} s by the clock, {processor_s:5.2f} s of processors"
        )
