"""What different operators in one graph cost beyond their own bursts, from chains of them.

A burst repeats one operator, so all it touches may stay in L2. In a chain the others pass between two runs of it.
With M the share of L2's content that the chain's working set pushes out (:func:`wattcast.kernels.work.kept`),

    extra = λ_k·kernels + M·(λ_o·operators + λ_r·reductions) + λ_b·B_lost − λ_w·(1 − M)·B_weights

B_lost are bytes that a member found in L2 when alone and no longer does, B_weights those of weights that bursts fetch
from device memory and that stay in L2 where the chain fits it. The coefficients are not negative, and are fitted to
relative errors. λ_o and λ_r hold code, parameters and small operands alike: members of a chain read operands of their
own, so a model, whose activations were just written, may pay less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fit.kernels_interval import conformal
from wattcast.fitted.widening import Among
from wattcast.kernels.work import kept
from wattcast.records import CHAINS_FILE, ROWS_FILE, Plain, database_folder, read_table

_REDUCING = ("layernorm", "rmsnorm", "softmax", "sum", "mean", "max")  # loads that wait for one another
_SIGN = np.array([1.0, 1.0, 1.0, 1.0, -1.0])
LEAST_CHAINS = 20  # to say how far workloads of several kernels may be from their sum


@dataclass(frozen=True)
class ChainLaw:
    """Seconds a kernel, an operator and a reduction met cold, a byte lost, a byte of weights kept."""

    kernel_s: float
    cold_operator_s: float
    cold_reduction_s: float
    lost_s_per_byte: float
    kept_weight_s_per_byte: float

    def extra_s(self, chains: Chains) -> Array:
        """Seconds beyond the members' own, of each chain."""
        return np.asarray(chains.terms @ (_SIGN * np.array(astuple(self))))


@dataclass(frozen=True)
class Chains:
    """Measured chains, ``(chain,)`` each; ``terms`` are what the coefficients of a law multiply, ``(chain, 5)``."""

    name: tuple[str, ...]
    chain_s: Array
    alone_s: Array
    terms: Array

    def at(self, rows: npt.NDArray[np.bool_]) -> Chains:
        """Some of them."""
        names = tuple(name for name, wanted in zip(self.name, rows, strict=True) if wanted)
        return Chains(names, self.chain_s[rows], self.alone_s[rows], self.terms[rows])

    @property
    def part(self) -> npt.NDArray[np.str_]:
        """Part of a layer that each is of: the first word of its name."""
        return np.array([name.partition(" ")[0] for name in self.name])


def chains_of(chains: Sequence[Plain], rows: Sequence[Plain], l2_byte: float) -> Chains:
    """Chains whose members were all measured alone; ``rows`` are those of the kernel database."""
    bursts = {row["spec"]: row for row in rows if row.get("kind") == "burst" and row.get("footprint_byte")}
    found = []
    for chain in chains:
        specs, alone = chain.get("specs") or (), chain.get("alone_s") or ()
        if chain.get("error") or chain.get("flags") or len(alone) != len(specs) or not chain.get("latency_s"):
            continue
        if all(spec in bursts for spec in specs):
            terms = _terms([bursts[spec] for spec in specs], l2_byte)
            found.append((str(chain["name"]), float(chain["latency_s"]), float(sum(alone)), terms))
    if not found:
        raise BadInput(
            "no chain has all its members in the database. Measure them: `--steps chain`, then pack again."
        )
    names, chain_s, alone_s, every = zip(*found, strict=True)
    return Chains(tuple(names), np.array(chain_s), np.array(alone_s), np.array(every))


def _terms(members: Sequence[Plain], l2_byte: float) -> list[float]:
    byte = np.array([float(row["footprint_byte"]) / max(int(row.get("sets") or 1), 1) for row in members])
    warm = np.array([row.get("rotated") == "none" for row in members])  # found all in L2 that fits it
    operator = [
        row["operator"] if isinstance(row["operator"], dict) else json.loads(row["operator"]) for row in members
    ]
    reducing = sum(float(op.get("function", op["op"]) in _REDUCING) for op in operator)
    pushed_out = 1.0 - float(kept(np.asarray(byte.sum()), l2_byte))
    lost = float((np.maximum(pushed_out - (1.0 - kept(byte, l2_byte)), 0.0) * byte)[warm].sum())
    kernels = float(sum(len(row.get("kernel_names") or ()) or 1 for row in members))
    weights = float(byte[~warm].sum())
    return [kernels, pushed_out * len(members), pushed_out * reducing, lost, (1.0 - pushed_out) * weights]


def fit_chain_law(chains: Chains) -> ChainLaw:
    """Coefficients, none negative, that make the relative error of the chains' times least."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(chains.terms).max(axis=0), 1e-30)
    left = chains.terms * _SIGN / scale / chains.chain_s[:, None]
    value, _ = nnls(left, (chains.chain_s - chains.alone_s) / chains.chain_s)
    return ChainLaw(*(value / scale).tolist())


def among_of(database: str | Path, l2_byte: float) -> Among | None:
    """What chains took beyond their members alone; None of a database without chains."""
    folder = Path(database) if Path(database).is_dir() else database_folder(str(database))
    if not (folder / CHAINS_FILE).is_file() or not (folder / ROWS_FILE).is_file():
        return None
    chains = chains_of(read_table(folder / CHAINS_FILE), read_table(folder / ROWS_FILE), l2_byte)
    if len(chains.name) < LEAST_CHAINS:
        return None
    extra_s = chains.chain_s - chains.alone_s
    share, kernel_s = (conformal(one, 0.9) for one in (extra_s / chains.alone_s, extra_s / chains.terms[:, 0]))
    return Among(
        (round(share[0], 4), round(share[1], 4)),
        (float(f"{kernel_s[0]:.3g}"), float(f"{kernel_s[1]:.3g}")),
        len(chains.name),
    )


def held_out_error(chains: Chains) -> Array:
    """Relative error of each chain's time from a law that saw no chain of its part of a layer."""
    error = np.empty(len(chains.name))
    for part in dict.fromkeys(chains.part.tolist()):
        own = chains.part == part
        law = fit_chain_law(chains.at(~own))
        some = chains.at(own)
        error[own] = (some.alone_s + law.extra_s(some)) / some.chain_s - 1.0
    return error
