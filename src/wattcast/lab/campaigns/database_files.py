"""Pack the JSON Lines of campaigns into the tables of a database, and summarise what a database
holds.

``pack_database`` writes ``rows.parquet``, ``counters.parquet`` and ``chains.parquet``. Power and
clock of a row under the power cap are also its settled ones where its window holds a cycle of the
governor: an H200 runs about 0.7 s a few percent above its limit and then cuts the clock for about
0.3 s. Rows of shorter windows, as they were measured once, got theirs from the raw samples
(``wattcast/lab/campaigns/settle_capped_rows.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import (
    asdict,
    dataclass,
    replace,
)
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core import (
    BadInput,
    measured_rows,
    row_journals,
    row_tables,
)
from wattcast.core.measured_rows import (
    ChainRow,
    KernelRow,
    ModelRow,
    NameRow,
    Plain,
    RunInfo,
)
from wattcast.core.whole_files import hold_folder
from wattcast.lab.campaigns.nsight_counters import read_counter_table

CYCLE_TICKS = 10  # of the energy counter, that a cycle of the governor takes
LEAST_PHASES = 6
PACK_WAIT_S = 300.0  # for others that write to the same database
_CARD = (
    "card_name",
    "card_uuid",
    "card_serial",
    "card_board",
    "driver",
    "cuda",
    "torch",
    "cublas",
    "cudnn",
    "power_limit_w",
    "wattcast",
)


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
    """Add the rows of folders to the tables in ``out``; return how many of each were added."""
    records = _read_records(folders)
    runs: dict[str, RunInfo] = {info.run: info for info in records["run"]}
    rows = _keep_latest(records["row"])
    models = _keep_latest(records["model"])
    chains = _keep_latest(records["chain"])
    if not (rows or models or chains):
        raise BadInput(f"no measured rows under {', '.join(map(str, folders))}.")
    counts: dict[str, int] = {}
    for name, latest in ((row_tables.MODELS_FILE, models), (row_tables.CHAINS_FILE, chains)):
        if latest:
            plain_rows = [_plain_with_card(row, runs) for row in latest]
            _add_to_table(out / name, plain_rows, ("id", "run"))
            counts[Path(name).stem] = len(latest)
    if models:
        counts["profiles"] = _pack_profiles(records["model_kernels"], out)
    if not rows:
        return counts
    names = _keep_named(records["names"])
    packed = [_pack_row(row, runs, names) for row in rows]
    earlier = _write_rows(packed, out / row_tables.ROWS_FILE)
    counters = _read_counters(folders)
    if counters:
        _add_to_table(out / row_tables.COUNTERS_FILE, counters, ("id",))
    return {
        "rows": len(packed),
        "runs": len(runs),
        "named": len(names),
        "counters": len(counters),
        "kept": earlier,
        **counts,
    }


def _pack_profiles(profiles: list[measured_rows.ModelKernels], out: Path) -> int:
    """Add the latest profile of each model that did not fail; return how many."""
    latest = {profile.id: profile for profile in profiles}
    plain_profiles = [_plain_lists(profile) for profile in latest.values() if not profile.error]
    _add_to_table(out / row_tables.MODEL_KERNELS_FILE, plain_profiles, ("id",))
    return len(plain_profiles)


def _keep_named(name_rows: list[NameRow]) -> dict[str, NameRow]:
    """Return the latest row of names of each operator, one without names only where no other is
    there.

    Rows of kernels take their names from those of the same operator."""
    names: dict[str, NameRow] = {}
    for row in name_rows:
        if row.names or row.spec not in names:
            names[row.spec] = row
    return names


def _read_records(folders: list[Path]) -> dict[str, list[Any]]:
    """Return all rows of all journals by the kind of their record."""
    records: dict[str, list[Any]] = {}
    for record in measured_rows.RECORDS:
        records[record] = []
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            for number, plain in enumerate(row_journals.read_lines(path), start=1):
                record = plain.get("record", "")
                kind = measured_rows.RECORDS.get(record)
                if kind is not None:
                    place = f"{path.name}: line {number}"
                    records[record].append(measured_rows.row_from_plain(plain, kind, place))
    return records


def _keep_latest(rows: list[Any]) -> list[Any]:
    """Return the latest row of each operator and run: it was measured again after a failure."""
    latest = {(row.id, row.run): row for row in rows}
    return list(latest.values())


def _read_counters(folders: list[Path]) -> list[Plain]:
    """Return the rows of all counter tables, with a column for each metric."""
    counters = []
    for folder in folders:
        for path in sorted(folder.rglob("counters.csv")):
            lines = path.read_text(errors="replace").splitlines()
            for row in read_counter_table(lines):
                columns = dict(row)
                for name, value in row["metrics"].items():
                    columns[name.replace(".", "_")] = value
                counters.append(columns)
    return counters


def _write_rows(packed: list[Plain], path: Path) -> int:
    """Write rows of kernels with those of the table before; return how many of these stay.

    A row without kernel names takes those of its operator in the table before.
    """
    before = _read_earlier_rows(path)
    columns = [column for column in (packed or before)[0] if column.startswith("kernel_")]
    named: dict[str, Plain] = {}
    for row in before:
        if row.get("kernel_names"):
            kernels = named.setdefault(row["spec"], {})
            for column in columns:
                kernels[column] = row.get(column) or []
    rows: dict[tuple[str, str], Plain] = {}
    for row in before:
        rows[row["id"], row["run"]] = {"chosen": "plan", **row}
    for row in packed:
        complete = row if row["kernel_names"] else row | named.get(row["spec"], {})
        rows[row["id"], row["run"]] = complete
    order = sorted(rows.values(), key=lambda r: (r["kind"], r["family"], r["id"], r["run"]))
    row_tables.write_table(path, order)
    return len(rows) - len(packed)


def _add_to_table(
    path: Path,
    rows: list[Plain],
    key: tuple[str, ...],
) -> None:
    """Add rows to a table, in place of those with the same key, sorted by it; an empty table is not
    written.
    """
    row_of_key: dict[tuple[str, ...], Plain] = {}
    for row in (*_read_earlier_rows(path), *rows):
        row_of_key[tuple(str(row[name]) for name in key)] = row
    if row_of_key:
        sorted_keys = sorted(row_of_key)
        row_tables.write_table(path, [row_of_key[row_key] for row_key in sorted_keys])


def _plain_with_card(row: KernelRow | ModelRow | ChainRow, runs: Mapping[str, RunInfo]) -> Plain:
    info = asdict(runs[row.run]) if row.run in runs else {}
    return _plain_lists(row) | {name: info.get(name) for name in _CARD}


def _plain_lists(row: KernelRow | ModelRow | ChainRow | measured_rows.ModelKernels) -> Plain:
    """Return the row as a mapping with lists in place of tuples, as a table holds them."""
    plain = asdict(row)
    for name, value in plain.items():
        if isinstance(value, tuple):
            plain[name] = list(value)
    return plain


def _read_earlier_rows(path: Path) -> list[Plain]:
    """Return the rows of a table that is there already; none when it is not."""
    return row_tables.read_table(path) if path.exists() else []


def find_phases(period_s: float) -> int:
    """Count the parts of a period that samples 20 ms apart see; 50 when practically all.

    >>> find_phases(0.05), find_phases(0.01236)
    (5, 50)
    """
    periods = 0.02 / period_s  # between two samples
    for samples in range(1, 50):
        passed = samples * periods
        if abs(passed - round(passed)) < 0.01:
            return samples
    return 50


def make_workload_form(operator: Plain) -> Plain:
    """Return the operator as a workload file writes it: an elementwise one is named by its
    function.
    """
    if operator.get("op") != "elementwise":
        return operator
    settings = dict(operator)
    del settings["op"]
    return {"op": settings.pop("function"), **settings}


def _pack_row(
    row: KernelRow,
    runs: Mapping[str, RunInfo],
    names: Mapping[str, NameRow],
) -> Plain:
    """Return a row as the table holds it, with its card and its kernels.

    A duty cycle whose period beats with the board's sampling sees only a few parts of it and is
    flagged."""
    if row.kind == "duty" and row.period_s and find_phases(row.period_s) < LEAST_PHASES:
        row = replace(row, flags=(*row.flags, "period_beats_with_sensor"))
    is_capped = row.kind == "sustained" and not row.error and "sw_power_cap" in row.throttle
    is_measured = bool(row.power_w) and row.sm_clock_hz is not None
    if is_capped and is_measured and (row.ticks or 0) >= CYCLE_TICKS:
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
        "kernel_grids": list(map(list, named.grids)),
        "kernel_blocks": list(map(list, named.blocks)),
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
    named_rows = [row for row in rows if row.get("kernel_names")]
    launches = {row["spec"]: len(row["kernel_names"]) for row in named_rows}
    extras = []
    for chain in chains:
        specs = list(chain.get("specs") or ())
        alone_s = list(chain.get("alone_s") or ())
        is_good = not chain.get("error") and not chain.get("flags") and chain.get("latency_s")
        if not is_good or len(alone_s) != len(specs):
            continue
        kernels = None
        if all(spec in launches for spec in specs):
            kernels = sum(launches[spec] for spec in specs)
        extras.append(
            ChainExtra(
                chain["name"],
                len(specs),
                kernels,
                float(chain["latency_s"]),
                float(sum(alone_s)),
            )
        )
    return extras


def summarise_chains(chains: Sequence[Plain], rows: Sequence[Plain]) -> Plain:
    """Summarise the extra time per kernel over all chains and by part of a layer."""
    extras = find_chain_extras(chains, rows)
    parts: dict[str, list[ChainExtra]] = {}
    for extra in extras:
        parts.setdefault(extra.name.partition(" ")[0], []).append(extra)
    spreads: Plain = {"all": _chain_spread(extras)}
    for part, part_extras in sorted(parts.items()):
        spreads[part] = _chain_spread(part_extras)
    return spreads


def _chain_spread(some: Sequence[ChainExtra]) -> dict[str, float]:
    if not some:
        return {"chains": 0}
    per_node = np.array([extra.per_node_s for extra in some])
    member_shares = np.array([extra.alone_s / extra.chain_s for extra in some])
    return {
        "chains": len(some),
        "mean_s": float(per_node.mean()),
        "median_s": float(np.median(per_node)),
        "p10_s": float(np.quantile(per_node, 0.1)),
        "p90_s": float(np.quantile(per_node, 0.9)),
        "share_of_chain": float(np.mean(1.0 - member_shares)),
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
    counters = _read_earlier_rows(folder / row_tables.COUNTERS_FILE)
    chains = _read_earlier_rows(folder / row_tables.CHAINS_FILE)
    good = [row for row in rows if not row["error"]]
    with_card = [row for row in rows if row["card_uuid"]]
    cards = {f"{row['card_name']} {row['card_uuid']}" for row in with_card}
    summary: Plain = {
        "database": folder.name,
        "cards": sorted(cards),
        "rows": _count_kinds(good),
        "failed": len(rows) - len(good),
        "flagged": dict(Counter(flag for row in good for flag in row["flags"])),
        "kernels": {
            **_count_duties(good),
            "with data patterns": _count_patterns(good),
            "with counters": _count_operators(counters),
            "with names": _count_operators(row for row in good if row["kernel_names"]),
        },
        "repeatability": {
            "within a run": _summarise_repeats(good, lambda same_run, same_card: same_run),
            "between runs of one card": _summarise_repeats(
                good, lambda same_run, same_card: same_card and not same_run
            ),
            "between cards": _summarise_repeats(good, lambda same_run, same_card: not same_card),
        },
    }
    if chains:
        summary["chains"] = summarise_chains(chains, good)
    return summary


def _count_operators(rows: Iterable[Plain]) -> int:
    return len({row["spec"] for row in rows})


def _count_kinds(rows: list[Plain]) -> dict[str, dict[str, int]]:
    """Count rows by kind and family."""
    counts = Counter((row["kind"], row["family"]) for row in rows)
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, family), count in sorted(counts.items()):
        by_kind.setdefault(kind, {})[family] = count
    return by_kind


def _count_duties(rows: list[Plain]) -> dict[str, int]:
    """Count operators that were measured at three duties, and at three that the sensor sees."""
    duty_rows = [row for row in rows if row["kind"] == "duty"]
    seen_rows = [row for row in duty_rows if "period_beats_with_sensor" not in row["flags"]]
    return {
        "duty-cycled at three duties": _count_three_times(duty_rows),
        "of these with a period that does not beat with the sensor": _count_three_times(seen_rows),
    }


def _count_three_times(rows: list[Plain]) -> int:
    """Count operators that have three rows or more."""
    counts = Counter(row["spec"] for row in rows)
    return sum(count >= 3 for count in counts.values())


def _count_patterns(rows: list[Plain]) -> int:
    """Count operators that were sustained on four patterns of data."""
    data: dict[str, set[str]] = {}
    for row in rows:
        if row["kind"] == "sustained":
            data.setdefault(row["spec"], set()).add(row["data"])
    return sum({"random", "zeros", "ones", "relu"} <= patterns for patterns in data.values())


def make_summary_page(summary: Plain) -> str:
    """Write the summary as Markdown, as the database's README shows it."""
    flags = "none"
    if summary["flagged"]:
        flag_counts = sorted(summary["flagged"].items())
        flags = ", ".join(f"{flag} {count}" for flag, count in flag_counts)
    sentences = [f"Rows that failed: {summary['failed']}. Flags: {flags}."]
    for what, count in summary["kernels"].items():
        sentences.append(f"Kernels {what}: {count}.")
    parts = [
        make_pipe_table(_list_families(summary["rows"])),
        "\n".join(sentences),
        make_pipe_table(_list_repeats(summary["repeatability"])),
    ]
    if "chains" in summary:
        parts.append(make_pipe_table(_list_chains(summary["chains"])))
    return "\n\n".join(parts) + "\n"


