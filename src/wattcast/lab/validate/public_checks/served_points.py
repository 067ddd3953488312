"""Judge ``simulate`` by served points of many cards and engines: aiconfigurator's silicon sample.

A row is an engine that a benchmark keeps at a fixed number of requests in flight, with its time to
first token and between tokens. ``simulate --concurrency`` is asked for the same. Rows are left out
for what the reference's README calls defects, and for what cannot be asked: several nodes, prompts
and decoding on engines of their own, parallel sizes of 0, repeated configurations, first tokens
after more than a minute in a queue, attention shared by data, and models without an entry in the
catalogue. Where many points of a model on a card are left, a crc32 of their names chooses some.

Lengths: InferenceMAX's benchmark, behind rows of ``db-dump`` and ``daily csv``, draws 0.8 to 1 of
the nominal tokens; rows of ``gap analysis`` are asked as they are stated. Both were fixed before
any row was compared. That it asks ten requests a client and that times are means, the first prompts
which wait for one another among them, was fixed after some rows had been seen: medians of three
requests a client were half of the published times to first token.
Run: ``python -m wattcast.lab.validate.public_checks.served_points --reference FOLDER``, or
``wattcast lab validate --ablations`` (WATTCAST_REFERENCE names the measurements).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.calibrate.table_files import system_name
from wattcast.core.errors import WattcastError
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.lab.validate.public_checks.served_recipes import Recipe, find_recipe
from wattcast.predictor.bundle.calibrated import USUAL_ENGINE
from wattcast.serving.arrivals import Trace, make_trace
from wattcast.serving.simulate_serving import simulate

TABLE = Path("aiconfigurator_serving") / "silicon_sample.csv.gz"
WHERE = "served points, aiconfigurator"
_MUST_TPOT = 10.0  # medians, percent
_MUST_TTFT = 20.0
_MOST_QUEUE_MS = 60e3
_MOST_POINTS = 5  # of a model, its precision, a card and an engine
_NODE_GPUS = 8
_RACK_NODE_GPUS = 4  # of one node of a rack of GB200
_WAVES = 10  # requests in all, over those in flight, as InferenceMAX's benchmark asks them
_LEAST_REQUESTS = 16
_TRTLLM_TOKENS = 8192  # of a step by default; prompts are computed whole
_SHORTEST_DRAWN = 0.8  # of the nominal lengths
_DRAWN_ORIGINS = ("db-dump", "daily csv")
# model -> catalogue's name, and the weights that each precision means
_MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "MiniMaxAI/MiniMax-M2.5": ("minimax-m2", {"fp8": "fp8-block", "fp4": "nvfp4"}),
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", {"fp8": "fp8-block"}),
    "Qwen/Qwen3-32B": ("qwen3-32b", {"fp8": "fp8", "fp4": "nvfp4"}),
    "nvidia/Qwen3-32B-NVFP4": ("qwen3-32b", {"fp4": "nvfp4"}),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", {"fp8": "fp8-block", "fp4": "nvfp4"}),
    "nvidia/DeepSeek-R1-NVFP4": ("deepseek-v3", {"fp4": "nvfp4"}),
    "nvidia/DeepSeek-V3.1-NVFP4": ("deepseek-v3", {"fp4": "nvfp4"}),
    "meta-llama/Llama-3.1-70B": ("llama3-70b", {"fp8": "fp8", "fp4": "nvfp4"}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama3-8b", {"fp8": "fp8"}),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("llama3-8b", {"fp8": "fp8"}),
    "openai/gpt-oss-120b": ("gpt-oss-120b", {"fp4": "mxfp4", "fp8": "mxfp4"}),
}


@dataclass(frozen=True)
class ServedPoint:
    """One published point of a served model."""

    name: str
    model: str  # of the catalogue
    quantization: str
    gpu: str
    engine: str
    gpus: int
    expert_gpus: int
    concurrency: int
    prompt: int
    output: int
    is_drawn: bool  # lengths are drawn below the nominal ones
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Return what points are drawn alike from."""
        return (self.model, self.quantization, self.gpu, self.engine)


def read_points(reference: Path) -> tuple[list[ServedPoint], dict[str, int]]:
    """Read the points that can be asked, each configuration once, and how many were left out,
    why.
    """
    with gzip.open(reference / TABLE, "rt", encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream))
    points: dict[tuple[object, ...], ServedPoint] = {}
    left_out: dict[str, int] = {}
    for line in lines:
        reason = _reason_left_out(line)
        if not reason:
            point = _parse_point(line)
            sizes = (point.gpus, point.expert_gpus, point.concurrency, point.prompt, point.output)
            key = (point.group, sizes)
            if key not in points:
                points[key] = point
                continue
            reason = "a repeated configuration"
        left_out[reason] = left_out.get(reason, 0) + 1
    return list(points.values()), left_out


