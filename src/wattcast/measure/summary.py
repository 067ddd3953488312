"""What a kernel database holds, and how well its rows repeat.

Repeatability compares rows of one operator, kind and data: *within a run* the row and its repeat in
the same process; *between runs* two processes on one card; *between cards* two cards. Rows with an
error or a flag are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np

from wattcast.measure.kernels.chain_extra import summarise_chains
from wattcast.records import CHAINS_FILE, COUNTERS_FILE, ROWS_FILE, Plain, read_table

FAMILIES = ("linear", "bmm", "conv2d", "attention", "softmax", "layernorm", "rmsnorm", "elementwise")


def summarise(database: Path) -> Plain:
    """Counts and repeatability of a database folder (or of its ``rows.parquet``)."""
    folder = database if database.is_dir() else database.parent
    rows = read_table(folder / ROWS_FILE)
    counters = read_table(folder / COUNTERS_FILE) if (folder / COUNTERS_FILE).exists() else []
    chains = read_table(folder / CHAINS_FILE) if (folder / CHAINS_FILE).exists() else []
    good = [row for row in rows if not row["error"]]
    return {
        "database": folder.name,
        "cards": sorted({f"{row['card_name']} {row['card_uuid']}" for row in rows if row["card_uuid"]}),
        "rows": _by_kind(good),
        "failed": len(rows) - len(good),
        "flagged": dict(Counter(flag for row in good for flag in row["flags"])),
        "kernels": {
            "duty-cycled at three duties": _complete(good, "duty", 3),
            "of these with a period that does not beat with the sensor": _complete(_unbeaten(good), "duty", 3),
            "with data patterns": _patterns(good),
            "with counters": len({row["spec"] for row in counters}),
            "with names": len({row["spec"] for row in good if row["kernel_names"]}),
        },
        "repeatability": {
            "within a run": _repeatability(good, _same_run),
            "between runs of one card": _repeatability(good, _same_card),
            "between cards": _repeatability(good, _other_card),
        },
        **({"chains": summarise_chains(chains, good)} if chains else {}),
    }


def markdown(summary: Plain) -> str:
    """The summary as it stands in the database's README."""
    kinds = list(summary["rows"])
    lines = ["| family | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    families = [f for f in (*FAMILIES, "idle") if any(f in summary["rows"][kind] for kind in kinds)]
    lines += [
        f"| {family} | " + " | ".join(str(summary["rows"][kind].get(family, 0)) for kind in kinds) + " |"
        for family in families
    ]
    lines.append("| all | " + " | ".join(str(sum(summary["rows"][kind].values())) for kind in kinds) + " |")
    lines += ["", f"Rows that failed: {summary['failed']}. Flags: {_flags(summary['flagged'])}."]
    lines += [f"Kernels {what}: {count}." for what, count in summary["kernels"].items()]
    lines += ["", "| repeatability | quantity | pairs | median | 90th percentile |", "|---|---|---|---|---|"]
    lines += [
        f"| {where} | {quantity} | {seen['pairs']} | {_percent(seen)} |"
        for where, quantities in summary["repeatability"].items()
        for quantity, seen in quantities.items()
    ]
    if "chains" in summary:
        lines += ["", *_chains(summary["chains"])]
    return "\n".join(lines) + "\n"


def _chains(parts: Plain) -> list[str]:
    """Extra time a kernel of chains, in microseconds."""
    lines = ["| chains | number | extra a kernel, mean | median | 10th to 90th percentile |", "|---|---|---|---|---|"]
    for part, seen in parts.items():
        if seen["chains"]:
            mean, median, low, high = (1e6 * seen[f"{name}_s"] for name in ("mean", "median", "p10", "p90"))
            lines.append(
                f"| {part} | {seen['chains']} | {mean:.2f} us | {median:.2f} us | {low:.2f} to {high:.2f} us |"
            )
    return lines


def _percent(seen: dict[str, float]) -> str:
    return f"{100 * seen['median']:.2f} % | {100 * seen['p90']:.2f} %" if seen["pairs"] else "- | -"


def _flags(flagged: dict[str, int]) -> str:
    return ", ".join(f"{flag} {count}" for flag, count in sorted(flagged.items())) or "none"


def _by_kind(rows: list[Plain]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (kind, family), count in sorted(Counter((row["kind"], row["family"]) for row in rows).items()):
        found.setdefault(kind, {})[family] = count
    return found


def _complete(rows: list[Plain], kind: str, least: int) -> int:
    seen = Counter(row["spec"] for row in rows if row["kind"] == kind)
    return sum(count >= least for count in seen.values())


def _unbeaten(rows: list[Plain]) -> list[Plain]:
    return [row for row in rows if "period_beats_with_sensor" not in row["flags"]]


def _patterns(rows: list[Plain]) -> int:
    """Operators sustained on random values, zeros, ones and relu-like values."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        if row["kind"] == "sustained":
            seen.setdefault(row["spec"], set()).add(row["data"])
    return sum({"random", "zeros", "ones", "relu"} <= data for data in seen.values())


def _same_run(a: Plain, b: Plain) -> bool:
    return bool(a["run"] == b["run"])


def _same_card(a: Plain, b: Plain) -> bool:
    return bool(a["run"] != b["run"] and a["card_uuid"] == b["card_uuid"])


def _other_card(a: Plain, b: Plain) -> bool:
    return bool(a["card_uuid"] != b["card_uuid"])


def _repeatability(rows: list[Plain], wanted: Callable[[Plain, Plain], bool]) -> dict[str, dict[str, float]]:
    plain = _pairs([row for row in rows if not row["flags"]], wanted)
    settled = _pairs([_settled(row) for row in rows if not _doubtful(row)], wanted)
    return {
        "latency, burst": _spread(plain, "burst", "latency_s"),
        "latency, sustained": _spread(plain, "sustained", "latency_s"),
        "power, sustained, one window": _spread(plain, "sustained", "power_w"),
        "power, sustained, settled where capped": _spread(settled, "sustained", "power_w"),
    }


def _pairs(rows: list[Plain], wanted: Callable[[Plain, Plain], bool]) -> list[tuple[str, Plain, Plain]]:
    """Rows of the same kind, operator and data, two by two."""
    groups: dict[tuple[str, str, str], list[Plain]] = {}
    for row in rows:
        if row["kind"] in ("burst", "sustained"):
            groups.setdefault((row["kind"], row["spec"], row["data"]), []).append(row)
    return [(kind, a, b) for (kind, _, _), held in groups.items() for a, b in combinations(held, 2) if wanted(a, b)]


def _settled(row: Plain) -> Plain:
    """The row with its settled power in place of its window's, where it has one."""
    return row | {"power_w": row["settled_power_w"]} if row.get("settled_power_w") else row


def _doubtful(row: Plain) -> bool:
    """Flagged; but a window that never came to rest under the cap has a settled power all the same."""
    flags = set(row["flags"]) - ({"unsettled"} if row.get("settled_power_w") else set())
    return bool(flags)


def _spread(pairs: list[tuple[str, Plain, Plain]], kind: str, column: str) -> dict[str, float]:
    """Median and 90th percentile of the relative difference of pairs."""
    off = [
        abs(a[column] - b[column]) / (0.5 * (a[column] + b[column]))
        for found, a, b in pairs
        if found == kind and a[column] and b[column]
    ]
    if not off:
        return {"pairs": 0}
    return {"pairs": len(off), "median": float(np.median(off)), "p90": float(np.percentile(off, 90))}
