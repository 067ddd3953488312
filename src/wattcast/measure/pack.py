"""JSON Lines of a campaign -> the tables that ship: ``rows.parquet``, ``counters.parquet``, ``chains.parquet``.

Each row gets its run's card and library versions and the kernel names of its operator, so that one
table says everything. Capped rows get their settled power from the raw samples of their run, where
those were kept. Rows that failed stay in, with their error and no figures. ``operator`` is written as a
workload file has it, so that a row turns into an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput
from wattcast.measure.kernels.capped import Settled, settle
from wattcast.measure.kernels.counters import read_table as read_counters
from wattcast.measure.samples import Samples
from wattcast.records import (
    CHAINS_FILE,
    COUNTERS_FILE,
    MODEL_KERNELS_FILE,
    MODELS_FILE,
    ROWS_FILE,
    ChainRow,
    KernelRow,
    ModelKernels,
    ModelRow,
    NameRow,
    Plain,
    RunInfo,
    from_plain,
    read_lines,
    read_table,
    write_table,
)

LEAST_PHASES = 6
_CARD = (
    "card_name",
    "card_uuid",
    "card_serial",
    "driver",
    "cuda",
    "torch",
    "cublas",
    "cudnn",
    "power_limit_w",
    "wattcast",
)


def pack(folders: list[Path], out: Path) -> dict[str, int]:
    """Pack all ``*.jsonl`` and ``counters.csv`` under ``folders``; returns how many rows of each table.

    Tables that are in ``out`` already are added to: a row of the same id and run is replaced, the rest is kept.
    """
    runs: dict[str, RunInfo] = {}
    names: dict[str, NameRow] = {}
    rows: list[KernelRow] = []
    models: dict[tuple[str, str], ModelRow] = {}
    profiles: dict[str, ModelKernels] = {}
    chains: dict[tuple[str, str], ChainRow] = {}
    for plain, where in _records(folders):
        match plain.get("record"):
            case "run":
                info = from_plain(plain, RunInfo, where)
                runs[info.run] = info
            case "names":
                found = from_plain(plain, NameRow, where)
                if found.names or found.spec not in names:
                    names[found.spec] = found
            case "row":
                rows.append(from_plain(plain, KernelRow, where))
            case "model":
                model = from_plain(plain, ModelRow, where)
                models[model.id, model.run] = model
            case "model_kernels":
                kernels = from_plain(plain, ModelKernels, where)
                profiles[kernels.id] = kernels
            case "chain":
                chain = from_plain(plain, ChainRow, where)
                chains[chain.id, chain.run] = chain
    whole = _pack_models(list(models.values()), list(profiles.values()), runs, out)
    whole |= _pack_chains(list(chains.values()), runs, out)
    if whole and not rows:
        return whole
    if not rows:
        raise BadInput(f"no measured rows under {', '.join(str(folder) for folder in folders)}.")
    unique = list({(row.id, row.run): row for row in rows}.values())  # measured again after a failure: the later
    unique = [_flag_beats(row) for row in _settle(unique, folders)]
    packed = [_packed(row, runs.get(row.run), names.get(str(row.detail.get("spec", "")))) for row in unique]
    counters = [row for folder in folders for path in sorted(folder.rglob("counters.csv")) for row in _counted(path)]
    before = _before(out / ROWS_FILE)
    everything = [*({"chosen": "plan", **row} for row in before), *_known_names(packed, before)]
    together = {(row["id"], row["run"]): row for row in everything}
    order = sorted(together.values(), key=lambda row: (row["kind"], row["family"], row["id"], row["run"]))
    write_table(out / ROWS_FILE, order)
    if counters:
        counted = {str(row["id"]): row for row in [*_before(out / COUNTERS_FILE), *counters]}
        write_table(out / COUNTERS_FILE, [counted[key] for key in sorted(counted)])
    return {
        "rows": len(packed),
        "runs": len(runs),
        "named": len(names),
        "counters": len(counters),
        "kept": len(together) - len(packed),
        **whole,
    }


def _pack_models(
    models: list[ModelRow], profiles: list[ModelKernels], runs: Mapping[str, RunInfo], out: Path
) -> dict[str, int]:
    """Whole-model rows, each with its card, and the kernels of their iterations, into tables of their own."""
    if not models:
        return {}
    packed = []
    for row in models:
        info = asdict(runs[row.run]) if row.run in runs else {}
        lists = {"throttle": list(row.throttle), "flags": list(row.flags)}
        packed.append(asdict(row) | lists | {name: info.get(name) for name in _CARD})
    together = {(row["id"], row["run"]): row for row in [*_before(out / MODELS_FILE), *packed]}
    write_table(out / MODELS_FILE, [together[key] for key in sorted(together)])
    lists_of = ("names", "order", "kernel_s")
    seen = [asdict(p) | {name: list(getattr(p, name)) for name in lists_of} for p in profiles if not p.error]
    kernels = {row["id"]: row for row in [*_before(out / MODEL_KERNELS_FILE), *seen]}
    if kernels:
        write_table(out / MODEL_KERNELS_FILE, [kernels[key] for key in sorted(kernels)])
    return {"models": len(packed), "profiles": len(seen)}


def _pack_chains(chains: list[ChainRow], runs: Mapping[str, RunInfo], out: Path) -> dict[str, int]:
    """Chains of operators, each with its card, into a table of their own."""
    if not chains:
        return {}
    packed = []
    for row in chains:
        info = asdict(runs[row.run]) if row.run in runs else {}
        lists = {name: list(getattr(row, name)) for name in ("specs", "alone_s", "operators", "flags")}
        packed.append(asdict(row) | lists | {name: info.get(name) for name in _CARD})
    together = {(row["id"], row["run"]): row for row in [*_before(out / CHAINS_FILE), *packed]}
    write_table(out / CHAINS_FILE, [together[key] for key in sorted(together)])
    return {"chains": len(packed)}


def _before(path: Path) -> list[Plain]:
    """Rows of a table that is there already; none when it is not."""
    return read_table(path) if path.exists() else []


def _known_names(packed: list[Plain], before: list[Plain]) -> list[Plain]:
    """New rows of an operator whose kernels were named earlier get those names."""
    columns = [column for column in (packed or before)[0] if column.startswith("kernel_")]
    known = {row["spec"]: {c: row.get(c) or [] for c in columns} for row in before if row.get("kernel_names")}
    return [row if row["kernel_names"] else row | known.get(row["spec"], {}) for row in packed]


def _records(folders: Iterable[Path]) -> Iterable[tuple[Plain, str]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            for number, plain in enumerate(read_lines(path), start=1):
                yield plain, f"{path.name}: line {number}"


def _counted(path: Path) -> Iterable[Plain]:
    for row in read_counters(path.read_text(errors="replace").splitlines()):
        metrics: dict[str, Any] = row.pop("metrics")
        yield {**row, **{name.replace(".", "_"): value for name, value in metrics.items()}}


def _settle(rows: list[KernelRow], folders: Iterable[Path]) -> list[KernelRow]:
    """Capped rows with their settled figures, for every run whose samples were kept."""
    kept = {path.stem.removeprefix("samples-"): path for folder in folders for path in folder.rglob("samples-*.npz")}
    found: dict[tuple[str, str], Settled] = {}
    for run, path in kept.items():
        settled = settle([row for row in rows if row.run == run], Samples.load(path))
        found |= {(row_id, run): figures for row_id, figures in settled.items()}
    return [_with_settled(row, found.get((row.id, row.run))) for row in rows]


def _with_settled(row: KernelRow, found: Settled | None) -> KernelRow:
    if found is None:
        return row
    power_w, clock_hz = found.power_w, found.sm_clock_hz
    return replace(row, settled_power_w=power_w, settled_clock_hz=clock_hz, settled_ticks=found.ticks)


def _flag_beats(row: KernelRow) -> KernelRow:
    """Duty cycles whose period beats with the board's sampling see only a few parts of it: flagged."""
    if row.kind != "duty" or not row.period_s or phases(row.period_s) >= LEAST_PHASES:
        return row
    return replace(row, flags=(*row.flags, "period_beats_with_sensor"))