def _reason_left_out(line: Mapping[str, str]) -> str:
    """Say why a row cannot be asked; empty where it can."""
    model, precisions = _MODELS.get(line["model_path"], ("", {}))
    if line["mode"] != "agg":
        return "prompts and decoding on engines of their own"
    if not model:
        return f"no entry in the catalogue: {line['model_path']}"
    if line["precision"] not in precisions:
        return f"weights in {line['precision'] or 'an unknown format'}"
    if not line["concurrency"] or "0" in (line["tp_size"], line["attention_dp_size"]):
        return "parallel sizes or requests in flight are missing"
    if int(line["attention_dp_size"] or 1) > 1:
        return "attention shared by data"
    if int(line["pp_size"] or 1) > 1 or _count_gpus(line) > _most_gpus(line["system"]):
        return "several nodes or stages"
    if float(line["silicon_ttft_ms"] or "inf") > _MOST_QUEUE_MS or not line["silicon_tpot_ms"]:
        return "first tokens after more than a minute, or none"
    return ""


def _most_gpus(system: str) -> int:
    return _RACK_NODE_GPUS if system.startswith("gb") else _NODE_GPUS


def _count_gpus(line: Mapping[str, str]) -> int:
    """Return the GPUs of an engine; some rows state tensor parallel sizes times expert ones."""
    stated = int(line["tp_size"])
    experts = int(line["moe_ep_size"] or 1)
    tensor = int(line["moe_tp_size"] or 1)
    is_product = (
        experts > 1 and stated == tensor * experts and f"tp{tensor}_ep{experts}" in line["id"]
    )
    return tensor if is_product and tensor == experts else stated


def _parse_point(line: Mapping[str, str]) -> ServedPoint:
    model, precisions = _MODELS[line["model_path"]]
    return ServedPoint(
        name=line["id"],
        model=model,
        quantization=precisions[line["precision"]],
        gpu=system_name(line["system"]),
        engine=line["backend"],
        gpus=_count_gpus(line),
        expert_gpus=min(int(line["moe_ep_size"] or 1), _count_gpus(line)),
        concurrency=int(float(line["concurrency"])),
        prompt=int(line["isl"]),
        output=int(line["osl"]),
        is_drawn=line["origin"] in _DRAWN_ORIGINS,
        ttft_s=1e-3 * float(line["silicon_ttft_ms"]),
        tpot_s=1e-3 * float(line["silicon_tpot_ms"]),
    )


def choose_points(
    points: Sequence[ServedPoint],
    most: int = _MOST_POINTS,
    passed_over: int = 0,
) -> list[ServedPoint]:
    """Choose up to ``most`` points of each group by a crc32 of their names, after as many that are
    ``passed_over``: what follows the judged ones may be looked at before anything is judged.
    """
    groups: dict[tuple[str, str, str, str], list[ServedPoint]] = {}
    for point in sorted(points, key=lambda point: zlib.crc32(point.name.encode())):
        groups.setdefault(point.group, []).append(point)
    return [point for group in sorted(groups) for point in groups[group][passed_over:][:most]]


def ask_point(point: ServedPoint) -> tuple[float, float]:
    """Ask ``simulate`` for the mean times to first token and between tokens, in seconds.

    All clients begin at once, so that the first prompts wait for one another, as in a benchmark.
    """
    recipe: Recipe = {"max_seqs": max(point.concurrency, 256)}
    if point.is_drawn:
        recipe |= find_recipe(
            point.engine,
            point.gpu,
            point.model,
            point.quantization,
            point.gpus,
            point.concurrency,
            (point.prompt, point.output),
        )
    elif point.engine == "trtllm":
        recipe["max_batched_tokens"] = max(point.prompt + point.concurrency, _TRTLLM_TOKENS)
    result = simulate(
        point.model,
        gpu=point.gpu,
        concurrency=point.concurrency,
        trace=_draw_requests(point),
        tp=point.gpus,
        ep=point.expert_gpus,
        quantization=point.quantization,
        engine=point.engine if point.engine != USUAL_ENGINE else None,
        force=True,
        **recipe,
    )
    return float(np.mean(result.ttft_s)), float(np.mean(result.tpot_s))


