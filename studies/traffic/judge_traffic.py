"""Judge the clock policy of serving cards on public traces and two generated shapes.

    python studies/traffic/judge_traffic.py TRACES FOLDER [--until HH:MM] [--names NAMES]

``TRACES`` holds the public traces (Azure 2023 code and conversation, Mooncake conversation and
synthetic). Constants were chosen on the first 40 % of each, with plants of seeds 1 to 3; here the rest
is served, by plants of seeds 101 to 103. ``FOLDER`` gets ``setup.json`` and ``rows.jsonl``.

Rules. llama3-8b in bf16 on one card. Limits: twice the worst minute of the top clock on the first
part at a tenth of its speed, rounded up to an edge of vLLM's histograms. Load: a share of the speed
up to which the top clock of the plant keeps them in 99 % of the minutes of the first part. A cell is 6
minutes at that load, 3,000 requests at most; the first minute, in which the policy learns, counts for
nobody. Cells run in an order that was drawn before. ``setup.json`` beside this file is the one that
was judged by, ``judged_rows.jsonl`` what came out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.control.serving_control import ServingLimits
from wattcast.control.serving_rehearsal import (
    TPOT_EDGES,
    TTFT_EDGES,
    ServingPlant,
    build_clock_levels,
)
from wattcast.control.traffic_rehearsal import (
    perturb_levels,
    rehearse_traffic,
    serve_traffic,
)
from wattcast.predictor.api import find_gpu
from wattcast.serving.arrivals import Trace, make_trace
from wattcast.serving.trace_files import parse_trace

PUBLIC = {
    "azure-conv": "azure_2023_conv",
    "azure-code": "azure_2023_code",
    "mooncake-conversation": "mooncake_conversation",
    "mooncake-synthetic": "mooncake_synthetic",
}
GENERATED = ("burst", "diurnal")
SEEDS = {"a100-sxm": 101, "h100-sxm": 102, "h200": 103}
LOADS = (0.2, 0.4, 0.6, 0.8)
FIRST_PART = 0.4  # of a trace, on which constants were chosen
WARM_UP_S = 60.0
SECONDS = 360.0
MOST_REQUESTS = 3000


def draw_heavy_tail(random: np.random.Generator, count: int, least: int, most: int) -> Any:
    """Draw lengths whose frequency falls with the power 1.4 of the length (Zipf, as BurstGPT's)."""
    power = -0.4
    share = random.random(count)
    return np.rint((least**power + share * (most**power - least**power)) ** (1.0 / power))


def generate(name: str, seed: int, count: int = 6000) -> Trace:
    """Draw a shape at 5 requests a second: gamma gaps and Zipf lengths, the forms that BurstGPT's
    authors publish (a coefficient of variation of 3 is ours), or a day of 10 minutes with bursts.
    """
    random = np.random.default_rng(seed)
    if name == "burst":
        shape = 1.0 / 9.0
        arrival_s = np.cumsum(random.gamma(shape, 1.0 / (shape * 5.0), count))
        prompts = draw_heavy_tail(random, count, 64, 4096)
        return make_trace(arrival_s, prompts, draw_heavy_tail(random, count, 16, 1024))
    end_s = count / 5.0
    begins = random.uniform(0.0, end_s, random.poisson(end_s / 90.0))
    moments = np.sort(random.uniform(0.0, end_s, int(40.0 * end_s)))
    rate = 4.2 * (1.0 + 0.6 * np.sin(2.0 * np.pi * moments / 600.0))
    for begin_s in begins:
        rate = np.where((moments >= begin_s) & (moments < begin_s + 8.0), 3.0 * rate, rate)
    arrival_s = moments[40.0 * random.random(len(moments)) < rate]
    noise = random.standard_normal((2, len(arrival_s)))
    prompts = np.clip(np.rint(512.0 * np.exp(0.8 * noise[0])), 16, 8192)
    outputs = np.clip(np.rint(128.0 * np.exp(0.8 * noise[1])), 4, 2048)
    return make_trace(arrival_s, prompts, outputs)


def read_part(folder: Path, name: str, is_first: bool) -> Trace:
    """Return one part of a trace, or a drawn one of another seed."""
    if name in GENERATED:
        return generate(name, 1 if is_first else 1001)
    path = next(folder.glob(f"{PUBLIC[name]}*.gz"))
    trace = parse_trace(gzip.decompress(path.read_bytes()), path.name.removesuffix(".gz"))
    is_before = trace.arrival_s < FIRST_PART * trace.arrival_s[-1]
    rows = np.flatnonzero(is_before == is_first)
    return trace.reorder(rows, trace.arrival_s[rows] - trace.arrival_s[rows[0]])


def speed_up(trace: Trace, factor: float, seconds: float = np.inf, most: int = 10**9) -> Trace:
    """Return the begin of a trace whose requests come so much faster."""
    arrival_s = trace.arrival_s / factor
    rows = np.flatnonzero(arrival_s < seconds)[:most]
    return trace.reorder(rows, arrival_s[rows])


@cache
def build_levels(card: str, longest: int = 131072) -> Any:
    return build_clock_levels("llama3-8b", find_gpu(card), longest)


@cache
def build_plant(card: str) -> Any:
    return perturb_levels(build_levels(card), find_gpu(card), SEEDS[card])


def find_setup(folder: Path, job: tuple[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the limits of a service on a card, and the speed that its top clock serves."""
    card, name = job
    requests = 150 if name.startswith("mooncake") else 800
    trace = speed_up(read_part(folder, name, is_first=True), 1.0, most=requests)
    light = speed_up(trace, 0.1)
    run = ServingPlant(build_levels(card), light).engine.finish()
    first_s = run.first_token_s - light.arrival_s
    token_s = (run.last_token_s - run.first_token_s) / np.maximum(light.output_tokens - 1, 1)
    limits = []
    for times_s, edges in ((first_s, TTFT_EDGES), (token_s, TPOT_EDGES)):
        minute = (light.arrival_s // 60).astype(int)
        worst_s = max(np.percentile(times_s[minute == one], 99) for one in np.unique(minute))
        further = (*edges[:-1], 160.0, 640.0, 2560.0)
        limits.append(next(edge for edge in further if edge >= 2.0 * worst_s))
    low, high = (0.05, 3.0) if name.startswith("mooncake") else (0.3, 10.0)
    plant = build_plant(card)
    while high / low > 1.15:
        middle = (low * high) ** 0.5
        top = serve_traffic(plant, speed_up(trace, middle), ServingLimits(*limits), len(plant) - 1)
        if top.kept.mean() >= 0.99:
            low = middle
        else:
            high = middle
    return f"{card} {name}", {"limits": limits, "judge": low}


def judge_cell(
    folder: Path,
    setup: dict[str, Any],
    until_s: float,
    job: tuple[str, str, float],
) -> dict[str, Any] | None:
    """Serve a part that was never looked at, at one load on one card."""
    card, name, load = job
    if time.time() > until_s:
        return None
    place = setup[f"{card} {name}"]
    trace = read_part(folder, name, is_first=False)
    trace = speed_up(trace, load * place["judge"], SECONDS, MOST_REQUESTS)
    limits = ServingLimits(*place["limits"])
    begin_s = min(WARM_UP_S, 0.3 * float(trace.arrival_s[-1]))
    figures = rehearse_traffic(build_levels(card), build_plant(card), trace, limits, begin_s)
    return {"card": card, "trace": name, "load": load, "seconds": trace.arrival_s[-1], **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", default="", help="begin no further cell after this time, HH:MM")
    parser.add_argument("--names", default=",".join((*PUBLIC, *GENERATED)), help="of the traces")
    arguments = parser.parse_args()
    until_s = np.inf
    if arguments.until:
        today = time.strftime("%Y-%m-%d ")
        until_s = time.mktime(time.strptime(today + arguments.until, "%Y-%m-%d %H:%M"))
    places = [(card, name) for card in SEEDS for name in arguments.names.split(",")]
    saved = arguments.folder / "setup.json"
    setup = json.loads(saved.read_text()) if saved.exists() else {}
    missing = [place for place in places if " ".join(place) not in setup]
    with Pool(2) as pool:
        for place, figures in pool.imap_unordered(partial(find_setup, arguments.traces), missing):
            setup[place] = figures
            saved.write_text(json.dumps(setup))
        jobs = [(card, name, load) for card, name in places for load in LOADS]
        order = np.random.default_rng(53).permutation(len(jobs))
        drawn = [jobs[place] for place in order]
        rows = arguments.folder / "rows.jsonl"
        if rows.exists():  # a run that was cut off goes on
            judged = [json.loads(line) for line in rows.read_text().splitlines()]
            done = {(row["card"], row["trace"], row["load"]) for row in judged}
            drawn = [job for job in drawn if job not in done]
        judge = partial(judge_cell, arguments.traces, setup, until_s)
        with rows.open("a") as stream:
            for row in pool.imap_unordered(judge, drawn):
                if row is not None:
                    stream.write(json.dumps(row) + "\n")
                    stream.flush()


if __name__ == "__main__":
    main()