def phases(period_s: float, sample_s: float = 0.02, most: int = 50) -> int:
    """How many parts of a period are seen by samples ``sample_s`` apart; ``most`` when practically all.

    >>> phases(0.05), phases(0.01236)
    (5, 50)
    """
    turn = sample_s / period_s
    return next((n for n in range(1, most) if abs(n * turn - round(n * turn)) < 0.01), most)


def workload_form(operator: Plain) -> Plain:
    """The operator as a workload file has it: an elementwise one is named by its function."""
    if operator.get("op") != "elementwise":
        return operator
    return {"op": operator["function"], **{k: v for k, v in operator.items() if k not in ("op", "function")}}


def _packed(row: KernelRow, run: RunInfo | None, names: NameRow | None) -> Plain:
    plain = asdict(row)
    plain["spec"] = plain["detail"].pop("spec", "")
    plain["operator"] = workload_form(row.operator)
    plain["throttle"], plain["flags"] = list(row.throttle), list(row.flags)
    info = asdict(run) if run else {}
    plain |= {name: info.get(name) for name in _CARD}
    plain["kernel_names"] = list(names.names) if names else []
    plain["kernel_grids"] = [list(grid) for grid in names.grids] if names else []
    plain["kernel_blocks"] = [list(block) for block in names.blocks] if names else []
    plain["kernel_s"] = list(names.kernel_s) if names else []
    plain["kernel_registers"] = list(names.registers) if names else []
    plain["kernel_shared_byte"] = list(names.shared_byte) if names else []
    return plain
