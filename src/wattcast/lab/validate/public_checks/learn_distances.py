"""Learn how much wider intervals are away from what was measured; write
``predictor/bundle/distances.yaml``.

    python -m wattcast.lab.validate.public_checks.learn_distances            # print what is learned
    python -m wattcast.lab.validate.public_checks.learn_distances --write    # and write it into the
    package

It needs the public reference data (``WATTCAST_REFERENCE``, or ``../shared/reference``). Every
number is learned from rows that have the distance: whole GPUs left out for forecasts, the lower
clocks of an A100 and of a GTX Titan X, four cards under power limits, hosts of three machines,
layers of operators that were also measured one at a time. ``docs/method/confidence.md`` tells how,
and ``wattcast lab validate`` judges the result."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from scipy.optimize import nnls

import wattcast.predictor.bundle.support_widening as distances
from wattcast.core.arrays import Array
from wattcast.core.row_tables import read_table
from wattcast.hardware import load_gpu
from wattcast.lab.fit.database_fit import HELD_OUT_FILE
from wattcast.lab.fit.engine_host_times import list_host_ratios, list_loose_layers
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.lab.fit.held_out import weighted_quantile
from wattcast.lab.module_commands import require_reference, run_module
from wattcast.lab.validate.public_checks import coverage_checks as coverage
from wattcast.lab.validate.public_checks.published_checks import predict_epochs, read_epochs
from wattcast.lab.validate.public_checks.published_commands import ask_by_name
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_FILES,
    PUBLISHED_GPU,
    read_published_file,
    read_published_runs,
)
from wattcast.lab.validate.public_checks.wide_format_checks import ask_fp32_rows
from wattcast.lab.validate.public_checks.wide_format_intervals import (
    WideRows,
    learn_wide_spreads,
)
from wattcast.lab.validate.typed_commands import answer_commands
from wattcast.predictor.api import predict
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.engine_host import load_host_times
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_interval import (
    combine_log_ends,
    kernel_log_ends,
    widen_log_ends,
)
from wattcast.predictor.timeline import compute_latency_s
from wattcast.workload.model_options import SoftwareStack

MEASURED_CLOCKS = 0.58  # of the top clock: the lowest of any row of the H200's database
TITANX_FILE = Path("titanx") / "micro_time_power_by_clock.csv"
TITANX_UPPER = (
    0.75  # of its top clock: the plane reaches down to half of that, and rows far below are wanted
)
STEP = 0.05  # of a correlation
CAPPED = 0.97  # of the limit, above which it is what holds a kernel
FAR_OCTAVES = 0.5  # nearer rows say more about noise than about distance


def learn_together(
    sets: Iterable[coverage.ModelSet],
    quantity: str,
    capped: float = 1.0,
) -> tuple[float, int]:
    """Learn the correlation of kernels' errors at which most nearly 90 % of workloads lie inside.

    ``capped`` is the factor on ends under the power limit.
    """
    workloads = []
    for some in sets:
        for p, ratio in zip(some.predictions, some.log_ratio(quantity), strict=True):
            if quantity == "power" and p.capped:
                continue  # the governor holds it, whatever errs
            basis = p.basis
            ends = kernel_log_ends(basis.timeline, basis.bundle, basis.reasons) * (
                capped if p.capped else 1.0
            )
            cards = distances.NORMAL_P90 * getattr(basis.bundle.cards, quantity)
            share = basis.time_shares if quantity == "latency" else basis.energy_shares
            workloads.append(
                (ratio, share, ends[:, :2] if quantity == "latency" else ends[:, 2:], cards)
            )
    ratio = np.array([r for r, *_ in workloads])
    misses = {}
    for together in np.arange(0.0, 1.0 + STEP, STEP):
        ends = np.array(
            [widen_log_ends(combine_log_ends(s, e, float(together)), c) for _, s, e, c in workloads]
        )
        inside = np.mean((ends[:, 0] <= ratio) & (ratio <= ends[:, 1]))
        misses[round(float(together), 2)] = abs(float(inside) - coverage.LEVEL)
    return min(misses, key=misses.__getitem__), len(workloads)


def ask_host_factor(p: Prediction, latency_s: float) -> float | None:
    """Return the factor on the host's cost at which a row would be met; None where the host does
    not hold it up.
    """
    line = p.basis.timeline
    kernel_s = p.basis.detail.kernel_s

    def latency(factor: float) -> float:
        return float(compute_latency_s(line.scale_host(factor), kernel_s))

    low = 0.05
    high = 20.0
    if latency(0.5) > 0.9 * latency(1.0) or not latency(low) < latency_s < latency(high):
        return None
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if latency(middle) < latency_s else (low, middle)
    return high


def learn_host(sets: Iterable[coverage.ModelSet]) -> distances.HostSpread:
    """Learn how far the cost of an operator on one host differs from run to run."""
    factors: list[float] = []
    for some in sets:
        pairs = zip(some.predictions, some.measured["latency"], strict=True)
        factors_of_pairs = [
            ask_host_factor(p, s) for p, s in pairs if p.stack != SoftwareStack.ENGINE
        ]
        factors += [value for value in factors_of_pairs if value is not None]
    low, high = np.quantile(factors, (0.05, 0.95))
    source = (
        f"cost that {len(factors)} runs held up by the host ask for, over the default: "
        "5th and 95th percentile"
    )
    return distances.HostSpread(round(float(low), 2), round(float(high), 2), len(factors), source)


def load_named_runs(
    reference: Path,
    longest_s: float = np.inf,
) -> tuple[coverage.ModelSet, ...]:
    """Load all published eager runs that are not corrupt, each predicted by its model's name.

    Runs that were measured to take more than ``longest_s`` are left out.
    """
    runs = {
        PUBLISHED_GPU: [
            run
            for which in PUBLISHED_FILES
            for run in read_published_runs(reference, which)
            if not run.corrupt
        ],
        "a10": read_published_file(reference, "a10"),
    }
    sets = []
    for gpu, gpu_runs in runs.items():
        some = [run for run in gpu_runs if run.latency_s <= longest_s]
        options = [dict(ask_by_name(run, gpu, gpu).command.options) for run in some]
        predictions = tuple(
            predict(run.model, force=True, **conditions)
            for run, conditions in zip(some, options, strict=True)
        )
        measured = {
            "latency": np.array([run.latency_s for run in some], dtype=float),
            "power": np.array([run.power_w for run in some], dtype=float),
        }
        sets.append(coverage.ModelSet(f"{gpu}, by name", gpu, predictions, measured))
    return tuple(sets)


def widen_to_hosts(one_host: distances.HostSpread, gpu: str) -> distances.HostSpread:
    """Widen the spread of one host to that of hosts, which launched steps of engines."""
    records = load_engine_records(gpu)
    each_s = np.array(list_loose_layers(records, load_host_times().launch_graph_s))
    low, high = np.quantile(each_s / each_s.mean(), (0.05, 0.95))
    source = (
        one_host.source.partition(":")[0] + f"; fast hosts as among {len(each_s)} that ran engines"
    )
    return distances.HostSpread(
        round(min(one_host.low, float(low)), 2),
        round(max(one_host.high, float(high)), 2),
        one_host.rows,
        source,
    )


def learn_steps(gpu: str) -> dict[str, distances.LearnedPair]:
    """Learn half-widths of an engine's steps by their kind; a board that is told changes those of
    power alone.
    """
    unseen = coverage.load_step_set(gpu, held_out=True)
    told_set = coverage.load_told_set(gpu)
    half_widths = {
        kind: coverage.learn_step_spread(unseen, kind) for kind in coverage.list_step_kinds(unseen)
    }
    for kind in coverage.list_step_kinds(told_set):
        latency = half_widths[kind.partition(",")[0]].latency
        half_widths[kind] = msgspec.structs.replace(
            coverage.learn_step_spread(told_set, kind), latency=latency
        )
    return half_widths


def learn_capped(gpu: str) -> distances.LearnedPair:
    """Learn how far ends of bursts must be scaled to hold 90 % of kernels under the power limit.

    Each row was predicted by a fit that never saw its shape (``out_of_fold.parquet``).
    """
    bundle = bundle_for(load_gpu(gpu))
    limit_w = float(np.mean(load_gpu(gpu).power.limit_w))
    rows = read_table(Path(distances.__file__).with_name(gpu) / HELD_OUT_FILE)
    capped = [
        row for row in rows if row["kind"] == "sustained" and row["power_w"] > CAPPED * limit_w
    ]
    ratio = np.log([row["latency_s"] / row["predicted_latency_s"] for row in capped])
    ends = np.log([bundle.residuals[row["family"]].latency for row in capped])
    scale = bundle.widening.scale(np.array([(row["near"], row["near_power"]) for row in capped]).T)
    assert scale is not None
    needed = np.abs(ratio) / (np.where(ratio > 0.0, ends[:, 1], -ends[:, 0]) * scale[0])
    source = f"{len(capped)} kernels that drew over {CAPPED:g} of the limit, left out of the fit"
    return distances.LearnedPair(
        round(float(np.nanquantile(needed, coverage.LEVEL)), 2), 1.0, len(capped), source
    )


def learn_engine_host(gpu: str) -> distances.HostSpread:
    """Learn how far the host of an engine is from the one assumed, in steps of fitting models;
    hosts count alike.
    """
    ratios, hosts = list_host_ratios(load_engine_records(gpu))
    weight = np.array([1.0 / hosts.count(name) for name in hosts])
    low, high = (weighted_quantile(np.array(ratios), weight, level) for level in (0.05, 0.95))
    source = (
        f"host times of {len(ratios)} repeated steps with prompts over the law; "
        f"{len(set(hosts))} hosts"
    )
    return distances.HostSpread(round(low, 2), round(high, 2), len(ratios), source)


def learn_wide_formats(reference: Path) -> dict[str, distances.LatencySpread]:
    """Learn half-widths of models in fp32 and TF32, as ``predict`` answers for them."""
    rows = ask_fp32_rows(reference)
    predictions = answer_commands([row.command for row in rows])
    return learn_wide_spreads(WideRows.from_judged(rows, predictions))


def least_slope(
    distance: Array,
    off: Array,
    noise: float,
) -> float:
    """Return the least c for which 90 % of |off| are within sqrt(noise² + (c·distance)²), from half
    an octave on.
    """
    far = distance >= FAR_OCTAVES
    needed = np.sqrt(np.maximum(np.square(off[far]) - noise**2, 0.0)) / distance[far]
    return float(np.quantile(needed, coverage.LEVEL))


def clock_errors(sets: Iterable[coverage.ModelSet]) -> dict[str, tuple[Array, Array, float]]:
    """Return octaves below the measured clocks, change of the error from them, and its noise, by
    quantity.

    The error of a run at a low clock is compared with the mean error of the same model, batch and
    length at clocks that count as measured: what is left is what the clock did."""
    errors = {}
    for quantity in ("latency", "power"):
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for some in sets:
            for p, ratio in zip(some.predictions, some.log_ratio(quantity), strict=True):
                share = float(np.max(p.clock_hz)) / float(np.max(p.basis.gpu.clocks.max_hz))
                groups[p.name].append((share, float(ratio)))
        octaves = []
        off = []
        noise = []
        for rows in groups.values():
            measured_ratios = [ratio for share, ratio in rows if share >= MEASURED_CLOCKS]
            if len(measured_ratios) < 2:
                continue
            edge = min(share for share, _ in rows if share >= MEASURED_CLOCKS)
            noise += [ratio - float(np.mean(measured_ratios)) for ratio in measured_ratios]
            below = [(share, ratio) for share, ratio in rows if share < MEASURED_CLOCKS]
            octaves += [float(np.log2(edge / share)) for share, _ in below]
            off += [ratio - float(np.mean(measured_ratios)) for _, ratio in below]
        errors[quantity] = (
            np.array(octaves),
            np.array(off),
            float(np.quantile(np.abs(noise), coverage.LEVEL)),
        )
    return errors


def titanx_errors(path: Path) -> dict[str, tuple[Array, Array, float]]:
    """Return the same for microbenchmarks of a Titan X, by the laws of the predictor fitted to its
    higher clocks.

    t = a/f + b and P = p0 + p1·f + p3·f³ (idle, switching at a constant voltage, and at one that
    rises with f), each fitted at one memory clock to the upper part of the core clocks, by relative
    error, non-negative."""
    octaves: dict[str, list[Array]] = {"latency": [], "power": []}
    off: dict[str, list[Array]] = {"latency": [], "power": []}
    noise: dict[str, list[Array]] = {"latency": [], "power": []}
    for rows in _read_titanx_blocks(path):
        core, time_ms, watts = rows.T
        share = core / core.max()
        upper = share >= TITANX_UPPER
        if upper.sum() < 4 or upper.all():
            continue
        one = np.ones_like(share)
        laws = {
            "latency": (np.column_stack([1.0 / share, one]), time_ms),
            "power": (np.column_stack([one, share, share**3]), watts),
        }
        for quantity, (terms, measured) in laws.items():
            fitted, _ = nnls(terms[upper] / measured[upper, np.newaxis], one[upper])
            ratio = np.log(measured / (terms @ fitted))
            octaves[quantity].append(np.log2(share[upper].min() / share[~upper]))
            off[quantity].append(ratio[~upper])
            noise[quantity].append(ratio[upper])
    errors = {}
    for quantity in octaves:
        size = np.abs(np.concatenate(noise[quantity]))
        spread = float(np.quantile(size, coverage.LEVEL))
        errors[quantity] = np.concatenate(octaves[quantity]), np.concatenate(off[quantity]), spread
    return errors


def _read_titanx_blocks(path: Path) -> list[Array]:
    """Return core clock, milliseconds and watts of each program at each memory clock."""
    blocks: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = line.strip().split(",")
        if len(cells) < 5:
            name = cells[0] or name
            continue
        memory, core, time_ms, watts = cells[:4]
        blocks[name, memory].append((float(core), float(time_ms), float(watts)))
    return [np.array(rows) for rows in blocks.values()]


def learn_clock(reference: Path, sets: Iterable[coverage.ModelSet]) -> dict[str, Any]:
    """Learn what an octave below the measured clocks adds: the larger of A100 and Titan X."""
    sources = {"A100": clock_errors(sets), "Titan X": titanx_errors(reference / TITANX_FILE)}
    slopes = {
        q: {name: least_slope(*errors[q]) for name, errors in sources.items()}
        for q in ("latency", "power")
    }
    rows = sum(len(errors["latency"][0]) for errors in sources.values())
    description = ", ".join(
        f"{name} {slopes['latency'][name]:.2f} / {slopes['power'][name]:.2f}" for name in sources
    )
    return {
        "latency": round(max(slopes["latency"].values()), 3),
        "power": round(max(slopes["power"].values()), 3),
        "rows": rows,
        "source": "runs below the clocks that were fitted or compared, latency / power an "
        f"octave: {description}",
    }


def learn_limit(reference: Path) -> dict[str, Any]:
    """Learn what an octave below the highest limit adds, from training epochs of four cards."""
    epochs = predict_epochs(read_epochs(reference))
    octaves = np.array([np.log2(p.highest.limit_w / p.epoch.limit_w) for p in epochs])
    off = {
        "latency": np.log([p.relative_time / p.predicted_time for p in epochs]),
        "power": np.log([p.epoch.power_w / p.predicted_w for p in epochs]),
    }
    return {
        **{
            quantity: round(least_slope(octaves, values, 0.0), 3)
            for quantity, values in off.items()
        },
        "rows": len(epochs),
        "source": "Zeus, training epochs on V100, A40, RTX 6000 and P100 predicted from the "
        "highest limit",
    }


def main(say: Callable[[str], None] = print) -> None:
    """Learn, print, and write when asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write predictor/bundle/distances.yaml"
    )
    write = parser.parse_args().write
    reference = require_reference(os.environ)
    text = learn(reference)
    if write:  # ends of forecasts hold what the host adds, so learn once more with what was learned
        write_distances(text)
        text = learn(reference)
        write_distances(text)
    say(text)


