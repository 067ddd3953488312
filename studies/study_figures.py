"""Work out the figures of README and docs that rest on studies, and keep them for the pages.

    python -m studies.study_figures              # all of them, minutes
    python -m studies.study_figures study.tune-sixth study.kernel-bytes
    wattcast lab validate --fill-docs            # writes what was kept into the pages

Each figure has a name of ``docs/figures.yaml`` and a function here, which works it out from
measurements in the repository, or of others where ``WATTCAST_REFERENCE`` names their folder. The
texts are kept in ``docs/study-figures.json``; tests work the quick ones out again.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import wattcast
from wattcast.calibrate.kernel_rows import (
    KernelRows,
    load_kernel_rows,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.core.arrays import Mask, sweep_values
from wattcast.core.errors import MissingTool, check_names
from wattcast.core.strict_files import decode_yaml, reference_folder
from wattcast.core.whole_files import write_whole
from wattcast.hardware import load_gpu

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("", "studies/kernel_phases", "studies/training_rows", "studies/tune_pairs"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.append(str(ROOT / _folder))
KEPT = ROOT / "docs" / "study-figures.json"
LEDGER = ROOT / "docs" / "ledger.json"
STILL_CLIMBING = 0.92  # of the limit: a slower row that draws less had not settled


# The ledger, in words that a row alone does not have


@cache
def _read_ledger() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(LEDGER.read_bytes())["rows"]
    return rows


def _find_row(where: str, quantity: str) -> dict[str, Any]:
    return next(row for row in _read_ledger() if (row["set"], row["quantity"]) == (where, quantity))


def _show_trace_error(quantity: str) -> str:
    """Return the worst difference of a power trace from the simulator's own."""
    return f"{_find_row('simulator power traces', quantity)['worst_w']:.2g} W"


