"""JSON Lines of a campaign -> the tables that ship: ``rows.parquet`` and ``counters.parquet``.

Each row gets its run's card and library versions and the kernel names of its operator, so that one
table says everything. Rows that failed stay in, with their error and no figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wattcast.errors import BadInput
from wattcast.measure.kernels.counters import read_table as read_counters
from wattcast.records import (
    COUNTERS_FILE,
    ROWS_FILE,
    KernelRow,
    NameRow,
    Plain,
    RunInfo,
    from_plain,
    read_lines,
    write_table,
)

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
    """Pack all ``*.jsonl`` and ``counters.csv`` under ``folders``; returns how many rows of each table."""
    runs: dict[str, RunInfo] = {}
    names: dict[str, NameRow] = {}
    rows: list[KernelRow] = []
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
    if not rows:
        raise BadInput(f"no measured rows under {', '.join(str(folder) for folder in folders)}.")
    counters = [row for folder in folders for path in sorted(folder.rglob("counters.csv")) for row in _counted(path)]
    unique = {(row.id, row.run): row for row in rows}  # a row measured again after a failure replaces it
    packed = [_packed(row, runs.get(row.run), names.get(str(row.detail.get("spec", "")))) for row in unique.values()]
    write_table(out / ROWS_FILE, sorted(packed, key=lambda row: (row["kind"], row["family"], row["id"], row["run"])))
    if counters:
        write_table(out / COUNTERS_FILE, sorted(counters, key=lambda row: str(row["id"])))
    return {"rows": len(packed), "runs": len(runs), "named": len(names), "counters": len(counters)}


def _records(folders: Iterable[Path]) -> Iterable[tuple[Plain, str]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            for number, plain in enumerate(read_lines(path), start=1):
                yield plain, f"{path.name}: line {number}"


def _counted(path: Path) -> Iterable[Plain]:
    for row in read_counters(path.read_text(errors="replace").splitlines()):
        metrics: dict[str, Any] = row.pop("metrics")
        yield {**row, **{name.replace(".", "_"): value for name, value in metrics.items()}}


def _packed(row: KernelRow, run: RunInfo | None, names: NameRow | None) -> Plain:
    plain = asdict(row)
    plain["spec"] = plain["detail"].pop("spec", "")
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
