"""Compare power over time as `simulate` and `train` predict it with what an H200 drew.

Run: ``PYTHONPATH=src python studies/power_traces/judge_power_traces.py``. The runs of
``h200_runs.jsonl`` were measured with vLLM 0.25.1 by ``wattcast measure engine`` (parts ``users`` and
``talk``) and by ``measure_training_trace.py``; no model among them was fitted, and nothing was
changed in view of them before they were judged once.

What is told: the boards, the models, the engine's cache, and what a log of requests says of those who
asked: when requests of an open load came and their lengths, or the user, turn, lengths and pause before
each request of a closed loop. Of a training job: its settings, and after which steps it wrote
checkpoints for how long. What is predicted: latencies, tokens, watts, and the series.

The energy counter of a card steps every 100 ms. Both series are brought to 250 ms and to a second
by their sums.

Rules for the shapes ``tide``, ``rounds``, ``pauses`` and ``crowd`` (glm-4-9b, granite-3.3-8b-fp8-kv8,
ernie-4.5-21b-a3b, gemma-3-4b) and for training jobs beside them, written before any was measured:

- ``BOUNDS`` are the bounds; beyond saturation (``crowd``) a token may be ``SATURATED_TPOT`` off.
- R2 of the autocorrelation is asked of a run whose measured autocorrelation spreads by at least
  sqrt(10 / n) over the lags, n the samples of 250 ms. That of noise spreads by 1 / sqrt(n)
  (Bartlett): below the bound it alone would take more than a tenth of R2. Others are called flat.
- Every run is judged once and listed, whatever comes out.

``--tell`` is another question, and was asked after all of it had been judged: two numbers about a
machine, how fast its host is and how many watts its card draws in a step (``host_factor``,
``power_factor`` of ``simulate``), are told from one run of one model, and the other models that ran on
the same card are judged with them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import wattcast
from wattcast.core.arrays import Array
from wattcast.core.row_journals import read_lines
from wattcast.lab.fit.engine_fit import load_measured_model
from wattcast.serving.serving_result import ServingResult
from wattcast.timeseries.engine_power import PowerSplit, split_engine_power, trace_serving
from wattcast.timeseries.job_power import trace_training
from wattcast.timeseries.power_curve import PowerCurve

RUNS = Path(__file__).with_name("h200_runs.jsonl")
SHORT_S = 0.25
LONG_S = 1.0
LONGEST_LAG_S = 60.0
SEED = 12
ARRIVALS = ("arrival_s", "prompt_tokens", "output_tokens")
TABLE_FIGURES = (
    "tokens/s",
    "J/token",
    "ttft p50 (s)",
    "ttft p99 (s)",
    "tpot p50 (s)",
    "tpot p99 (s)",
    "step (s)",
    "mean power (W)",
    "p95 at 250 ms (W)",
    "peak at 1 s (W)",
)


BOUNDS = {
    "tokens/s": 0.02,
    "J/token": 0.03,
    "ttft p50 (s)": 0.10,
    "ttft p99 (s)": 0.20,
    "tpot p50 (s)": 0.05,
    "tpot p99 (s)": 0.10,
    "step (s)": 0.03,
    "mean power (W)": 0.03,
    "p95 at 250 ms (W)": 0.05,
    "peak at 1 s (W)": 0.05,
}
SATURATED_TPOT = 0.12
LEAST_R2 = 0.9


HOST_FACTORS = (0.3, 3.0)
BISECTIONS = 6
POWER_ROUNDS = 4


class Memory(NamedTuple):
    """How the autocorrelation of a run is explained, and whether it is more than that of noise."""

    explained: float
    spread: float  # of the measured autocorrelation over the lags
    noise: float  # that spread for independent samples

    @property
    def is_asked(self) -> bool:
        """Whether noise takes at most a tenth of the variance that is to be explained."""
        return self.spread >= 10**0.5 * self.noise


class Figure(NamedTuple):
    """One figure of a run, measured and predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less one."""
        return self.predicted / self.measured - 1.0


class MeanPower(NamedTuple):
    """Joules up to each moment of a run."""

    moments_s: Array
    joules: Array

    def sample(self, interval_s: float, length_s: float) -> Array:
        """Return mean watts of the intervals that fit into so many seconds."""
        edges_s = np.arange(0.0, length_s + 1e-9, interval_s)
        joules = np.interp(edges_s, self.moments_s, self.joules)
        return np.diff(joules) / interval_s


def read_ticks(power: dict[str, list[float]]) -> MeanPower:
    """Return the energy counter of a measured run: each tick has the mean watts since the last."""
    tick_s = np.array(power["tick_s"])
    spans_s = np.diff(tick_s)
    joules = np.concatenate([[0.0], np.cumsum(np.array(power["tick_w"])[1:] * spans_s)])
    return MeanPower(tick_s, joules)


def read_curves(curves: list[PowerCurve]) -> MeanPower:
    """Return predicted curves at the moments at which any of them bends."""
    length_s = max(curve.length_s for curve in curves)
    moments_s = np.arange(0.0, length_s, 0.01)
    joules = sum(curve.energy_until(moments_s).sum(axis=-1) for curve in curves)
    return MeanPower(moments_s, np.asarray(joules))


def list_autocorrelations(watts: Array, lags: Array) -> Array:
    """Return how alike a series is to itself some intervals later, by lag."""
    centred = watts - watts.mean()
    products = [float((centred[:-lag] * centred[lag:]).mean()) for lag in lags]
    return np.array(products) / float((centred * centred).mean())


def compare_series(
    measured: MeanPower, predicted: MeanPower, measured_s: float, predicted_s: float
) -> Iterator[Figure]:
    """Yield the figures of both series: mean, high quantiles, peak, and how memory fades."""
    short = (measured.sample(SHORT_S, measured_s), predicted.sample(SHORT_S, predicted_s))
    long = (measured.sample(LONG_S, measured_s), predicted.sample(LONG_S, predicted_s))
    yield Figure("mean power (W)", float(short[0].mean()), float(short[1].mean()))
    for percent in (95.0, 99.9):
        ends = (float(np.percentile(series, percent)) for series in short)
        yield Figure(f"p{percent:g} at 250 ms (W)", *ends)
    yield Figure("peak at 1 s (W)", float(long[0].max()), float(long[1].max()))
    steps = (float(np.abs(np.diff(series)).max()) for series in long)
    yield Figure("steepest ramp (W/s)", *steps)


def explain_autocorrelation(
    measured: MeanPower, predicted: MeanPower, measured_s: float, predicted_s: float
) -> Memory:
    """Return R2 of the predicted autocorrelation over lags of 0.25 s to 60 s or half of the run."""
    series = (measured.sample(SHORT_S, measured_s), predicted.sample(SHORT_S, predicted_s))
    longest = min(LONGEST_LAG_S / SHORT_S, min(len(watts) for watts in series) / 2)
    lags = np.arange(1, int(longest))
    true, forecast = (list_autocorrelations(watts, lags) for watts in series)
    explained = 1.0 - float(((true - forecast) ** 2).sum() / ((true - true.mean()) ** 2).sum())
    return Memory(explained, float(true.std()), len(series[0]) ** -0.5)


def name_gpu(run: dict[str, Any]) -> str:
    """Return the name of the card of a run, with its board."""
    board = run["card"]["board"].rpartition("-")[2]
    return f"h200-{board}"


class Machine(NamedTuple):
    """How long a host takes for a step and how many watts a card draws in it, over the usual."""

    host_factor: float = 1.0
    power_factor: float = 1.0


USUAL_MACHINE = Machine()


def simulate_run(run: dict[str, Any], machine: Machine) -> tuple[ServingResult, PowerSplit]:
    """Simulate the users of a run, and say how its power splits."""
    spec = load_measured_model(run["model"])
    with tempfile.TemporaryDirectory() as folder:
        options = _tell_load(run, Path(folder)) | machine._asdict()
        served = wattcast.simulate(spec, name_gpu(run), **options)
        return served, split_engine_power(served, spec, name_gpu(run), options)


def find_machine(run: dict[str, Any]) -> Machine:
    """Return the factors with which a run has the measured time to first token and mean power."""
    measured = run["measured"]
    low, high = HOST_FACTORS
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        served, _ = simulate_run(run, Machine(middle))
        is_slow = served.summarise()["ttft_s"]["p50"] > measured["ttft_s"]["p50"]
        low, high = (low, middle) if is_slow else (middle, high)
    machine = Machine((low * high) ** 0.5)
    for _ in range(POWER_ROUNDS):
        served, _ = simulate_run(run, machine)
        factor = machine.power_factor * measured["power_w"] / served.summarise()["power_w"]
        machine = machine._replace(power_factor=factor)
    return machine


def judge_serving(
    run: dict[str, Any], machine: Machine = USUAL_MACHINE
) -> tuple[list[Figure], Memory]:
    """Simulate the users of a run on a machine."""
    served, split = simulate_run(run, machine)
    measured = run["measured"]
    said = served.summarise()
    figures = [
        Figure("requests/s", measured["requests"] / measured["length_s"], said["requests_per_s"]),
        Figure("tokens/s", measured["output_tokens_per_s"], said["output_tokens_per_s"]),
        Figure("J/token", measured["energy_j_per_token"], said["energy_j_per_token"]),
    ]
    for latency in ("ttft_s", "tpot_s"):
        for quantile in ("p50", "p99"):
            pair = (measured[latency][quantile], said[latency][quantile])
            figures.append(Figure(f"{latency.removesuffix('_s')} {quantile} (s)", *pair))
    series = (read_ticks(run["power"]), read_curves(trace_serving(served, split)))
    lengths_s = (measured["length_s"], served.length_s)
    figures += compare_series(*series, *lengths_s)
    return figures, explain_autocorrelation(*series, *lengths_s)


def _tell_load(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a simulation is told: the engine, and users or the arrivals of requests."""
    engine = run["engine"]
    load = run["load"]
    requests = {name: np.array(values) for name, values in run["requests"].items()}
    options: dict[str, Any] = {
        "cache_tokens": engine["cache_tokens"],
        "max_model_len": engine["max_model_len"],
        "max_seqs": engine["max_seqs"],
        "max_batched_tokens": engine["max_batched_tokens"],
        "prefix_caching": engine["prefix_caching"],
        "seed": SEED,
    }
    if engine["quantization"] != "none":
        options["quantization"] = engine["quantization"]
    if engine["kv_dtype"] != "auto":
        options["kv_dtype"] = engine["kv_dtype"]
    columns = ARRIVALS
    if load["users"]:
        requests.setdefault("pause_s", _find_pauses(requests))
        columns = (*ARRIVALS, "user", "turn", "pause_s")
    return options | {"trace": _write_trace(folder, requests, columns)}