def write_distances(text: str) -> None:
    """Write the file of the package and forget what was read from the old one."""
    Path(distances.__file__).with_name("distances.yaml").write_text(text, encoding="utf-8")
    for cached in (distances.learned_distances, coverage.load_published_models):
        cached.cache_clear()


def learn(reference: Path) -> str:
    """Learn all distances and return them as YAML."""
    distances_before = distances.learned_distances()
    captured, launched = coverage.load_model_sets("h200")
    kernels = coverage.load_table_sets(reference)
    models = coverage.load_published_models(reference)
    capped = learn_capped("h200")
    own_host = learn_host([*load_named_runs(reference), launched])
    conditions = {
        name: msgspec.to_builtins(condition)
        for name, condition in distances_before.conditions.items()
    }
    conditions["clock"] |= learn_clock(reference, [m for m in models if m.chip == "A100"])
    conditions["power limit"] |= learn_limit(reference)
    learned = msgspec.structs.replace(
        distances_before,
        together=_learn_both_together(captured, capped),
        steps=learn_steps("h200"),
        capped=capped,
        host=widen_to_hosts(own_host, "h200"),
        own_host=own_host,
        engine_host=learn_engine_host("h200"),
        conditions=msgspec.convert(conditions, dict[str, distances.ConditionWidening]),
        forecast=coverage.learn_forecast_ends(kernels, models),
        wide=learn_wide_formats(reference),
        engines=coverage.learn_engine_ends(kernels),
        forecast_source="kernel tables of A100, B200 and L40S, whole models of A100 and A10, "
        "against their forecasts",
    )
    path = Path(distances.__file__).with_name("distances.yaml")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    head = "".join(line for line in lines if line.startswith("#"))
    plain = {name: _without_nulls(value) for name, value in msgspec.to_builtins(learned).items()}
    return head + yaml.safe_dump(
        plain,
        sort_keys=False,
        allow_unicode=True,
        width=200,
        default_flow_style=None,
    )


def _learn_both_together(
    captured: coverage.ModelSet, capped: distances.LearnedPair
) -> distances.LearnedPair:
    """Learn how far errors of kernels go together in latency and in power."""
    layers = coverage.load_layer_set("h200")
    time, time_rows = learn_together([layers, captured], "latency", capped.latency)
    power, power_rows = learn_together([captured], "power")
    source = (
        f"latency of {time_rows} layers and whole models, power of {power_rows} whole "
        "models, on the H200"
    )
    return distances.LearnedPair(time, power, time_rows + power_rows, source)


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}


if __name__ == "__main__":
    run_module(main)
