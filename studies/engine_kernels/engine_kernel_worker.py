"""Plan the operators of vLLM's kernels, and measure those of one group in a worker process.

The plan is the same on every machine. Each spec states in ``detail`` whether its shape is held out;
a hash of the shape decides that before anything is measured.

Orders come as JSON lines on standard input, answers leave as JSON lines on the original standard
output; whatever libraries print goes to standard error. The worker names each row before it
measures it, so that the campaign knows which row killed a process.

The campaign runs it: ``python engine_kernel_worker.py GROUP --out DIR [--smoke] [--skip FILE]
[--warm PART/PARTS]``."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import engine_shapes as shapes
from wattcast.core.measured_rows import RowKind
from wattcast.core.row_journals import Journal, read_lines
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.operator_rows import KernelCampaign, make_row_id, save_row
from wattcast.measure.sampler import Sampler
from wattcast.measure.steady_state import (
    SettlingRule,
    make_run_name,
    make_torch_run_info,
    say,
    try_spinner,
)

ENGINE = "vllm-0.25.1"
HELD_OUT_SHARE = 0.20
LONGEST_S = 0.008  # of one call, roughly; longer ones would leave a burst with too few replays
MOST_SET_BYTE = 3.0e9  # one set of weights or caches must fit the operand pools
MOST_ACTIVATION_BYTE = {
    "engine_scaled_mm": 5.5e8
}  # likewise the tokens; other families have more room
# A worker process measures one group, so that a broken CUDA context ends one group for a while.
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("engine_attention", "engine_latent"),
    "products": ("engine_scaled_mm", "engine_weight_only"),
    "experts": ("engine_experts",),
    "block": ("engine_block_mm",),
    "small": (
        "engine_rms_norm",
        "engine_silu_and_mul",
        "engine_rotary",
        "engine_cache_write",
        "engine_quantize",
        "engine_route",
        "engine_align",
        "engine_sampling",
        "engine_compiled",
    ),
}
# How many operators of each family: bursts (models, random) and how many of these are sustained
# too.
SERVED = (
    "served"  # a group of its own: sizes of steps that an engine captures, and contexts of traffic
)
SERVED_SUSTAINED = 16
# what decode steps draw: few tokens and an fp8 cache, and earlier rows on one more card
DECODED = "decoded"
DECODED_SUSTAINED = 24  # of each kind
APART = (SERVED, DECODED)
AMOUNTS: dict[str, tuple[int, int, int]] = {
    "engine_attention": (300, 120, 66),
    "engine_latent": (60, 16, 14),
    "engine_scaled_mm": (170, 80, 40),
    "engine_weight_only": (100, 40, 22),
    "engine_experts": (150, 60, 52),
    "engine_block_mm": (70, 20, 14),
    "engine_rms_norm": (44, 24, 9),
    "engine_silu_and_mul": (36, 16, 6),
    "engine_rotary": (18, 10, 3),
    "engine_cache_write": (18, 10, 3),
    "engine_quantize": (28, 12, 4),
    "engine_route": (16, 8, 2),
    "engine_align": (12, 6, 1),
    "engine_sampling": (16, 6, 3),
    "engine_compiled": (40, 0, 6),
}
DATA_ROWS = {
    "engine_attention": 3,
    "engine_scaled_mm": 4,
    "engine_experts": 5,
    "engine_block_mm": 1,
}
REPEATS = {RowKind.BURST: 10, RowKind.SUSTAINED: 2}  # of each group, measured twice


@dataclass(frozen=True)
class EngineTask:
    """One row to measure."""

    kind: RowKind
    spec: OperatorSpec
    data: str = "random"
    repeat: int = 0

    @property
    def id(self) -> str:
        """Id of the row, the same in every run."""
        return make_row_id(self.kind, self.spec, self.data, repeat=self.repeat)


def is_held_out(operator: dict[str, Any]) -> bool:
    """Return whether rows of this shape may only test a fit; routing variants of one shape stay
    together.
    """
    key = {name: value for name, value in operator.items() if name != "routing"}
    digest = hashlib.sha256(b"held-out " + json.dumps(key, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def make_engine_spec(operator: dict[str, Any], chosen: str) -> OperatorSpec:
    """Return the spec of an operator form; operands that a model reads from DRAM change from copy
    to copy.
    """
    if operator["op"] == "linear":  # PyTorch's own, a row of the kernel database
        return OperatorSpec("linear", operator, "nt", "weights", chosen=chosen)
    detail = {"engine": ENGINE, "held_out": is_held_out(operator)}
    return OperatorSpec(
        operator["op"], operator, rotated=_rotation(operator), detail=detail, chosen=chosen
    )


def list_family_specs(family: str) -> list[OperatorSpec]:
    """List all operators of one family in the order they are measured, two of models to one random."""
    from_models, at_random, _ = AMOUNTS[family]
    source = random.Random(f"{family} 25")
    listed = [
        make_engine_spec(operator, f"models:{name}")
        for name, operator in shapes.MODEL_SHAPES[family]()
    ]
    listed = [spec for spec in _unique(listed) if fits_campaign(spec.operator)]
    source.shuffle(listed)
    listed = _spread_variants(listed)[:from_models]
    taken = {spec.id for spec in listed}
    drawn: list[OperatorSpec] = []
    for _ in range(60 * at_random):
        if len(drawn) == at_random:
            break
        spec = make_engine_spec(shapes.DRAW_SHAPE[family](source), "plan")
        if spec.id not in taken and fits_campaign(spec.operator):
            taken.add(spec.id)
            drawn.append(spec)
    mixed: list[OperatorSpec] = []
    while listed or drawn:
        mixed += [listed.pop(0) for _ in range(min(2, len(listed)))]
        mixed += [drawn.pop(0) for _ in range(min(1, len(drawn)))]
    return mixed


def list_group_tasks(group: str) -> list[EngineTask]:
    """List the tasks of one worker; families take turns in proportion to their amounts."""
    if group == SERVED:
        return list_served_tasks()
    if group == DECODED:
        return list_decoded_tasks()
    families = {family: list_family_specs(family) for family in GROUPS[group]}
    bursts = [EngineTask(RowKind.BURST, spec) for spec in _take_turns(families.values())]
    chosen = {family: choose_sustained_specs(family, specs) for family, specs in families.items()}
    sustained = [EngineTask(RowKind.SUSTAINED, spec) for spec in _take_turns(chosen.values())]
    third = len(sustained) // 3
    sustained[third:third] = [
        task for family in GROUPS[group] for task in list_data_tasks(family, chosen[family])
    ]
    again = [
        EngineTask(RowKind.BURST, task.spec, repeat=1) for task in bursts[: REPEATS[RowKind.BURST]]
    ]
    middle = len(bursts) // 2
    bursts[middle:middle] = again
    plain = [task for task in sustained if task.data == "random"]
    sustained += [
        EngineTask(RowKind.SUSTAINED, task.spec, repeat=1)
        for task in plain[: REPEATS[RowKind.SUSTAINED]]
    ]
    return bursts + sustained


def list_served_tasks() -> list[EngineTask]:
    """List the tasks of ``served_shapes`` in random order; the first long ones are sustained too."""
    specs = [make_engine_spec(form, f"served:{name}") for name, form in shapes.served_shapes()]
    specs = [spec for spec in _unique(specs) if fits_campaign(spec.operator)]
    random.Random("served order").shuffle(specs)
    long = [spec for spec in specs if spec.family != "linear" and guess_s(spec.operator) > 6e-6]
    sustained = _spread_variants(long)[:SERVED_SUSTAINED]
    return [
        *(EngineTask(RowKind.BURST, spec) for spec in specs),
        *(EngineTask(RowKind.SUSTAINED, spec) for spec in sustained),
    ]


def list_decoded_tasks() -> list[EngineTask]:
    """List sustained rows of decode steps, none held out: fp8 products, attention, and shapes of
    other groups.
    """
    earlier = [
        task.spec
        for group in ("products", "attention", SERVED)
        for task in list_group_tasks(group)
        if task.kind is RowKind.SUSTAINED and task.data == "random" and task.repeat == 0
    ]
    new = [make_engine_spec(form, f"decoded:{name}") for name, form in shapes.decoded_shapes()]
    random.Random("decoded order").shuffle(new)
    kinds: dict[str, list[OperatorSpec]] = {}
    for kind, specs in (("again", earlier), ("", new)):
        for spec in _unique(specs):
            operator = spec.operator
            decodes = operator.get("phase") == "decode" or operator.get("m", 65) <= 64
            if (
                decodes
                and not spec.detail["held_out"]
                and fits_campaign(operator)
                and guess_s(operator) > 4e-6
            ):
                kinds.setdefault(kind or spec.family, []).append(spec)
    return [
        EngineTask(RowKind.SUSTAINED, spec)
        for spec in _take_turns(k[:DECODED_SUSTAINED] for k in kinds.values())
    ]


def choose_sustained_specs(family: str, specs: list[OperatorSpec]) -> list[OperatorSpec]:
    """Choose operators to sustain: most long enough that the power is the kernel's, of every
    variant.
    """
    wanted = AMOUNTS[family][2]
    long = [spec for spec in specs if guess_s(spec.operator) > 6e-6]
    short = [spec for spec in specs if guess_s(spec.operator) <= 6e-6]
    kept = max(wanted - len(short), round(0.85 * wanted))
    picked = _spread_variants(long)[:kept]
    return picked + short[: wanted - len(picked)]


def list_data_tasks(family: str, specs: list[OperatorSpec]) -> list[EngineTask]:
    """List the same shapes with other weights or routing, to learn what an engine's dummy weights
    change.
    """
    worthy = [spec for spec in specs if guess_s(spec.operator) > 2e-5][: DATA_ROWS.get(family, 0)]
    tasks = [EngineTask(RowKind.SUSTAINED, spec, "tiny") for spec in worthy]
    if family in ("engine_scaled_mm", "engine_experts", "engine_block_mm"):
        tasks += [EngineTask(RowKind.SUSTAINED, spec, "uniform") for spec in worthy]
    if family == "engine_experts":
        for spec in worthy:
            others = [kind for kind in shapes.ROUTINGS if kind != spec.operator["routing"]]
            for kind in others:
                tasks.append(
                    EngineTask(
                        RowKind.SUSTAINED,
                        make_engine_spec(spec.operator | {"routing": kind}, "data"),
                    )
                )
    return sorted(tasks, key=lambda task: task.data)


def list_smoke_tasks(group: str) -> list[EngineTask]:
    """List one operator of every variant as a burst, and one sustained row in each of three groups."""
    seen: dict[str, OperatorSpec] = {}
    for family in GROUPS[group]:
        for spec in list_family_specs(family):
            if guess_s(spec.operator) < 1e-3:
                seen.setdefault(name_variant(spec.operator), spec)
    tasks = [EngineTask(RowKind.BURST, spec) for spec in seen.values()]
    if group in ("attention", "products", "experts"):
        longest = max(seen.values(), key=lambda spec: guess_s(spec.operator))
        tasks.append(EngineTask(RowKind.SUSTAINED, longest))
    return tasks


def name_variant(operator: dict[str, Any]) -> str:
    """Name what tells kernels of one family apart, whatever their sizes."""
    names = (
        "phase kernel scales weights kv_dtype window_kind residual quant mode function routing zero_points sink"
    ).split()
    found = {name: operator[name] for name in names if operator.get(name)}
    words = [name if value is True else str(value) for name, value in found.items()]
    return " ".join([operator["op"].removeprefix("engine_"), *words])


def fits_campaign(operator: dict[str, Any]) -> bool:
    """Return whether one call is short enough and its largest operand small enough to be measured."""
    room = MOST_ACTIVATION_BYTE.get(operator["op"], 1.2e9)
    small = operator["op"] in GROUPS["small"] and shapes.operator_work(operator)[1] > 8e8
    within = shapes.set_byte(operator) < MOST_SET_BYTE and shapes.activation_byte(operator) < room
    return guess_s(operator) < LONGEST_S and within and not small


def guess_s(operator: dict[str, Any]) -> float:
    """Estimate the time of a call by a roofline with round rates, for planning alone."""
    flop, byte = shapes.operator_work(operator)
    rate = 1.1e15 if operator["dtype"] == "fp8" or operator.get("kv_dtype") == "fp8" else 6e14
    return max(flop / rate, byte / 3.5e12)


def _rotation(operator: dict[str, Any]) -> str:
    match operator["op"]:
        case "engine_attention":
            fresh = all(q_len == kv_len for _, q_len, kv_len in operator["groups"])
            return "none" if fresh else "all"
        case "engine_latent":
            return "all" if operator["phase"] == "decode" else "none"
        case "engine_scaled_mm" | "engine_block_mm" | "engine_weight_only" | "engine_experts":
            return "weights"
        case _:  # a fixed quarter of the small kernels finds its operands in DRAM
            digest = hashlib.sha256(json.dumps(operator, sort_keys=True).encode()).digest()
            return "all" if digest[0] < 64 and operator["op"] != "engine_align" else "none"


def _unique(specs: Iterable[OperatorSpec]) -> list[OperatorSpec]:
    return list({spec.id: spec for spec in specs}.values())


def _spread_variants(specs: list[OperatorSpec]) -> list[OperatorSpec]:
    """The same specs, variants in turn, so that the first few hold every variant."""
    by_variant: dict[str, list[OperatorSpec]] = {}
    for spec in specs:
        by_variant.setdefault(name_variant(spec.operator), []).append(spec)
    return _take_turns(by_variant.values())


def _take_turns(lists: Iterable[list[OperatorSpec]]) -> list[OperatorSpec]:
    """Members of several lists merged so that each list is spread evenly over the whole."""
    placed = [
        ((place + 0.5) / len(members), order, spec)
        for order, members in enumerate(lists)
        for place, spec in enumerate(members)
    ]
    firsts = {order: math.inf for _, order, _ in placed}
    for share, order, _ in placed:
        firsts[order] = min(firsts[order], share)
    # the first member of every list comes before the second of any
    return [spec for _, _, spec in sorted(placed, key=lambda p: (p[0] > firsts[p[1]], p[0], p[1]))]


RULE = SettlingRule(longest_s=3.2)
BURST_S, SUSTAINED_S = 0.35, 2.0  # a slice with less time left begins no further row
BURST_SHARE = 0.30  # of a slice; the rest is for sustained rows
NAMES_BATCH = 60
COMPILED_AT_RUN_TIME = ("engine_experts", "engine_block_mm", "engine_quantize", "engine_sampling")


@dataclass
class KernelWorker:
    """Tasks of one group in order, and what measuring them needs."""

    campaign: KernelCampaign
    tasks: list[EngineTask]
    done: set[str]  # ids that another run has, or that killed a worker before
    tell: Callable[[dict[str, Any]], None]
    place: dict[RowKind, int] = field(
        default_factory=lambda: dict.fromkeys((RowKind.BURST, RowKind.SUSTAINED), 0)
    )

    def measure_slice(self, seconds: float, burst_share: float = BURST_SHARE) -> dict[str, int]:
        """Bursts first, while the clock is high, then sustained rows, until ``seconds`` are spent."""
        began_s, before = time.monotonic(), dict(self.campaign.counts)
        shares = {RowKind.BURST: burst_share, RowKind.SUSTAINED: 1.0}
        for kind, least_s in ((RowKind.BURST, BURST_S), (RowKind.SUSTAINED, SUSTAINED_S)):
            until_s = began_s + seconds * (shares[kind] if self._left(RowKind.SUSTAINED) else 1.0)
            while time.monotonic() + least_s < until_s and (task := self._next(kind)) is not None:
                self._measure(task)
        if self._left(RowKind.BURST):  # sustained rows are through: the rest is for bursts
            while (
                time.monotonic() + BURST_S < began_s + seconds
                and (task := self._next(RowKind.BURST)) is not None
            ):
                self._measure(task)
        gained = {name: count - before.get(name, 0) for name, count in self.campaign.counts.items()}
        return {name: count for name, count in gained.items() if count}

    def left(self) -> dict[str, int]:
        """Tasks not yet begun, by kind."""
        return {kind.value: self._left(kind) for kind in self.place}

    def _of_kind(self, kind: RowKind) -> list[EngineTask]:
        return [task for task in self.tasks if task.kind is kind]

    def _left(self, kind: RowKind) -> int:
        known = self.done | self.campaign.journal(kind).ids
        return sum(task.id not in known for task in self._of_kind(kind)[self.place[kind] :])

    def _next(self, kind: RowKind) -> EngineTask | None:
        tasks, known = self._of_kind(kind), self.done | self.campaign.journal(kind).ids
        while self.place[kind] < len(tasks):
            task = tasks[self.place[kind]]
            self.place[kind] += 1
            if task.id not in known:
                return task
        return None

    def _measure(self, task: EngineTask) -> None:
        self.tell({"begin": task.id})
        self.campaign.bench.gpu.operands.fill(task.data)
        save_row(self.campaign, task.kind, task.spec, task.repeat)

    def name_kernels(self, seconds: float) -> dict[str, int]:
        """Kernel names of the operators measured so far, those of sustained rows first."""
        from wattcast.lab.campaigns.kernel_campaign import profile_batch

        until_s = time.monotonic() + seconds
        bench = self.campaign.bench
        bench.gpu.operands.fill("random")
        journal = Journal(self.campaign.out / "names.jsonl", key="spec")
        measured = {kind: self.campaign.journal(kind).ids for kind in self.place}
        order = self._of_kind(RowKind.SUSTAINED) + self._of_kind(RowKind.BURST)
        wanted = {task.spec.id: task.spec for task in order if task.id in measured[task.kind]}
        specs = [spec for spec in wanted.values() if spec.id not in journal.ids]
        if specs:
            profile_batch(
                bench.gpu, specs[:1], bench.run
            )  # the first session of a process may miss kernels
        named, batch_s = 0, 1.0
        for start in range(0, len(specs), NAMES_BATCH):
            batch_began_s = time.monotonic()
            if batch_began_s + batch_s > until_s:
                break
            self.tell({"begin": f"names {specs[start].id}"})
            for row in profile_batch(bench.gpu, specs[start : start + NAMES_BATCH], bench.run):
                journal.append(row)
                named += not row.error
            batch_s = time.monotonic() - batch_began_s
        return {"names": named, "unnamed": len(specs) - named}


def obey_orders(
    worker: KernelWorker, orders: Iterable[str], open_sampler: Callable[[], Sampler]
) -> None:
    """Obey orders until told to stop; a broken CUDA context raises and ends the process."""
    bench, identified = worker.campaign.bench, False
    for line in orders:
        order = json.loads(line)
        if order["do"] == "stop":
            return
        if order["do"] == "names":
            worker.tell({"end": worker.name_kernels(order["seconds"]), "left": worker.left()})
            continue
        began_s = time.monotonic()
        with open_sampler() as sampler:
            bench.sampler = sampler
            if not identified:
                identified = True
                _identify(worker, sampler)
            counts = worker.measure_slice(
                order["seconds"] - (time.monotonic() - began_s), order["bursts"]
            )
        worker.tell(
            {"end": counts, "left": worker.left(), "errors": worker.campaign.errors.most_common(8)}
        )


def _identify(worker: KernelWorker, sampler: Sampler) -> None:
    """Write which card and which libraries this run has, and take the card's top clock."""
    bench = worker.campaign.bench
    bench.top_clock_hz = sampler.identity.top_clock_hz or 0.0
    torch = getattr(bench.gpu, "torch", None)
    if torch is not None:
        Journal(worker.campaign.out / "runs.jsonl", key="run").append(
            make_torch_run_info(bench.run, sampler.identity, torch)
        )