def _find_pauses(requests: dict[str, Array]) -> Array:
    """Return how long after the answer before each user sent a request."""
    order = np.lexsort((requests["arrival_s"], requests["user"]))
    answered_s = np.concatenate([[0.0], requests["last_token_s"][order][:-1]])
    pause_s = np.maximum(requests["arrival_s"][order] - answered_s, 0.0)
    pause_s[np.diff(requests["user"][order], prepend=-1) != 0] = 0.0
    pauses = np.empty(len(order))
    pauses[order] = pause_s
    return pauses


def _write_trace(folder: Path, requests: dict[str, Array], columns: tuple[str, ...]) -> str:
    """Write what was asked, when and by whom: nothing of how it was answered."""
    rows = zip(*(requests[name].tolist() for name in columns), strict=True)
    path = folder / "requests.csv"
    lines = [",".join(columns), *(",".join(str(value) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def judge_training(run: dict[str, Any]) -> tuple[list[Figure], Memory]:
    """Predict the job of a run; its log tells after which steps it wrote checkpoints for how long.

    The run ends with its last step: a checkpoint after it is not compared.
    """
    job = run["job"]
    steps = len(run["steps_s"])
    global_batch = job["batch"] * job["accumulation"]
    with tempfile.TemporaryDirectory() as folder:
        predicted = wattcast.train(
            run["model"],
            name_gpu(run),
            gpus=1,
            seq=job["seq"],
            global_batch=global_batch,
            micro_batch=job["batch"],
            tokens=float(steps * global_batch * job["seq"]),
            stack=job["stack"],
            master_weights=False,
            gradient_byte=2,
            sharding="none",
            recompute="none",
            loss_share=0.0,
            host_share=0.0,
            checkpoint_log=_write_checkpoints(Path(folder), run, steps),
        )
    step_s = float(np.median(np.diff(run["steps_s"], axis=-1)))
    length_s = run["steps_s"][-1][1]
    series = (read_ticks(run["power"]), read_curves([trace_training(predicted)]))
    lengths_s = (length_s, 3600.0 * predicted.hours)
    figures = [
        Figure("step (s)", step_s, predicted.step_s),
        Figure("run (s)", *lengths_s),
        *compare_series(*series, *lengths_s),
    ]
    return figures, explain_autocorrelation(*series, *lengths_s)


def _write_checkpoints(folder: Path, run: dict[str, Any], steps: int) -> str | None:
    """Write after which steps a job wrote checkpoints before its last one, and for how long."""
    lines = ["step,seconds"]
    for number, (begin_s, end_s) in enumerate(run["checkpoints_s"], start=1):
        step = number * run["job"]["checkpoint_every"]
        if step < steps:
            lines.append(f"{step},{end_s - begin_s}")
    if len(lines) == 1:
        return None
    path = folder / "checkpoints.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def judge_run(
    run: dict[str, Any],
    machine: Machine = USUAL_MACHINE,
) -> tuple[list[Figure], Memory]:
    """Return the figures of a run, and R2 of its autocorrelation."""
    if run["kind"] == "training":
        return judge_training(run)
    return judge_serving(run, machine)


def list_told_rows() -> Iterator[str]:
    """Yield what one run tells of each machine, and the rows of other models on it."""
    runs = [run for run in read_runs() if run["kind"] == "serving"]
    for card in dict.fromkeys(run["card"]["uuid"] for run in runs):
        on_card = [run for run in runs if run["card"]["uuid"] == card]
        open_loads = [run for run in on_card if not run["load"]["users"]]
        others = [run for run in on_card if run["model"] != on_card[0]["model"]]
        if not open_loads or not others or open_loads[0]["model"] != on_card[0]["model"]:
            continue
        machine = find_machine(open_loads[0])
        host, power = (f"{factor:.2f}" for factor in machine)
        yield f"{open_loads[0]['id']} tells: host {host}, power {power} of the usual"
        for run in others:
            yield format_row(run, machine)


def read_runs() -> list[dict[str, Any]]:
    """Return the measured runs."""
    return [dict(line) for line in read_lines(RUNS)]


def print_figures(run: dict[str, Any]) -> None:
    """Print every figure of a run, measured and predicted."""
    figures, memory = judge_run(run)
    print(f"\n{run['id']} on board {run['card']['board']}")
    for figure in figures:
        values = f"{figure.measured:10.4g} {figure.predicted:10.4g}"
        print(f"  {figure.name:22} {values} {figure.error:+8.1%}")
    asked = "" if memory.is_asked else "  (flat)"
    print(f"  {'R2 of autocorrelation':22} {memory.explained:21.3f}{asked}")


def format_row(run: dict[str, Any], machine: Machine = USUAL_MACHINE) -> str:
    """Return the errors of a run as a row of the table in the documentation."""
    figures, memory = judge_run(run, machine)
    errors = {figure.name: f"{figure.error:+.1%}" for figure in figures}
    cells = [errors.get(name, "") for name in TABLE_FIGURES]
    board = run["card"]["board"].rpartition("-")[2]
    explained = f"{memory.explained:.2f}" if memory.is_asked else "flat"
    return " | ".join(["", f"{run['id']} ({board})", *cells, explained, ""]).strip()


def list_misses(run: dict[str, Any]) -> Iterator[str]:
    """Yield what lies outside the bounds."""
    figures, memory = judge_run(run)
    for figure in figures:
        bound = BOUNDS.get(figure.name, float("inf"))
        if "load-crowd" in run["id"] and figure.name.startswith("tpot"):
            bound = SATURATED_TPOT
        if abs(figure.error) > bound:
            yield f"{figure.name} {figure.error:+.1%} (bound {bound:.0%})"
    if memory.is_asked and memory.explained < LEAST_R2:
        yield f"R2 {memory.explained:.2f} (bound {LEAST_R2})"


def count_held(run: dict[str, Any]) -> dict[str, bool]:
    """Say which measured figures of a run lie in the intervals that `simulate` prints."""
    served, _ = simulate_run(run, USUAL_MACHINE)
    simulated = served.summarise()
    measured = run["measured"]
    ratios = {
        ("power_w", "mean power (W)"): measured["power_w"] / simulated["power_w"],
        ("energy_j", "J/token"): measured["energy_j_per_token"] / simulated["energy_j_per_token"],
    }
    for latency in ("ttft_s", "tpot_s"):
        for quantile in ("p50", "p99"):
            name = f"{latency.removesuffix('_s')} {quantile} (s)"
            ratios[latency, name] = measured[latency][quantile] / simulated[latency][quantile]
    held = {}
    for (factor, name), ratio in ratios.items():
        low, high = simulated["interval"]["predictor"][factor]
        held[name] = low <= ratio <= high
    return held


def print_intervals() -> None:
    """Print which figures lie outside their interval, and how many of all are inside."""
    counts: dict[str, list[bool]] = {}
    for run in read_runs():
        if run["kind"] != "serving":
            continue
        held = count_held(run)
        for name, inside in held.items():
            counts.setdefault(name, []).append(inside)
        misses = [name for name, inside in held.items() if not inside]
        print(f"{run['id']}: {', '.join(misses) or 'all inside'}")
    for name, inside in counts.items():
        print(f"{name:14} {sum(inside)} of {len(inside)} inside")


def main() -> None:
    """Print every figure of every run, or the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="the table of the documentation")
    parser.add_argument("--tell", action="store_true", help="tell machines by one run of each")
    parser.add_argument("--misses", action="store_true", help="what is outside its bounds")
    parser.add_argument("--intervals", action="store_true", help="figures in their intervals")
    options = parser.parse_args()
    if options.intervals:
        print_intervals()
        return
    if options.misses:
        for run in read_runs():
            print(f"{run['id']}: {'; '.join(list_misses(run)) or 'all within'}")
        return
    if options.tell:
        print("\n".join(list_told_rows()))
        return
    if not options.table:
        for run in read_runs():
            print_figures(run)
        return
    names = [name.partition(" (")[0] for name in TABLE_FIGURES]
    print("| " + " | ".join(["run (board)", *names, "R2"]) + " |")
    print("|---" * (len(names) + 2) + "|")
    for run in read_runs():
        print(format_row(run))


if __name__ == "__main__":
    main()
