"""Pack the JSON Lines of campaigns into the tables of a database, and summarise what a database
holds.

``pack_database`` writes ``rows.parquet``, ``counters.parquet`` and ``chains.parquet``. Power and
clock of a row under the power cap are also its settled ones where its window holds a cycle of the
governor: an H200 runs about 0.7 s a few percent above its limit and then cuts the clock for about
0.3 s. Rows of shorter windows, as they were measured once, got theirs from the raw samples
(``wattcast/lab/campaigns/settle_capped_rows.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core import BadInput, measured_rows, row_journals, row_tables
from wattcast.core.measured_rows import ChainRow, KernelRow, ModelRow, NameRow, Plain, RunInfo
from wattcast.core.whole_files import hold_folder
from wattcast.lab.campaigns.nsight_counters import read_counter_table

CYCLE_TICKS = 10  # of the energy counter, that a cycle of the governor takes
LEAST_PHASES = 6
PACK_WAIT_S = 300.0  # for others that write to the same database
_CARD: tuple[str, ...] = (
    "card_name",
    "card_uuid",
    "card_serial",
    "card_board",
    "driver",
    "cuda",
    "torch",
    "cublas",
)
_CARD += ("cudnn", "power_limit_w", "wattcast")


def pack_database(folders: list[Path], out: Path) -> dict[str, int]:
    """Pack all ``*.jsonl`` and ``counters.csv`` under ``folders``; returns how many rows of each
    table.

    Tables that are in ``out`` already are added to: a row of the same id and run is replaced, the
    rest is kept. One process at a time writes to ``out``; others wait for it."""
    missing = [str(folder) for folder in folders if not folder.exists()]
    if missing:
        raise BadInput(f"no measured rows under {', '.join(missing)}.")
    with hold_folder(out, PACK_WAIT_S):
        return _pack_tables(folders, out)


def _pack_tables(folders: list[Path], out: Path) -> dict[str, int]:
    found: dict[str, list[Any]] = {record: [] for record in measured_rows.RECORDS}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.jsonl"))):
        for number, plain in enumerate(row_journals.read_lines(path), start=1):
            if (kind := measured_rows.RECORDS.get(plain.get("record", ""))) is not None:
                found[plain["record"]].append(
                    measured_rows.row_from_plain(plain, kind, f"{path.name}: line {number}")
                )
    runs: dict[str, RunInfo] = {info.run: info for info in found["run"]}
    # what was measured again after a failure: the later
    rows, models, chains = (
        {(r.id, r.run): r for r in found[kind]} for kind in ("row", "model", "chain")
    )
    if not (rows or models or chains):
        raise BadInput(f"no measured rows under {', '.join(str(folder) for folder in folders)}.")
    whole: dict[str, int] = {}
    for name, latest in ((row_tables.MODELS_FILE, models), (row_tables.CHAINS_FILE, chains)):
        if latest:
            _add_to_table(
                out / name, [_plain_with_card(row, runs) for row in latest.values()], ("id", "run")
            )
            whole[Path(name).stem] = len(latest)
    if models:
        profiles = {kernels.id: kernels for kernels in found["model_kernels"]}
        seen = [_plain_lists(profile) for profile in profiles.values() if not profile.error]
        _add_to_table(out / row_tables.MODEL_KERNELS_FILE, seen, ("id",))
        whole["profiles"] = len(seen)
    if not rows:
        return whole
    names: dict[str, NameRow] = {}
    for named in found["names"]:
        if named.names or named.spec not in names:
            names[named.spec] = named
    packed = [_pack_row(row, runs, names) for row in rows.values()]
    counters = [
        {**row, **{name.replace(".", "_"): value for name, value in row.pop("metrics").items()}}
        for folder in folders
        for path in sorted(folder.rglob("counters.csv"))
        for row in read_counter_table(path.read_text(errors="replace").splitlines())
    ]
    before = _read_earlier_rows(out / row_tables.ROWS_FILE)
    columns = [column for column in (packed or before)[0] if column.startswith("kernel_")]
    known = {
        row["spec"]: {c: row.get(c) or [] for c in columns}
        for row in before
        if row.get("kernel_names")
    }
    packed = [row if row["kernel_names"] else row | known.get(row["spec"], {}) for row in packed]
    everything = [*({"chosen": "plan", **row} for row in before), *packed]
    together = {(row["id"], row["run"]): row for row in everything}
    order = sorted(
        together.values(), key=lambda row: (row["kind"], row["family"], row["id"], row["run"])
    )
    row_tables.write_table(out / row_tables.ROWS_FILE, order)
    if counters:
        _add_to_table(out / row_tables.COUNTERS_FILE, counters, ("id",))
    return {
        "rows": len(packed),
        "runs": len(runs),
        "named": len(names),
        "counters": len(counters),
        "kept": len(together) - len(packed),
        **whole,
    }


def _add_to_table(path: Path, rows: list[Plain], key: tuple[str, ...]) -> None:
    """Add rows to a table, in place of those with the same key, sorted by it; an empty table is not
    written.
    """
    together = {
        tuple(str(row[name]) for name in key): row for row in [*_read_earlier_rows(path), *rows]
    }
    if together:
        row_tables.write_table(path, [together[name] for name in sorted(together)])


def _plain_with_card(row: KernelRow | ModelRow | ChainRow, runs: Mapping[str, RunInfo]) -> Plain:
    info = asdict(runs[row.run]) if row.run in runs else {}
    return _plain_lists(row) | {name: info.get(name) for name in _CARD}


def _plain_lists(row: KernelRow | ModelRow | ChainRow | measured_rows.ModelKernels) -> Plain:
    """Return the row as a mapping with lists in place of tuples, as a table holds them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(row).items()
    }


