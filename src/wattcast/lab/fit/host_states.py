"""Compare what hosts take to launch a layer: in their quiet moments, in the middle, in slow ones.

    python -m wattcast.lab.fit.host_states

prints microseconds a layer for each model and card of the traffic runs of a database, above the
launch of a whole graph. On one card, quiet launches of dense models differ little by model, while
the middle of one engine moves by a factor of two from one run to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.measured_rows import Plain
from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.lab.fit.engine_host_times import LARGEST_GRAPH, WAITING_S
from wattcast.lab.fit.engine_records import COMPILING_S, EngineRecords, load_engine_records

LEVELS = (10.0, 50.0, 90.0)  # percentiles: quiet, the middle, slow


@dataclass(frozen=True)
class LayerLaunches:
    """Seconds a layer above the launch of a graph, at ``LEVELS`` of the steps of some runs."""

    pieces_s: Array  # steps with prompts that replay a graph a layer
    loose_s: Array  # steps without graphs


def measure_layer_launches(
    runs: Iterable[Plain],
    records: EngineRecords,
) -> LayerLaunches:
    """Return what launching a layer took in traffic runs of one model.

    Steps count in which the host neither waits for the GPU nor compiles.
    """
    identities = {run["id"]: run["model"] for run in runs}
    steps = [row for row in records.serving_steps if row["run"] in identities]
    layers = load_measured_model(next(iter(identities.values()))).dims.layers
    graph_s = _rank_launches([row for row in steps if not row["prompts"]])
    prompts = [row for row in steps if row["prompts"] and row["wait_s"] < WAITING_S]
    pieces_s = _rank_launches([row for row in prompts if row["tokens"] <= LARGEST_GRAPH])
    loose_s = _rank_launches([row for row in prompts if row["tokens"] > LARGEST_GRAPH])
    return LayerLaunches((pieces_s - graph_s) / layers, (loose_s - graph_s) / layers)


def _rank_launches(steps: Sequence[Plain]) -> Array:
    launches_s = [row["launch_s"] for row in steps if row["launch_s"] < COMPILING_S]
    return np.asarray(np.percentile(launches_s, LEVELS))


def group_traffic_runs(records: EngineRecords) -> dict[tuple[str, str], list[Plain]]:
    """Group the traffic runs of a database by card and model."""
    runs: dict[tuple[str, str], list[Plain]] = defaultdict(list)
    for row in records.select_kind("traffic"):
        runs[row["card_uuid"], row["model"]].append(row)
    return runs


if __name__ == "__main__":
    shipped = load_engine_records("h200")
    print(f"{'card':14}{'model':28}{'graph a layer (us)':>22}{'without graphs (us)':>22}")
    for (card, model), runs in sorted(group_traffic_runs(shipped).items()):
        launches = measure_layer_launches(runs, shipped)
        pieces = " ".join(f"{1e6 * seconds:6.0f}" for seconds in launches.pieces_s)
        loose = " ".join(f"{1e6 * seconds:6.0f}" for seconds in launches.loose_s)
        print(f"{card[:12]:14}{model:28}{pieces:>22}{loose:>22}")