def show_mcpat_ratios() -> str:
    """Return the range of energies over McPAT's, by kind of component."""
    rows = [row for row in _read_ledger() if row["set"] == "dumped energies" and row.get("ratio")]
    ratios = [row["ratio"] for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def show_mcpat_chip() -> str:
    """Return leakage and area of a whole chip over McPAT's."""
    where = "GTX480 leakage and area"
    leakage = _find_row(where, "whole chip: leakage")["ratio"]
    area = _find_row(where, "whole chip: area")["ratio"]
    return f"{leakage:.2f} and {area:.2f} times"


def show_fitted_factor() -> str:
    """Return the largest factor between bottom-up and fitted energies of an H200."""
    ratios = [row["ratio"] for row in _read_ledger() if row["set"] == "h200 fitted"]
    return f"{max(max(ratio, 1.0 / ratio) for ratio in ratios):.1f}"


def show_gv100() -> str:
    """Return the errors of refitted component energies on a GV100's 25 kernels."""
    where = "V100 components of AccelWattch"
    kernel = _find_row(where, "power, leave one kernel out")
    application = _find_row(where, "power, leave one application out")
    return (
        f"{kernel['before']:.1f} % to {kernel['mape']:.1f} % leave-one-out "
        f"({kernel['in_sample']:.1f} % in sample, {application['mape']:.1f} % "
        f"leave-application-out, {kernel['floor']:.1f} % for a constant)"
    )


# Files that ship


def show_fitted_power(name: str, digits: int) -> str:
    """Return a constant power of an H200 that was fitted, with its interval."""
    path = ROOT / "src/wattcast/lab/gpuwattch/measured_h200.yaml"
    values = decode_yaml(path.read_bytes(), dict[str, Any], path.name)["values"]
    one = values[name]
    return f"{one['value']:.{digits}f} W ({one['low']:.0f} to {one['high']:.0f})"


def _read_bundle() -> dict[str, Any]:
    path = ROOT / "src/wattcast/predictor/bundle/h200/bundle.json"
    bundle: dict[str, Any] = json.loads(path.read_bytes())
    return bundle


def show_host_launch() -> str:
    """Return the host's cost of an operator on an H200."""
    seconds = float(_read_bundle()["launch"]["host_per_operator"].removesuffix(" s"))
    return f"{1e6 * seconds:.1f} µs"


def show_host_weight(kind: str) -> str:
    """Return how much of an operator's host time one of a kind takes."""
    return f"{_read_bundle()['launch']['host_weights'][kind]:g} times"


def show_clocks(family: str) -> str:
    """Return the clocks of an H200's fitted rows of a family."""
    low_hz, high_hz = _read_bundle()["seen"][family]["clock_hz"]
    return f"{1e-9 * low_hz:.2f} to {1e-9 * high_hz:.2f} GHz"


def show_collective_spread() -> str:
    """Return the ends of a collective's time over its law."""
    low, high = _read_bundle()["residuals"]["collective"]["latency"]
    return f"{low:g} to {high:g} times"


def _read_distances() -> dict[str, Any]:
    path = ROOT / "src/wattcast/predictor/bundle/distances.yaml"
    return decode_yaml(path.read_bytes(), dict[str, Any], path.name)


def show_spread(name: str, word: str) -> str:
    """Return the ends of a host's time over the one that is assumed."""
    ends = _read_distances()[name]
    return f"{ends['low']:g} {word} {ends['high']:g} times"


def show_capped_latency() -> str:
    """Return how much an error of latency counts under a limit."""
    return f"{_read_distances()['capped']['latency']:g} times"


def show_cold_operator() -> str:
    """Return what an operator takes longer in a model than alone."""
    seconds = float(_read_bundle()["cold"]["operator"].removesuffix(" s"))
    return f"{1e6 * seconds:.3f} µs"


def show_board_memory() -> str:
    """Return the energies of the memory of the two boards of an H200."""
    path = ROOT / "src/wattcast/predictor/bundle/boards.yaml"
    boards = decode_yaml(path.read_bytes(), dict[str, Any], path.name)
    factors = [board["factors"]["dram_energy"] for board in boards.values()]
    return f"{min(factors):.2f} and {max(factors):.2f} times its energy"


def show_memory_rail() -> str:
    """Return the fitted costs of an H200's memory rail."""
    path = ROOT / "src/wattcast/power/presets/fitted/h200.yaml"
    model = decode_yaml(path.read_bytes(), dict[str, Any], path.name)["model"]
    rail = next(rail for rail in model["rails"] if rail["name"] == "memory")
    return (
        f"{rail['awake_w']:.0f} W more awake than idle "
        f"(in full from ρ_awake = {1e-12 * rail['awake_per_s']:.1f} TB/s on), "
        f"{1e12 * rail['event_f']['dram_read_byte']:.0f} pJ a byte read, "
        f"{1e12 * rail['event_f']['dram_write_byte']:.0f} written"
    )


def show_file_error(card: str = "", rows: int = 0) -> str:
    """Return how far watts by the AccelWattch file of a card are off, or by the farthest one that
    no watt of its card moved; ``rows`` tells sets of one card apart.
    """
    from wattcast.lab.gpuwattch.judged_files import read_judgements, worst_left_out

    if not card:
        return f"{worst_left_out().mape:.3g} %"
    found = [item for item in read_judgements() if item.card == card]
    (item,) = [one for one in found if rows in (0, one.rows)]
    return f"{item.mape:.3g} %"


def show_older_host() -> str:
    """Return the host's cost of an operator that forecasts take for older cards."""
    path = ROOT / "src/wattcast/predictor/bundle/forecast.yaml"
    host = decode_yaml(path.read_bytes(), dict[str, Any], path.name)["host"]
    return str(host["default"]).replace(" us", " µs")


# The H200's kernel database


def _find_capped(rows: KernelRows) -> Mask:
    """Mark the rows whose clock the power limit lowers once it has settled."""
    top_hz = float(sweep_values(load_gpu("h200").clocks.max_hz))
    is_slower = rows.column("settled_clock_hz") < TOP_CLOCK_SHARE * top_hz
    return np.asarray(is_slower & np.isfinite(rows.column("settled_power_w")))


@cache
def _pair_capped_rows() -> list[tuple[str, float]]:
    """Return family and settled over burst time of every kernel that the limit slows down."""
    rows = load_kernel_rows("h200")
    latency_s = settled_figures(rows)[2]
    is_capped = _find_capped(rows)
    is_random = on_random_data(rows)
    bursts: dict[tuple[Any, ...], float] = {}
    capped: dict[tuple[Any, ...], float] = {}
    for place, kind in enumerate(rows.kind):
        key = (rows.ops[place], rows.conditions[place], rows.uuid[place])
        if not (rows.fit[place] and is_random[place] and rows.repeat[place] == 0):
            continue
        if kind == "burst":
            bursts.setdefault(key, float(latency_s[place]))
        elif kind == "sustained" and is_capped[place]:
            capped.setdefault(key, float(latency_s[place]))
    both = [key for key in capped if key in bursts]
    return [(key[0].family, capped[key] / bursts[key]) for key in both]


def show_capped_power() -> str:
    """Return the 1st and 99th percentile of what capped rows draw, over the limit."""
    rows = load_kernel_rows("h200")
    is_judged = _find_capped(rows) & rows.fit & rows.is_kind("sustained")
    limit_w = float(sweep_values(load_gpu("h200").power.limit_w))
    shares = rows.column("settled_power_w")[is_judged & on_random_data(rows)] / limit_w
    low, high = np.percentile(shares[shares > STILL_CLIMBING], (1.0, 99.0))
    return f"{low:.3f} and {high:.3f}"


def count_capped() -> str:
    """Return how many kernels have a settled and a burst time."""
    return f"{len(_pair_capped_rows())}"


def show_settled(family: str) -> str:
    """Return how much longer kernels of a family take once the governor has settled."""
    ratios = [ratio for name, ratio in _pair_capped_rows() if name == family]
    return f"{np.median(ratios):.2f}"


# Studies with measurements in the repository


@cache
def _judge_training() -> Mapping[str, float]:
    """Return mean errors of the training steps that were predicted before they were measured."""
    from judge_training_rows import COLUMNS, MEASURED, PREDICTIONS, read_columns, read_plan

    measured = read_columns(MEASURED)
    predicted = read_columns(PREDICTIONS)
    names = [name for name in read_plan()["third"] if name in measured]
    assert len(names) == 18, f"the pages say 18 steps, and {len(names)} were measured"
    return {
        column: 100.0
        * float(np.mean([abs(predicted[n][column] / measured[n][column] - 1.0) for n in names]))
        for column in COLUMNS
    }


RECIPE_STEPS = {"held-out": 18, "second": 16}  # that the pages speak of


@cache
def _judge_recipes(chosen: str) -> Mapping[str, float]:
    """Return mean errors of a set of fine-tuning recipes that was predicted before measurement."""
    from judge_recipe_rows import COLUMNS, MEASURED, PREDICTIONS, read_columns, read_plan

    measured = read_columns(MEASURED)
    predicted = read_columns(PREDICTIONS)
    names = [name for name in read_plan()[chosen] if name in measured]
    steps = RECIPE_STEPS[chosen]
    assert len(names) == steps, f"the pages say {steps} steps, and {len(names)} were measured"
    means = {}
    for column in COLUMNS:
        errors = [abs(predicted[n][column] / measured[n][column] - 1.0) for n in names]
        means[column] = 100.0 * float(np.mean(errors))
    return means


def show_recipes(chosen: str, column: str) -> str:
    """Return the mean error of the steps of a set of recipes in one quantity."""
    return f"{_judge_recipes(chosen)[column]:.1f} %"


def show_training(column: str) -> str:
    """Return the mean error of the training steps in one quantity."""
    return f"{_judge_training()[column]:.1f} %"


def _show_advice(pairs: Sequence[Mapping[str, Any]], firsts: Sequence[bool]) -> str:
    signs = sum(pair["sign"] for pair in pairs)
    near = sum(pair["near"] for pair in pairs)
    return (
        f"{signs} of {len(pairs)} signs, {near} within 20 points, "
        f"{sum(firsts)} of {len(firsts)} first advices"
    )


def show_tune_pairs(use: str) -> str:
    """Return how often `tune` was right about a set of pairs with all metrics."""
    from judge_tune_pairs import judge_pairs

    pairs, firsts, _ = judge_pairs(use)
    return _show_advice(pairs, [first["right"] for first in firsts])


def show_full_set(which_set: str, again: bool) -> str:
    """Return how often `tune` was right about a set of pairs from ``ncu --set full``."""
    from judge_full_set import MEASURED, judge_folder

    pairs, firsts = judge_folder(MEASURED[which_set], again, which_set)
    return _show_advice(pairs, [first["right"] for first in firsts if first["wanted"]])


def show_tune_power() -> str:
    """Return the range of errors in watts over the sets of pairs."""
    from judge_tune_pairs import LATER, judge_power

    errors = []
    for which in LATER:
        rows = judge_power(f"{which} held-out")
        off = [abs(row["predicted_w"] / row["measured_w"] - 1.0) for row in rows]
        errors.append(100.0 * float(np.mean(off)))
    return f"{min(errors):.1f} to {max(errors):.1f} %"


@cache
def _judge_kernels() -> Mapping[str, Any]:
    from judge_kernel_phases import MEASURED, judge_table, summarize

    text = (MEASURED / "kernel_counters.csv").read_text(errors="replace")
    return summarize(judge_table(text.splitlines()))


def show_kernel_bytes() -> str:
    """Return median errors of the bytes of twenty operators by level."""
    figures = _judge_kernels()
    levels = {name: 100.0 * error for name, error in figures["median_error_by_level"].items()}
    return (
        f"DRAM {levels['DRAM']:.1f} %, L2 {levels['L2']:.2f} %, "
        f"shared memory and L1 {levels['shared']:.1f} %, "
        f"all together {100.0 * figures['median_error']:.1f} %"
    )


def show_kernel_tiles() -> str:
    """Return how many tiles and waves of products are exact."""
    figures = _judge_kernels()
    exact = figures["tile_exact"] + figures["waves_exact"]
    return f"{exact} of {2 * figures['named']}"


def show_traffic_cells() -> str:
    """Return how the policy of serving cards fared over all judged cells."""
    lines = (ROOT / "studies/traffic/judged_rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = sum(row["minutes_kept_of_top"] for row in rows)
    asked = sum(row["minutes_kept_at_top"] for row in rows)
    share = sum(row["saving"] for row in rows) / sum(row["oracle_saving"] for row in rows)
    return f"{100.0 * kept / asked:.0f} % of the minutes, {100.0 * share:.0f} % of the saving"


def show_drafted_steps() -> str:
    """Return the mean error of steps that draft, over those of others in ``drafted_steps.csv``."""
    lines = (ROOT / "studies/drafted_steps.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    errors = []
    for row in rows:
        found = wattcast.simulate(
            "qwen3-32b",
            "h100-sxm",
            concurrency=1,
            requests=1,
            prompt=183,
            output=877,
            max_seqs=1,
            max_batched_tokens=5000,
            speculative_tokens=int(row["drafted"]),
            draft="qwen3-1.7b",
        )
        step_s = found.summarise()["inter_token_s"]["p50"]
        errors.append(abs(step_s / (1e-3 * float(row["step_ms"])) - 1.0))
    return f"{100.0 * sum(errors) / len(errors):.1f} %"


# the six workloads of EnergAIzer's figure 11: model, batch, tokens
_EXPLORED = (
    ("gpt2", 8, 128),
    ("opt-1.3b", 2, 128),
    ("qwen2-1.5b", 1, 128),
    ("gpt2", 32, 512),
    ("opt-1.3b", 8, 2048),
    ("qwen2-1.5b", 1, 4096),
)


def show_explorations() -> str:
    """Return the range of errors over the clocks of six workloads of an A100."""
    from wattcast.lab.paper_figures.energaizer_figures import judge_runs
    from wattcast.lab.validate.public_checks.published_runs import (
        PUBLISHED_GPU,
        clean_runs,
        read_published_runs,
    )

    runs = clean_runs(read_published_runs(_find_reference(), "clocks"))
    judged = judge_runs(runs, PUBLISHED_GPU, "clocks")
    keys = [(run.model, run.batch, run.seq) for run in judged.runs]
    errors: dict[str, list[float]] = {"power": [], "energy": []}
    for workload in _EXPLORED:
        here = judged.select(np.array([key == workload for key in keys]), "")
        energy = here.predicted_s * here.predicted_w / (here.measured_s * here.measured_w)
        errors["power"].append(float(here.percent_errors("power").mean()))
        errors["energy"].append(float(100.0 * np.abs(energy - 1.0).mean()))
    shown = [f"{min(values):.1f} to {max(values):.1f} %" for values in errors.values()]
    return f"{shown[0]} off in power and {shown[1]} in energy"


def _find_reference() -> Path:
    folder = reference_folder(os.environ, ROOT)
    if folder is None:
        raise MissingTool(
            "the measurements of others are not here. Set WATTCAST_REFERENCE to their folder."
        )
    return folder


def show_pictures(column: str) -> str:
    """Return the mean error of whole pictures by ML.ENERGY's on a B200."""
    from studies.published_pictures import show_error

    return show_error(column)


# Commands


def _answer(*words: str) -> Any:
    """Return what a command prints with ``--json``."""
    from wattcast.cli.command_output import Environment
    from wattcast.cli.main import main

    stdout = io.StringIO()
    stderr = io.StringIO()
    code = main([*words, "--json"], Environment(stdout, stderr, {}))
    assert not code, stderr.getvalue()
    return json.loads(stdout.getvalue())


def show_side_by_side() -> str:
    """Return the errors of three power models on the same kernels."""
    from wattcast.lab.validate.power_checks import compare_power_models, summarise_views

    models = summarise_views(compare_power_models("h200"))["models"]
    errors = {name: figures["mape"] for name, figures in models.items()}
    return (
        f"{errors['forecast']:.1f} % off, the component model {errors['components']:.1f} % "
        f"and the counter model {errors['counters']:.1f} %"
    )


def show_counter_design() -> str:
    """Return how many counted events are enough for the core rail of an H200."""
    answer = _answer("lab", "counters", "--design", "h200")
    steps = answer["steps"]
    metrics = steps[answer["enough"] - 1]["metrics"]
    return f"{answer['enough']} of {len(steps)} events ({metrics} metrics)"


def show_rounds() -> str:
    """Return how far two rounds of microbenchmarks differ at most."""
    from wattcast.lab.microbench.microbench_results import compare_rounds, read_shipped_results

    pairs = compare_rounds(read_shipped_results(load_gpu("h200")))
    time = 100.0 * max(pair.time for pair in pairs)
    energy = 100.0 * max(pair.energy for pair in pairs)
    return f"{time:.1f} % in time and {energy:.1f} % in energy"


def show_unit_rates() -> str:
    """Return how far units stay behind their specification."""
    from wattcast.lab.microbench.microbench_results import check_truths, read_shipped_results

    gpu = load_gpu("h200")
    truths = check_truths(read_shipped_results(gpu), gpu)
    off = [100.0 * one.deviation for one in truths if "per cycle and SM" in one.statement]
    return f"{min(off):.0f} to {max(off):.1f} %"


@cache
def _play_simulated() -> Mapping[str, Mapping[str, float]]:
    means: Mapping[str, Mapping[str, float]] = _answer("manage", "simulate")["mean"]
    return means


def show_harmonia() -> str:
    """Return the ED² of the simulated HD 7970 over the oracle's, with probing."""
    return f"{100.0 * _play_simulated()['harmonia']['ed2_over_oracle_with_probing']:.1f} %"


def show_harmonia_gain() -> str:
    """Return the geometric mean of its ED² gains, and the oracle's."""
    name = "ed2_gain_geometric_mean_2_with_probing"
    own, oracle = (100.0 * _play_simulated()[policy][name] for policy in ("harmonia", "oracle"))
    return f"{own:.1f} % ({oracle:.1f} %)"


def show_titanx_replay() -> str:
    """Return the converged ED² over the oracle's on measured tables of a Titan X."""
    path = _find_reference() / "titanx/real_time_power_by_clock.csv"
    means = _answer("manage", "replay", str(path), "--default", "1164/3505")["mean"]
    return f"{100.0 * means['harmonia']['ed2_over_oracle']:.2f} %"


FIGURES: dict[str, Callable[[], str]] = {
    "study.training-steps.latency": lambda: show_training("latency_s"),
    "study.training-steps.power": lambda: show_training("power_w"),
    "study.training-steps.energy": lambda: show_training("energy_j"),
    "study.recipe-steps.latency": lambda: show_recipes("held-out", "latency_s"),
    "study.recipe-steps-second.latency": lambda: show_recipes("second", "latency_s"),
    "study.recipe-steps.power": lambda: show_recipes("held-out", "power_w"),
    "study.recipe-steps-second.power": lambda: show_recipes("second", "power_w"),
    "study.recipe-steps.energy": lambda: show_recipes("held-out", "energy_j"),
    "study.recipe-steps-second.energy": lambda: show_recipes("second", "energy_j"),
    "study.explorations": show_explorations,
    "study.traces-gpuwattch": lambda: _show_trace_error("gtx480_gpuwattch, worst component, W"),
    "study.traces-accelwattch": lambda: _show_trace_error(
        "qv100_accelwattch, worst component, W, with its power report"
    ),
    "study.divergent-sample": lambda: _show_trace_error("qv100_accelwattch, worst component, W"),
    "study.energies-mcpat": show_mcpat_ratios,
    "study.leakage-mcpat": show_mcpat_chip,
    "study.energies-h200": show_fitted_factor,
    "study.gv100": show_gv100,
    "study.h200-constant-power": lambda: show_fitted_power("constant_power", 0),
    "study.h200-lanes": lambda: show_fitted_power("static_flane", 1),
    "study.carried-energies": show_file_error,
    "study.b200-energies": lambda: show_file_error("B200"),
    "study.a100-file": lambda: show_file_error("A100 PCIe 40 GB", 68),
    "study.a100-file-clocks": lambda: show_file_error("A100 PCIe 40 GB", 163),
    "study.a10-file": lambda: show_file_error("A10"),
    "study.b200-file-alone": lambda: show_file_error("B200 without its own watts"),
    "study.gv100-file": lambda: show_file_error("Quadro GV100"),
    "study.predicted-counters": lambda: show_file_error("H200 with predicted counters"),
    "study.memory-rail": show_memory_rail,
    "study.host-launch": show_host_launch,
    "study.host-launch-old": show_older_host,
    "study.cold-operator": show_cold_operator,
    "study.board-memory": show_board_memory,
    "study.capped-kernels": count_capped,
    "study.settled-products": lambda: show_settled("gemm"),
    "study.settled-attention": lambda: show_settled("attention"),
    "study.settled-convolutions": lambda: show_settled("conv2d"),
    "study.capped-rows": show_capped_power,
    "study.tune-sixth": lambda: show_tune_pairs("sixth held-out"),
    "study.tune-seventh": lambda: show_full_set("seventh", False),
    "study.tune-seventh-again": lambda: show_full_set("seventh", True),
    "study.tune-eighth": lambda: show_full_set("eighth", False),
    "study.tune-ninth": lambda: show_full_set("ninth", False),
    "study.tune-power": show_tune_power,
    "study.kernel-bytes": show_kernel_bytes,
    "study.kernel-tiles": show_kernel_tiles,
    "study.counter-design": show_counter_design,
    "study.side-by-side": show_side_by_side,
    "study.microbench": show_rounds,
    "study.units": show_unit_rates,
    "study.harmonia": show_harmonia,
    "study.harmonia-gain": show_harmonia_gain,
    "study.titanx-oracle": show_titanx_replay,
    "study.host-attention": lambda: show_host_weight("attention"),
    "study.host-convolution": lambda: show_host_weight("conv2d"),
    "study.host-rest": lambda: show_host_weight("other"),
    "study.host-spread": lambda: show_spread("host", "and"),
    "study.own-host-spread": lambda: show_spread("own_host", "and"),
    "study.engine-host-spread": lambda: show_spread("engine_host", "to"),
    "study.capped-latency": show_capped_latency,
    "study.capped-latency-rows": lambda: str(_read_distances()["capped"]["rows"]),
    "study.clocks-products": lambda: show_clocks("gemm"),
    "study.clocks-elementwise": lambda: show_clocks("elementwise"),
    "study.collective-spread": show_collective_spread,
    "study.traffic-cells": show_traffic_cells,
    "study.drafted-steps": show_drafted_steps,
    "study.pictures-b200.latency": lambda: show_pictures("latency_s"),
    "study.pictures-b200.power": lambda: show_pictures("power_w"),
    "study.pictures-b200.energy": lambda: show_pictures("energy_j"),
}


_SLOW = ("capped-kernels", "capped-rows", "counter-design", "side-by-side")
_SETTLED = ("settled-products", "settled-attention", "settled-convolutions")
# By measurements of others
_PICTURES = tuple(f"pictures-b200.{name}" for name in ("latency", "power", "energy"))
_REFERENCE = ("explorations", "titanx-oracle", *_PICTURES)
_NOT_QUICK = {f"study.{name}" for name in (*_SLOW, *_SETTLED, *_REFERENCE)}
QUICK = tuple(name for name in FIGURES if name not in _NOT_QUICK)


def work_out(names: Sequence[str]) -> dict[str, str]:
    """Return figures by name."""
    for name in names:
        check_names("figure", name, FIGURES)
    return {name: FIGURES[name]() for name in names}


def main() -> None:
    """Keep the figures that were asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="figures to work out; default: all")
    options = parser.parse_args()
    kept = json.loads(KEPT.read_bytes()) if KEPT.is_file() else {}
    names = options.names or list(FIGURES)
    for name, text in work_out(names).items():
        if kept.get(name) != text:
            print(f"{name}: {kept.get(name)!r} -> {text!r}")
        kept[name] = text
    ordered = {name: kept[name] for name in FIGURES if name in kept}
    write_whole(KEPT, (json.dumps(ordered, indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