def _read_earlier_rows(path: Path) -> list[Plain]:
    """Return the rows of a table that is there already; none when it is not."""
    return row_tables.read_table(path) if path.exists() else []


def find_phases(period_s: float) -> int:
    """Count the parts of a period that samples 20 ms apart see; 50 when practically all.

    >>> find_phases(0.05), find_phases(0.01236)
    (5, 50)
    """
    turn = 0.02 / period_s
    return next((n for n in range(1, 50) if abs(n * turn - round(n * turn)) < 0.01), 50)


def make_workload_form(operator: Plain) -> Plain:
    """Return the operator as a workload file writes it: an elementwise one is named by its
    function.
    """
    if operator.get("op") != "elementwise":
        return operator
    return {
        "op": operator["function"],
        **{k: v for k, v in operator.items() if k not in ("op", "function")},
    }


def _pack_row(row: KernelRow, runs: Mapping[str, RunInfo], names: Mapping[str, NameRow]) -> Plain:
    """Return a row as the table holds it, with its card and its kernels.

    A duty cycle whose period beats with the board's sampling sees only a few parts of it and is
    flagged."""
    if row.kind == "duty" and row.period_s and find_phases(row.period_s) < LEAST_PHASES:
        row = replace(row, flags=(*row.flags, "period_beats_with_sensor"))
    capped = row.kind == "sustained" and not row.error and "sw_power_cap" in row.throttle
    if capped and row.power_w and row.sm_clock_hz is not None and (row.ticks or 0) >= CYCLE_TICKS:
        row = replace(
            row,
            settled_power_w=row.power_w,
            settled_clock_hz=row.sm_clock_hz,
            settled_ticks=row.ticks,
        )
    plain = _plain_with_card(row, runs)
    plain["spec"] = plain["detail"].pop("spec", "")
    plain["operator"] = make_workload_form(row.operator)
    named = names.get(str(plain["spec"]), NameRow(""))
    return plain | {
        "kernel_names": list(named.names),
        "kernel_grids": [list(grid) for grid in named.grids],
        "kernel_blocks": [list(block) for block in named.blocks],
        "kernel_s": list(named.kernel_s),
        "kernel_registers": list(named.registers),
        "kernel_shared_byte": list(named.shared_byte),
    }