def _list_families(kinds: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return a table of how many rows there are by family and kind."""
    rows = [["family", *kinds]]
    for family in (*FAMILIES, "idle"):
        family_counts = [counts.get(family, 0) for counts in kinds.values()]
        if any(family_counts):
            rows.append([family, *map(str, family_counts)])
    totals = [sum(counts.values()) for counts in kinds.values()]
    rows.append(["all", *map(str, totals)])
    return rows


def _list_repeats(repeatability: Mapping[str, Mapping[str, Plain]]) -> list[list[str]]:
    """Return a table of how far two measurements of one operator lie apart."""
    rows = [["repeatability", "quantity", "pairs", "median", "90th percentile"]]
    for where, quantities in repeatability.items():
        for quantity, spread in quantities.items():
            median = "-"
            p90 = "-"
            if spread["pairs"]:
                median = f"{100 * spread['median']:.2f} %"
                p90 = f"{100 * spread['p90']:.2f} %"
            rows.append([where, quantity, str(spread["pairs"]), median, p90])
    return rows


def _list_chains(chains: Mapping[str, Plain]) -> list[list[str]]:
    """Return a table of the extra time that kernels take in chains."""
    rows = [["chains", "number", "extra a kernel, mean", "median", "10th to 90th percentile"]]
    for part, extra in chains.items():
        if extra["chains"]:
            rows.append(
                [
                    part,
                    str(extra["chains"]),
                    f"{1e6 * extra['mean_s']:.2f} us",
                    f"{1e6 * extra['median_s']:.2f} us",
                    f"{1e6 * extra['p10_s']:.2f} to {1e6 * extra['p90_s']:.2f} us",
                ]
            )
    return rows


def make_pipe_table(rows: list[list[str]]) -> str:
    """Write a table as Markdown; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _summarise_repeats(
    rows: list[Plain], is_compared: Callable[[bool, bool], bool]
) -> dict[str, dict[str, float]]:
    """Compare rows of one operator and data without flags, two by two, where ``is_compared(same
    run, same card)``.

    A window that never came to rest under the cap is flagged, and has a settled power all the same:
    power is compared again with the settled one in place of the window's."""
    unflagged = [row for row in rows if not row["flags"]]
    settled = [row for row in map(_take_settled_power, rows) if row is not None]
    compared = {
        "latency, burst": (unflagged, "burst", "latency_s"),
        "latency, sustained": (unflagged, "sustained", "latency_s"),
        "power, sustained, one window": (unflagged, "sustained", "power_w"),
        "power, sustained, settled where capped": (settled, "sustained", "power_w"),
    }
    repeats: dict[str, dict[str, float]] = {}
    for name, (candidates, kind, column) in compared.items():
        differences = []
        for a, b in _pair_rows(candidates, kind, column):
            if is_compared(a["run"] == b["run"], a["card_uuid"] == b["card_uuid"]):
                mean = 0.5 * (a[column] + b[column])
                differences.append(abs(a[column] - b[column]) / mean)
        repeats[name] = {"pairs": len(differences)}
        if differences:
            repeats[name]["median"] = float(np.median(differences))
            repeats[name]["p90"] = float(np.percentile(differences, 90))
    return repeats


def _take_settled_power(row: Plain) -> Plain | None:
    """Return a row with its settled power where it has one; None where another flag spoils it."""
    flags = set(row["flags"])
    settled_w = row.get("settled_power_w")
    if settled_w:
        flags -= {"unsettled"}
        row = row | {"power_w": settled_w}
    return None if flags else row


def _pair_rows(
    rows: list[Plain],
    kind: str,
    column: str,
) -> list[tuple[Plain, Plain]]:
    """Return all pairs of rows of a kind that measured one operator with the same data."""
    groups: dict[tuple[str, str], list[Plain]] = {}
    for row in rows:
        if row["kind"] == kind and row[column]:
            groups.setdefault((row["spec"], row["data"]), []).append(row)
    pairs: list[tuple[Plain, Plain]] = []
    for group in groups.values():
        pairs += combinations(group, 2)
    return pairs
