"""Fit the host times of ``coefficients/engine_host.yaml`` on the fitting models of a database of
engines.

    python -m wattcast.lab.fit.engine_host_times

prints each value in microseconds, ratios as they are. What is argued or from single rows says so in
the file itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.measured_rows import Plain
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import (
    COMPILING_S,
    EngineRecords,
    load_engine_records,
)
from wattcast.predictor.engine_host import load_host_times
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import WorkloadPhase

FITTING = {  # layers
    "llama-3.1-8b": 32,
    "llama-3.1-8b-fp8": 32,
    "qwen2.5-1.5b": 28,
    "qwen3-30b-a3b": 48,
    "mixtral-8x7b-fp8": 32,
}
EXPERTS = ("qwen3-30b-a3b", "mixtral-8x7b-fp8")
DENSE = tuple(name for name in FITTING if name not in EXPERTS)
LARGEST_GRAPH = 512  # tokens
FEWEST_LAUNCHES = 20  # of a run, for their spread
RATIOS = ("expert_layers", "same_expert_layers", "launch_spread", "launch_memory")
WAITING_S = 0.001  # a host that waits longer for the GPU does wait
# a launch that takes this share of the GPU's time, and then waits, was held up by it
QUEUED_SHARE = 0.6


@dataclass
class _TrafficTimes:
    """What the steps of traffic runs tell of their host."""

    # batches above seconds, by what the host does
    lines: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    pieces: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loose: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    admit_s: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    memories: list[float] = field(default_factory=list)

    def add_run(
        self,
        model: str,
        rows: Sequence[Plain],
    ) -> None:
        """Add the steps of a run."""
        step = {}
        for name in rows[0]:
            if name != "run":
                step[name] = np.array([row[name] for row in rows], dtype=np.float64)
        pause_s = np.append(0.0, step["begin_s"][1:] - step["end_s"][:-1])
        output_s = step["host_s"] - step["schedule_s"] - step["launch_s"]
        alone = step["prompt_tokens"] == 0
        output_s = output_s + np.where(alone, pause_s, 0.0)
        self.lines["schedule"].append(np.stack([step["decodes"], step["schedule_s"]]))
        self.lines["output"].append(np.stack([step["decodes"], output_s]))
        launches = np.stack([step["decodes"], step["launch_s"]])
        self.lines["launch_graph"].append(launches[:, alone])
        admits = (step["prompts"] > 0) & (pause_s < 0.01)
        self.admit_s.append(pause_s[admits].sum() / step["prompts"][admits].sum())

        small = step["tokens"] <= LARGEST_GRAPH
        free = (step["wait_s"] < WAITING_S) & (step["launch_s"] < COMPILING_S)
        in_pieces = step["launch_s"][small & ~alone & free]
        without_graph = step["launch_s"][~small & free]
        self.pieces[model].extend(in_pieces)
        self.loose[model].append(float(without_graph.mean()))
        self._add_spread(in_pieces)
        self._add_spread(without_graph)

    def _add_spread(self, launch_s: Array) -> None:
        """Add how much launches vary, and how alike one is to the one before."""
        logs = np.log(launch_s)
        usual = logs <= np.percentile(logs, 99) if len(logs) else np.zeros(0, dtype=bool)
        if usual.sum() >= FEWEST_LAUNCHES:
            self.spreads.append(logs[usual].std())
            self.memories.append(np.corrcoef(logs[usual][1:], logs[usual][:-1])[0, 1])


def fit_host_times(
    records: EngineRecords,
    layers: Mapping[str, int] = FITTING,
    experts: Collection[str] = EXPERTS,
) -> dict[str, float]:
    """Fit the host times of ``engine_host.yaml``, in seconds, from models and loads that are not
    held out.

    Hosts differ, so steps count on hosts that ran traffic of these models too.
    ``launch_same_layer``, which no traffic tells, is the mean over all hosts, and so is
    ``launch_same_loose_layer``: under traffic hosts are slower.

    ``layers`` gives the layers of each fitting model, ``experts`` names those with fused experts.
    Times that grow with the batch are straight lines by least squares, the mean of two: over all
    traffic steps, and over decode steps repeated alike in which the host waits for less than 3 ms.
    What launching costs without a whole graph is a mean over steps, each model counting alike; a
    step counts where the host is not held up by a GPU that has more launches in its queue than it
    takes, nor compiles. ``expert_layers`` is a ratio. ``launch_spread`` and ``launch_memory`` are
    the standard deviation of the logarithm of such a launch and its correlation with the one
    before, the medians of all runs and both kinds of steps."""
    traffic = _TrafficTimes()
    hosts = set()
    for run in records.select_kind("traffic"):
        if run["model"] in layers and not run["held_out_load"]:
            hosts.add(run["card_uuid"])
            steps = [row for row in records.serving_steps if row["run"] == run["id"]]
            traffic.add_run(run["model"], steps)
    kinds = ("decode", "prefill", "mixed")
    rows = [row for row in records.select_kind(*kinds) if row["model"] in layers]
    times = _fit_lines(traffic, [row for row in rows if row["card_uuid"] in hosts])
    free_rows = [row for row in rows if row["kind"] != "decode" and not _is_held_up(row)]
    launches = _LaunchTimes(
        layers,
        times["launch_graph"],
        traffic,
        free_rows,
        hosts,
    )
    times.update(launches.average_layers(experts))
    times.update(_average_repeated_layers(records, times["launch_graph"], experts))
    times["admit"] = float(np.mean(traffic.admit_s))
    times["launch_spread"] = float(np.median(traffic.spreads))
    times["launch_memory"] = float(np.median(traffic.memories))
    return times


def _is_held_up(row: Plain) -> bool:
    """Whether a GPU with a full queue of launches held up the host in a step."""
    waits = row["wait_s"] > WAITING_S
    return bool(waits and row["launch_s"] > QUEUED_SHARE * row["device_s"])


class _LaunchTimes:
    """What launching steps costs without a whole graph, by model and by host."""

    def __init__(
        self,
        layers: Mapping[str, int],
        launch_graph_s: float,
        traffic: _TrafficTimes,
        free_rows: Sequence[Plain],
        traffic_hosts: Collection[str],
    ) -> None:
        self.layers = layers
        self.launch_graph_s = launch_graph_s
        self.pieces = traffic.pieces
        self.loose = traffic.loose
        self.same_layer_s: dict[str, list[float]] = {}  # by host
        for row in free_rows:
            model = row["model"]
            if row["tokens"] <= LARGEST_GRAPH:
                layer_s = self.per_layer_s(model, [row["launch_s"]])
                self.same_layer_s.setdefault(row["card_uuid"], []).append(layer_s)
            elif row["card_uuid"] in traffic_hosts:
                self.loose[model].append(row["launch_s"])

    def per_layer_s(
        self,
        model: str,
        launches_s: Sequence[float],
    ) -> float:
        """Return what launching a layer costs over launching the whole model as one graph."""
        return float((np.mean(launches_s) - self.launch_graph_s) / self.layers[model])

    def average_layers(self, experts: Collection[str]) -> dict[str, float]:
        """Return the mean over models of a layer in pieces, repeated alike, and without graphs; and
        how much more layers with experts take.
        """
        piece_s = []
        dense_s = []
        expert_s = []
        for model in self.layers:
            if self.pieces[model]:
                piece_s.append(self.per_layer_s(model, self.pieces[model]))
            loose_s = self.per_layer_s(model, self.loose[model])
            if model in experts:
                expert_s.append(loose_s)
            else:
                dense_s.append(loose_s)
        host_means_s = [np.mean(seconds) for seconds in self.same_layer_s.values()]
        mean_dense_s = float(np.mean(dense_s))
        ratios = [seconds / mean_dense_s - 1.0 for seconds in expert_s]
        return {
            "launch_layer": float(np.mean(piece_s)),
            "launch_same_layer": float(np.mean(host_means_s)),
            "launch_loose_layer": mean_dense_s,
            "expert_layers": float(np.mean(ratios)),
        }


def _average_repeated_layers(
    records: EngineRecords,
    launch_graph_s: float,
    experts: Collection[str],
) -> dict[str, float]:
    """Return the mean over hosts of a layer without graphs in repeated steps, and how much more
    layers with experts take.
    """
    dense_s = float(np.mean(list_loose_layers(records, launch_graph_s)))
    experts_s = float(np.mean(list_loose_layers(records, launch_graph_s, experts)))
    return {
        "launch_same_loose_layer": dense_s,
        "same_expert_layers": experts_s / dense_s - 1.0,
    }


def _fit_lines(traffic: _TrafficTimes, steps: Sequence[Plain]) -> dict[str, float]:
    """Return the times that grow with the batch: constant, and what a sequence adds."""
    alike = [row for row in steps if row["kind"] == "decode" and row["wait_s"] < 0.003]
    batch = np.array([row["batch"] for row in alike])
    schedule_s = np.array([row["schedule_s"] for row in alike])
    launch_s = np.array([row["launch_s"] for row in alike])
    host_s = np.array([row["host_s"] for row in alike])
    repeated = {
        "schedule": schedule_s,
        "output": host_s - schedule_s - launch_s,
        "launch_graph": launch_s,
    }
    times = {}
    for name, repeated_s in repeated.items():
        under_traffic = _fit_line(*np.concatenate(traffic.lines[name], axis=1))
        line = np.mean([under_traffic, _fit_line(batch, repeated_s)], axis=0)
        times[name], times[f"{name}_per_sequence"] = line.tolist()
    return times


def _fit_line(x: Array, y: Array) -> tuple[float, float]:
    """Return intercept and slope of a straight line by least squares; the slowest hundredth is left
    out.
    """
    usual = y <= np.percentile(y, 99)
    slope, intercept = np.polyfit(x[usual], y[usual], 1)
    return float(intercept), float(slope)


def list_loose_layers(
    records: EngineRecords,
    launch_graph_s: float,
    models: Collection[str] = DENSE,
) -> list[float]:
    """List what each host took to launch a layer of fitting models without graphs, in repeated
    steps that no full queue held up.
    """
    by_host: dict[str, list[float]] = {}
    for row in records.select_kind("prefill", "mixed"):
        if row["model"] not in models or row["tokens"] <= LARGEST_GRAPH:
            continue
        if not _is_held_up(row):
            layer_s = (row["launch_s"] - launch_graph_s) / FITTING[row["model"]]
            by_host.setdefault(row["card_uuid"], []).append(layer_s)
    return sorted(float(np.mean(launches)) for launches in by_host.values())


def list_host_ratios(records: EngineRecords) -> tuple[list[float], list[str]]:
    """List what hosts took for repeated steps of fitting models over what the law gives, with the
    host of each.

    Steps count that no full queue held up. Those that only decode are left out: one graph is soon
    launched."""
    ratios: list[float] = []
    hosts: list[str] = []
    for row in records.select_kind("prefill", "mixed"):
        ratio = None if row["held_out"] else _compare_host(row)
        if ratio is not None:
            ratios.append(ratio)
            hosts.append(row["card_uuid"])
    return ratios, hosts


def learn_host_factor(
    records: EngineRecords,
    card: str,
    model: str,
) -> float | None:
    """Return the times of the host of a card over those of the law, by the other models that ran
    there; None: none did.

    All their repeated steps count that no full queue held up, and models count alike."""
    logs: dict[str, list[float]] = {}
    for row in records.select_kind("decode", "prefill", "mixed"):
        if row["card_uuid"] != card or row["model"] == model:
            continue
        ratio = _compare_host(row)
        if ratio is not None:
            logs.setdefault(row["model"], []).append(float(np.log(ratio)))
    if not logs:
        return None
    model_means = [np.mean(model_logs) for model_logs in logs.values()]
    return float(np.exp(np.mean(model_means)))


def _compare_host(row: Plain) -> float | None:
    """Return what the host took for a repeated step over what the law gives; None where a full
    queue held it up or the engine compiled.
    """
    if row["tokens"] is None or _is_held_up(row) or row["launch_s"] > COMPILING_S:
        return None
    options = replace(
        read_engine_options(row),
        phase=WorkloadPhase.DECODE,
        batch=1,
        seq=16,
    )
    step = build_graph(load_measured_model(row["model"]), options).blocks[0].step
    assert step is not None  # graphs of engines have steps
    times = load_host_times()
    counts = times.count_launches(step.launches, by_openai=True)
    law_s = times.repeated_step_s(
        counts,
        int(row["tokens"] or 0),
        int(row["batch"] or 0),
        int(row["prompts"] or 0),
        admitted=0.0,
    )
    return float(row["host_s"]) / law_s


if __name__ == "__main__":
    shipped = load_engine_records("h200")
    host_times = fit_host_times(shipped)
    for name, value in host_times.items():
        print(f"{name:28} {value if name in RATIOS else 1e6 * value:.4g}")
    hosts_us = 1e6 * np.array(list_loose_layers(shipped, host_times["launch_graph"]))
    span = f"{hosts_us[0]:.0f} to {hosts_us[-1]:.0f}, mean {hosts_us.mean():.0f}"
    print(f"launch_loose_layer of {len(hosts_us)} hosts: {span}")