def _draw_requests(point: ServedPoint) -> Trace:
    """Return the requests of a point, drawn from 0.8 to 1 of its lengths or as long as stated."""
    count = max(_WAVES * point.concurrency, _LEAST_REQUESTS)
    shortest = _SHORTEST_DRAWN if point.is_drawn else 1.0
    random = np.random.default_rng(zlib.crc32(point.name.encode()))
    prompts = random.uniform(shortest * point.prompt, point.prompt, count)
    outputs = random.uniform(shortest * point.output, point.output, count)
    return make_trace(np.zeros(count), np.ceil(prompts), np.ceil(outputs))


@dataclass(frozen=True)
class _Answer:
    """What was asked and how it was answered; times are infinite where it was refused."""

    point: ServedPoint
    ttft_s: float
    tpot_s: float
    refusal: str = ""


def _ask_safely(point: ServedPoint) -> _Answer:
    try:
        return _Answer(point, *ask_point(point))
    except WattcastError as error:
        return _Answer(point, np.inf, np.inf, str(error))


def served_point_rows(
    reference: Path | None,
    tell: Tell,
    most: int = _MOST_POINTS,
) -> list[LedgerRow]:
    """Return median errors by engine and card."""
    if reference is None or not (reference / TABLE).is_file():
        return [make_absent_row(WHERE, "time between tokens", "no reference data")]
    points, _ = read_points(reference)
    chosen = choose_points(points, most)
    tell(f"{WHERE}: {len(chosen)} of {len(points)} points")
    return judge_answers([_ask_safely(point) for point in chosen])


def judge_answers(answers: Sequence[_Answer]) -> list[LedgerRow]:
    """Return the median errors of answers by engine and card, and of all."""
    places = [(answer.point.engine, answer.point.gpu) for answer in answers]
    rows = []
    for place in [*sorted(set(places)), ("all engines", "all cards")]:
        members = [
            answer
            for answer, own in zip(answers, places, strict=True)
            if place in (own, ("all engines", "all cards"))
        ]
        where = f"{WHERE}, {place[0]} on {place[1]}"
        for quantity, name, must in (
            ("time between tokens, median", "tpot_s", _MUST_TPOT),
            ("time to first token, median", "ttft_s", _MUST_TTFT),
        ):
            answered = [item for item in members if not item.refusal]
            predicted = np.array([getattr(item, name) for item in answered])
            measured = np.array([getattr(item.point, name) for item in answered])
            ratio = predicted / measured
            median = float(np.median(100.0 * np.abs(ratio - 1.0))) if len(answered) else None
            bias = round(100.0 * float(np.median(ratio - 1.0)), 1) if len(answered) else None
            refused = len(members) - len(answered)
            row = make_ledger_row(
                where,
                quantity,
                len(answered),
                median,
                must=must,
                bias=bias,
            )
            rows.append(row | {"refused": refused})
    return rows


def main() -> None:
    """Print every point that is asked, and the table by engine and card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument(
        "--most",
        type=int,
        default=_MOST_POINTS,
        help="points of a group",
    )
    parser.add_argument("--gpu", help="those of one card alone")
    parser.add_argument("--engine", help="those of one engine alone")
    parser.add_argument(
        "--passed-over",
        type=int,
        default=0,
        help="points of a group that are left to be judged",
    )
    options = parser.parse_args()
    require_measurements(options.reference / TABLE)
    points, left_out = read_points(options.reference)
    for reason, count in sorted(left_out.items()):
        print(f"left out, {count} rows: {reason}")
    answers = []
    for point in choose_points(points, options.most, options.passed_over):
        if options.gpu and point.gpu != options.gpu:
            continue
        if options.engine and point.engine != options.engine:
            continue
        answer = _ask_safely(point)
        answers.append(answer)
        ttft = f"{1e3 * point.ttft_s:.0f} ms {100 * (answer.ttft_s / point.ttft_s - 1):+.0f} %"
        tpot = f"{1e3 * point.tpot_s:.2f} ms {100 * (answer.tpot_s / point.tpot_s - 1):+.0f} %"
        setting = f"x{point.gpus} ep{point.expert_gpus} c{point.concurrency}"
        lengths = f"{point.prompt}+{point.output}"
        print(
            f"{point.engine} {point.gpu} {point.model} {point.quantization} {setting} {lengths}: "
            f"first {ttft}, between {tpot} {answer.refusal}",
            flush=True,
        )
    for row in judge_answers(answers):
        print(
            f"{row['set']:60} {row['quantity']:30} {row['n']:>4} {row['mape']} must {row['must']}"
        )


if __name__ == "__main__":
    run_module(main)