@dataclass(frozen=True)
class ChainExtra:
    """One chain: its operators and kernels, its own latency and that of its members together."""

    name: str
    operators: int
    kernels: int | None  # None: the kernels of some member were not named
    chain_s: float
    alone_s: float

    @property
    def per_node_s(self) -> float:
        """Extra time a kernel, or an operator where kernels are not known."""
        return (self.chain_s - self.alone_s) / (self.kernels or self.operators)


def find_chain_extras(chains: Sequence[Plain], rows: Sequence[Plain]) -> list[ChainExtra]:
    """List every chain that can be compared with its members; ``rows`` give the kernels' names."""
    launches = {row["spec"]: len(row["kernel_names"]) for row in rows if row.get("kernel_names")}
    found = []
    for chain in chains:
        specs = list(chain.get("specs") or ())
        alone = list(chain.get("alone_s") or ())
        if (
            chain.get("error")
            or chain.get("flags")
            or not chain.get("latency_s")
            or len(alone) != len(specs)
        ):
            continue
        known = all(spec in launches for spec in specs)
        kernels = sum(launches[spec] for spec in specs) if known else None
        found.append(
            ChainExtra(
                chain["name"], len(specs), kernels, float(chain["latency_s"]), float(sum(alone))
            )
        )
    return found


def summarise_chains(chains: Sequence[Plain], rows: Sequence[Plain]) -> Plain:
    """Summarise the extra time per kernel over all chains and by part of a layer."""
    found = find_chain_extras(chains, rows)
    parts: dict[str, list[ChainExtra]] = {}
    for extra in found:
        parts.setdefault(extra.name.partition(" ")[0], []).append(extra)
    return {"all": _chain_spread(found)} | {
        part: _chain_spread(some) for part, some in sorted(parts.items())
    }


def _chain_spread(some: Sequence[ChainExtra]) -> dict[str, float]:
    if not some:
        return {"chains": 0}
    per_node = np.array([extra.per_node_s for extra in some])
    return {
        "chains": len(some),
        "mean_s": float(per_node.mean()),
        "median_s": float(np.median(per_node)),
        "p10_s": float(np.quantile(per_node, 0.1)),
        "p90_s": float(np.quantile(per_node, 0.9)),
        "share_of_chain": float(np.mean([1.0 - extra.alone_s / extra.chain_s for extra in some])),
    }


FAMILIES = (
    "linear",
    "bmm",
    "conv2d",
    "attention",
    "softmax",
    "layernorm",
    "rmsnorm",
    "elementwise",
)


def summarise_database(database: Path) -> Plain:
    """Count the rows of a database folder (or of its ``rows.parquet``) and compute their
    repeatability.
    """
    folder = database if database.is_dir() else database.parent
    rows = row_tables.read_table(folder / row_tables.ROWS_FILE)
    files = (row_tables.COUNTERS_FILE, row_tables.CHAINS_FILE)
    counters, chains = (_read_earlier_rows(folder / file) for file in files)
    good = [row for row in rows if not row["error"]]
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, family), count in sorted(
        Counter((row["kind"], row["family"]) for row in good).items()
    ):
        by_kind.setdefault(kind, {})[family] = count
    data: dict[str, set[str]] = {}  # that operators were sustained on
    for row in good:
        if row["kind"] == "sustained":
            data.setdefault(row["spec"], set()).add(row["data"])
    duty = Counter(row["spec"] for row in good if row["kind"] == "duty")
    beats = (
        row["spec"]
        for row in good
        if row["kind"] == "duty" and "period_beats_with_sensor" in row["flags"]
    )
    clean = duty - Counter(beats)
    return {
        "database": folder.name,
        "cards": sorted(
            {f"{row['card_name']} {row['card_uuid']}" for row in rows if row["card_uuid"]}
        ),
        "rows": by_kind,
        "failed": len(rows) - len(good),
        "flagged": dict(Counter(flag for row in good for flag in row["flags"])),
        "kernels": {
            "duty-cycled at three duties": sum(count >= 3 for count in duty.values()),
            "of these with a period that does not beat with the sensor": sum(
                n >= 3 for n in clean.values()
            ),
            "with data patterns": sum(
                {"random", "zeros", "ones", "relu"} <= seen for seen in data.values()
            ),
            "with counters": len({row["spec"] for row in counters}),
            "with names": len({row["spec"] for row in good if row["kernel_names"]}),
        },
        "repeatability": {
            "within a run": _summarise_repeats(good, lambda run, card: run),
            "between runs of one card": _summarise_repeats(
                good, lambda run, card: not run and card
            ),
            "between cards": _summarise_repeats(good, lambda run, card: not card),
        },
        **({"chains": summarise_chains(chains, good)} if chains else {}),
    }