def warm_kernels(
    gpu: Any,
    tasks: list[EngineTask],
    tell: Callable[[dict[str, Any]], None],
    done: set[str],
    until_s: float,
) -> None:
    """Run operators once before anything is timed, so that their kernels are compiled and cached."""
    seen: set[str] = set()
    for task in tasks:
        if task.spec.id in seen or task.id in done:
            continue
        if time.monotonic() > until_s:
            say("warming: out of time")
            return
        seen.add(task.spec.id)
        tell({"begin": task.id})
        try:
            gpu.run_once(task.spec)
        except Exception as error:
            say(f"warming {task.spec.family}: {type(error).__name__}: {str(error)[:200]}")
            gpu.recover()


def main(arguments: list[str] | None = None) -> int:
    """Open the GPU, report readiness, obey."""
    parser = argparse.ArgumentParser(prog="engine_kernel_worker", description=__doc__)
    parser.add_argument("group", choices=sorted((*GROUPS, *APART)))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--skip", type=Path, default=None)
    parser.add_argument(
        "--warm", default="", help="PART/PARTS: only compile this part of the group's kernels"
    )
    parser.add_argument("--warm-seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    tell = _teller(answers)
    try:
        _work(given, tell)
    except Exception as error:
        tell({"died": f"{type(error).__name__}: {error}"[:300]})
        raise
    return 0


def _work(given: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Import the engine, open the GPU, compile what is compiled at run time, and measure as told."""
    began_s = time.monotonic()
    tasks = list_smoke_tasks(given.group) if given.smoke else list_group_tasks(given.group)
    done = (
        {str(row["id"]) for row in read_lines(given.skip)}
        if given.skip and given.skip.exists()
        else set()
    )

    from engine_kernel_calls import EngineGpu

    _check_engine()
    gpu = EngineGpu.open_group(given.group)
    until_s = time.monotonic() + given.warm_seconds
    if given.warm:
        part, parts = (int(word) for word in given.warm.split("/"))
        warm_kernels(gpu, keep_compiled_tasks(tasks)[part::parts], tell, done, until_s)
        return
    if given.smoke:
        warm_kernels(gpu, tasks, tell, done, until_s)
    else:
        warm_kernels(
            gpu,
            [task for task in tasks if task.spec.family == "engine_compiled"],
            tell,
            done,
            until_s,
        )
    bench = OperatorBench(gpu, Sampler("nvml"), make_run_name(), rule=RULE)
    bench.spinner = try_spinner(gpu.torch)
    campaign = KernelCampaign(bench, given.out, float("inf"))
    worker = KernelWorker(campaign, tasks, done, tell)
    tell(
        {
            "ready": given.group,
            "seconds": round(time.monotonic() - began_s, 1),
            "left": worker.left(),
        }
    )
    obey_orders(worker, sys.stdin, lambda: Sampler("nvml"))


def keep_compiled_tasks(tasks: list[EngineTask]) -> list[EngineTask]:
    """Keep tasks whose kernels Triton or DeepGEMM compile when they first run, sustained ones
    first.
    """
    kept = [
        task
        for task in tasks
        if task.repeat == 0 and task.spec.family in COMPILED_AT_RUN_TIME
        if task.spec.operator.get("kernel") != "cutlass"
    ]
    return sorted(kept, key=lambda task: task.kind is RowKind.BURST)


def _teller(stream: TextIO) -> Callable[[dict[str, Any]], None]:
    def tell(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return tell


def _check_engine() -> None:
    """Import vLLM before the GPU is opened, and say when it is not the version the rows name."""
    import vllm

    if f"vllm-{vllm.__version__}" != ENGINE:
        say(f"WARNING: rows name {ENGINE}, this is vllm {vllm.__version__}")


if __name__ == "__main__":
    raise SystemExit(main())
