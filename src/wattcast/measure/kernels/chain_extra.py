"""What a chain takes beyond the sum of its members, a kernel: gaps between different kernels, and colder caches.

A member's own row repeats it back to back, so it holds the gap between equal kernels already; the extra is what
different neighbours add. Rows with a flag or an error, or whose members were not all measured, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.records import Plain


@dataclass(frozen=True)
class Extra:
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


def extras(chains: Sequence[Plain], rows: Sequence[Plain]) -> list[Extra]:
    """Every chain that can be compared; ``rows`` are those of the kernel database, for the names of kernels."""
    launches = {row["spec"]: len(row["kernel_names"]) for row in rows if row.get("kernel_names")}
    found = []
    for chain in chains:
        specs, alone = list(chain.get("specs") or ()), list(chain.get("alone_s") or ())
        if chain.get("error") or chain.get("flags") or not chain.get("latency_s") or len(alone) != len(specs):
            continue
        known = all(spec in launches for spec in specs)
        kernels = sum(launches[spec] for spec in specs) if known else None
        found.append(Extra(chain["name"], len(specs), kernels, float(chain["latency_s"]), float(sum(alone))))
    return found


def summarise_chains(chains: Sequence[Plain], rows: Sequence[Plain]) -> Plain:
    """Mean, median and spread of the extra time a kernel, over all chains and by part of a layer."""
    found = extras(chains, rows)
    parts: dict[str, list[Extra]] = {}
    for extra in found:
        parts.setdefault(extra.name.partition(" ")[0], []).append(extra)
    return {"all": _spread(found)} | {part: _spread(some) for part, some in sorted(parts.items())}


def _spread(some: Sequence[Extra]) -> dict[str, float]:
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
