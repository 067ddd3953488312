"""Collect hardware counters of a sample of operators with Nsight Compute, without clock or cache
control.

``ncu`` runs this package again (``measure counters --target``), which issues each operator once
inside a range named after it. Metrics that the installed ``ncu`` does not know are dropped first.
The counted process watches its own deadline, because ``ncu`` writes its table only when the program
has ended."""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import subprocess
import sys
import time
from collections.abc import (
    Iterable,
    Iterator,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING

from wattcast.core.errors import (
    MissingTool,
    Refused,
    WattcastError,
)
from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import Journal
from wattcast.lab.campaigns.kernel_campaign import read_listed
from wattcast.lab.campaigns.kernel_plan import (
    OperatorSpec,
    read_kernel_plan,
    take_subset,
)

if TYPE_CHECKING:
    from wattcast.lab.campaigns.operator_rows import CampaignGpu

COUNTED = {
    "linear": 34,
    "bmm": 8,
    "conv2d": 14,
    "softmax": 6,
    "layernorm": 5,
    "rmsnorm": 4,
}
COUNTED |= {"elementwise": 20, "attention": 16}
POOL_BYTE = {
    "bf16": 15 * 10**8,
    "fp16": 10**9,
    "fp32": 2 * 10**9,
    "fp8": 5 * 10**8,
}
RANGE = "wattcast:"
FAILURES_BEFORE_STOP = 5


def choose_counted_specs(few: int = 0, listed: str = "") -> list[OperatorSpec]:
    """Choose listed operators, or a sample of every family that is longer than a launch and quick
    to replay.
    """
    if listed:
        return read_listed(Path(listed))[: few or None]
    counts = dict.fromkeys(COUNTED, few) if few else COUNTED
    return take_subset(
        read_kernel_plan(), counts, lambda spec: 3e-6 < spec.guessed_s < 3e-3 and spec.byte < 4e8
    )


def make_ncu_command(
    ncu: str,
    raw: Path,
    metrics: list[str],
) -> list[str]:
    """Return the ``ncu`` command without clock or cache control, with one row a kernel in
    ``raw``.
    """
    text = (
        f"{ncu} --clock-control none --cache-control none --csv --page raw "
        "--print-units base --metrics"
    )
    return [*text.split(), ",".join(metrics), "--log-file", str(raw)]


def find_ncu() -> str:
    """Return the path of ``ncu``; raise ``MissingTool`` where there is none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise MissingTool("Nsight Compute (ncu) is not on the PATH; counters need it.")
    return ncu


def make_collect_command(
    command: list[str],
    raw: Path,
    metric_names: list[str],
) -> None:
    """Run any command once under ``ncu``; ``raw`` gets the ``wanted`` metrics of every kernel it
    launches.
    """
    ncu = find_ncu()
    metrics = keep_known_metrics(metric_names, query_metrics(ncu))
    partial = raw.with_name(raw.name + ".partial")
    ended = subprocess.run(
        [*make_ncu_command(ncu, partial, metrics), *command], check=False, stdout=2
    )
    if ended.returncode != 0 or not partial.exists():
        message = partial.read_text(errors="replace")[-300:] if partial.exists() else ""
        partial.unlink(missing_ok=True)
        raise Refused(f"the command under ncu ended with {ended.returncode}. {message}".strip())
    partial.replace(raw)


def collect_counters(
    out: Path,
    budget_s: float,
    few: int = 0,
    listed: str = "",
) -> dict[str, int]:
    """Run the sample under ``ncu``, keep its raw table, and append one row per kernel to
    ``counters.jsonl``.
    """
    find_ncu()
    # a list that cannot be read is said before anything is started
    choose_counted_specs(few, listed)
    target = ["counters", "--few", str(few), "--plan", listed]
    lines, metrics = run_target(
        out / "counters.csv",
        target,
        read_wanted_metrics(),
        budget_s,
        25.0,
        ("--nvtx",),
    )
    rows = list(read_counter_table(lines))
    journal = Journal(out / "counters.jsonl")
    for row in rows:
        if row["id"] not in journal.ids:
            journal.append(row)
    return {
        "kernels": len(rows),
        "operators": len({row["spec"] for row in rows}),
        "metrics": metrics,
    }


def run_target(
    raw: Path,
    verb: list[str],
    metric_names: list[str],
    budget_s: float,
    write_s: float,
    options: Sequence[str] = (),
) -> tuple[list[str], int]:
    """Run a verb of this package under ``ncu``; return the lines of the table, and how many metrics
    were collected.

    ``write_s`` of the budget is kept back, since ``ncu`` writes its table after the program has
    ended. Where it writes none, there are no lines, and stderr says what went wrong."""
    began_s = time.monotonic()
    ncu = find_ncu()
    raw.parent.mkdir(parents=True, exist_ok=True)
    metrics = keep_known_metrics(metric_names, query_metrics(ncu))
    command = [*make_ncu_command(ncu, raw, metrics), "--profile-from-start", "off", *options]
    command += [
        sys.executable,
        "-m",
        "wattcast.lab",
        *verb,
        "--target",
        "--out",
        str(raw.parent),
    ]
    command += ["--budget", f"{budget_s - (time.monotonic() - began_s) - write_s:.1f}s"]
    try:
        code = subprocess.run(command, timeout=budget_s + 20.0, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    table_text = raw.read_text(errors="replace") if raw.exists() else ""
    if code != 0 or not table_text:
        print(f"ncu ended with {code}. {table_text[-600:]}", file=sys.stderr)
    return table_text.splitlines(), len(metrics)


def read_wanted_metrics() -> list[str]:
    """Read ``name.suffix`` of every row of ``counter_metrics.csv``."""
    rows = read_shipped_table("wattcast.lab.campaigns", "counter_metrics.csv")
    return [row["pattern"] + (f".{row['suffix']}" if row["suffix"] else "") for row in rows]


def query_metrics(ncu: str) -> set[str]:
    """Return the base names of the metrics this ``ncu`` knows for this device; none when it does
    not answer.
    """
    try:
        answer = subprocess.run(
            [ncu, "--query-metrics"],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return set()
    return set(re.findall(r"^([a-z0-9]+__[a-z0-9_]+)\s", answer.stdout, re.MULTILINE))


def keep_known_metrics(metric_names: list[str], available: set[str]) -> list[str]:
    """Drop the metrics that ``known`` lacks; launch facts are always available."""
    if not available:
        return [
            name
            for name in metric_names
            if name.startswith(("gpu__time", "sm__cycles_elapsed", "dram__", "lts__t_bytes"))
        ]
    return [
        name
        for name in metric_names
        if name.startswith("launch__") or name.split(".")[0] in available
    ]


def read_counter_table(lines: Iterable[str]) -> Iterable[Plain]:
    """Read one row per kernel of ``ncu``'s table, with the range it ran in."""
    order: dict[str, int] = {}
    for row, metrics in read_ncu_rows(lines, read_wanted_metrics()):
        text = " ".join(value for value in row.values() if isinstance(value, str))
        if (mark := re.search(re.escape(RANGE) + r"([0-9a-f]{16})", text)) is None:
            continue
        spec = mark[1]
        order[spec] = order.get(spec, -1) + 1
        yield {
            "id": f"{spec}-{order[spec]}",
            "spec": spec,
            "kernel": row.get("Kernel Name", ""),
            "metrics": metrics,
        }


def read_ncu_rows(
    lines: Iterable[str], metric_names: list[str]
) -> Iterator[tuple[dict[str, str], dict[str, float]]]:
    """Yield each kernel of ``ncu --csv --page raw`` with its ``wanted`` metrics, without messages
    and units.
    """
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        metrics = {}
        for name in (name for name in metric_names if name in row):
            with contextlib.suppress(ValueError):  # a metric this kernel does not have
                metrics[name] = float((row[name] or "").replace(",", ""))
        if row.get("ID"):
            yield row, metrics


def count_operators(
    budget_s: float,
    few: int = 0,
    listed: str = "",
) -> int:
    """Run each operator once warm and once counted, under ``ncu``; return how many were counted."""
    from wattcast.lab.campaigns.operator_rows import CampaignGpu

    deadline = time.monotonic() + budget_s
    gpu = CampaignGpu.open(POOL_BYTE)
    counted = failed = 0
    for spec in choose_counted_specs(few, listed):
        if time.monotonic() > deadline or failed >= FAILURES_BEFORE_STOP:
            break
        try:
            count_operator(gpu, spec)
            counted += 1
        except (RuntimeError, WattcastError) as error:
            failed += 1
            print(f"counters: {spec.id} failed: {str(error)[:200]}", file=sys.stderr)
    return counted


def count_operator(gpu: CampaignGpu, spec: OperatorSpec) -> None:
    """Run an operator twice warm, and once in a named range for the profiler."""
    torch = gpu.torch
    profiler = torch.cuda.cudart()
    call = gpu.build(spec)
    call.run(0)
    call.run(1)
    torch.cuda.synchronize()
    profiler.cudaProfilerStart()
    torch.cuda.nvtx.range_push(RANGE + spec.id)
    call.run(2)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
    profiler.cudaProfilerStop()