def make_summary_page(summary: Plain) -> str:
    """Write the summary as Markdown, as the database's README shows it."""
    kinds = summary["rows"]
    families = [f for f in (*FAMILIES, "idle") if any(f in counts for counts in kinds.values())]
    rows = [
        [family, *(str(counts.get(family, 0)) for counts in kinds.values())] for family in families
    ]
    rows.append(["all", *(str(sum(counts.values())) for counts in kinds.values())])
    flags = (
        ", ".join(f"{flag} {count}" for flag, count in sorted(summary["flagged"].items())) or "none"
    )
    said = [f"Rows that failed: {summary['failed']}. Flags: {flags}."]
    said += [f"Kernels {what}: {count}." for what, count in summary["kernels"].items()]
    repeats = [["repeatability", "quantity", "pairs", "median", "90th percentile"]]
    for where, quantities in summary["repeatability"].items():
        for quantity, seen in quantities.items():
            shares = [
                f"{100 * seen[name]:.2f} %" if seen["pairs"] else "-" for name in ("median", "p90")
            ]
            repeats.append([where, quantity, str(seen["pairs"]), *shares])
    parts = [
        make_pipe_table([["family", *kinds], *rows]),
        "\n".join(said),
        make_pipe_table(repeats),
    ]
    if "chains" in summary:
        chains = [["chains", "number", "extra a kernel, mean", "median", "10th to 90th percentile"]]
        for part, seen in summary["chains"].items():
            if seen["chains"]:
                mean, median, low, high = (
                    f"{1e6 * seen[f'{name}_s']:.2f}" for name in ("mean", "median", "p10", "p90")
                )
                chains.append(
                    [part, str(seen["chains"]), f"{mean} us", f"{median} us", f"{low} to {high} us"]
                )
        parts.append(make_pipe_table(chains))
    return "\n\n".join(parts) + "\n"


def make_pipe_table(rows: list[list[str]]) -> str:
    """Write a table as Markdown; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _summarise_repeats(
    rows: list[Plain], wanted: Callable[[bool, bool], bool]
) -> dict[str, dict[str, float]]:
    """Compare rows of one operator and data without flags, two by two, where ``wanted(same run,
    same card)``.

    A window that never came to rest under the cap is flagged, and has a settled power all the same:
    power is compared again with the settled one in place of the window's."""
    plain = [row for row in rows if not row["flags"]]
    own = [(row, row.get("settled_power_w")) for row in rows]
    settled = [
        row | {"power_w": own_w} if own_w else row
        for row, own_w in own
        if not set(row["flags"]) - ({"unsettled"} if own_w else set())
    ]
    compared = {
        "latency, burst": (plain, "burst", "latency_s"),
        "latency, sustained": (plain, "sustained", "latency_s"),
        "power, sustained, one window": (plain, "sustained", "power_w"),
        "power, sustained, settled where capped": (settled, "sustained", "power_w"),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (some, kind, column) in compared.items():
        groups: dict[tuple[str, str], list[Plain]] = {}
        for row in some:
            if row["kind"] == kind and row[column]:
                groups.setdefault((row["spec"], row["data"]), []).append(row)
        pairs = [pair for held in groups.values() for pair in combinations(held, 2)]
        off = [
            abs(a[column] - b[column]) / (0.5 * (a[column] + b[column]))
            for a, b in pairs
            if wanted(a["run"] == b["run"], a["card_uuid"] == b["card_uuid"])
        ]
        spread = (
            {"median": float(np.median(off)), "p90": float(np.percentile(off, 90))} if off else {}
        )
        found[name] = {"pairs": len(off), **spread}
    return found
