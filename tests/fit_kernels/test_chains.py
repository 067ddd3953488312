"""The law of chains: found again where it is known, and better than nothing on the H200's."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from wattcast.errors import BadInput, UnknownName
from wattcast.fit.chains import ChainLaw, Chains, chains_of, fit_chain_law, held_out_error
from wattcast.records import database_folder, read_table

_L2 = 62.9e6


def _member(spec: str, op: str, megabyte: float, rotated: str = "none") -> dict[str, object]:
    return {
        "spec": spec,
        "kind": "burst",
        "operator": {"op": op, "dtype": "bf16"},
        "footprint_byte": megabyte * 1e6,
        "sets": 1,
        "rotated": rotated,
        "kernel_names": ["one"],
    }


_ROWS = [_member("a", "add", 30.0), _member("n", "layernorm", 30.0), _member("w", "linear", 5.0, "weights")]


def _chain(*specs: str) -> dict[str, object]:
    return {"name": f"part {len(specs)}", "specs": list(specs), "alone_s": [1e-5] * len(specs), "latency_s": 5e-5}


def test_what_a_member_loses_is_what_it_kept_alone() -> None:
    """Two operators of 30 MB, each of which keeps 44 % alone and nothing beside the other; five of weights stay."""
    both, small = chains_of([_chain("a", "n"), _chain("w")], _ROWS, _L2).terms
    assert both[:3].tolist() == [2.0, 2.0, 1.0]
    assert both[3] == pytest.approx(60e6 * (0.77 * _L2 - 30e6) / (0.67 * _L2))
    assert both[4] == 0.0
    assert small.tolist() == [1.0, 0.0, 0.0, 0.0, 5e6]


def test_a_chain_with_an_unknown_member_is_left_out() -> None:
    with pytest.raises(BadInput, match="members"):
        chains_of([_chain("a", "missing")], _ROWS, _L2)


def test_a_law_is_found_again() -> None:
    true = ChainLaw(2e-8, 4e-7, 8e-7, 2e-13, 1e-13)
    random = np.random.default_rng(0)
    terms = random.uniform(0.0, 1.0, (40, 5)) * [10.0, 8.0, 3.0, 1e8, 1e7]
    alone_s = random.uniform(1e-5, 1e-3, 40)
    bare = Chains(tuple(f"p{i % 4} x" for i in range(40)), alone_s, alone_s, terms)
    chains = Chains(bare.name, alone_s + true.extra_s(bare), alone_s, terms)
    assert astuple(fit_chain_law(chains)) == pytest.approx(astuple(true), rel=1e-6)
    assert np.abs(held_out_error(chains)).max() < 1e-9


def test_on_the_h200_cold_caches_not_gaps_make_a_chain_longer() -> None:
    try:
        folder = database_folder("h200")
        chains = chains_of(read_table(folder / "chains.parquet"), read_table(folder / "rows.parquet"), _L2)
    except UnknownName:
        pytest.skip("the H200 database is not in this checkout")
    assert len(chains.name) >= 40
    law = fit_chain_law(chains)
    assert law.kernel_s < 1e-7  # a kernel follows another one as fast as itself
    assert 2e-7 < law.cold_operator_s < 1e-6
    without = np.abs(chains.alone_s / chains.chain_s - 1.0)
    assert np.abs(held_out_error(chains)).mean() < 0.6 * without.mean()
