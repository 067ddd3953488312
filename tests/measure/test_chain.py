"""Chains of different operators: built on the CPU, measured on a GPU that keeps time, packed and
compared.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from studies import measure_plans
from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import ChainRow, row_from_plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import CHAINS_FILE, ROWS_FILE, database_folder, read_table
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.database_files import (
    find_chain_extras,
    make_summary_page,
    pack_database,
    summarise_chains,
    summarise_database,
)
from wattcast.lab.campaigns.kernel_campaign import STEPS, read_listed
from wattcast.lab.campaigns.kernel_chains import PLANS, list_chain_members, read_chains
from wattcast.lab.campaigns.operator_rows import KernelCampaign


def test_chains_hold_six_to_twelve_different_operators() -> None:
    found = read_chains()
    assert len({chain.name for chain in found}) == len(found) >= 40
    assert len({chain.spec().id for chain in found}) == len(found)
    for chain in found:
        assert 6 <= len(chain.members) <= 12
        assert len({member.id for member in chain.members}) > len(chain.members) // 2


@pytest.mark.parametrize("name", measure_plans.PLANS)
def test_plans_are_what_their_study_writes(name: str) -> None:
    assert (PLANS / name).read_text(encoding="utf-8") == measure_plans.make_lines(name)


def test_operators_of_a_workload_file_are_a_plan(tmp_path: Path) -> None:
    named = list_chain_members()
    assert {spec.id for spec in named} == {
        member.id for chain in read_chains() for member in chain.members
    }
    assert len(read_listed(PLANS / "training.jsonl")) > 800
    with pytest.raises(BadInput, match="src/wattcast/lab/campaigns/plans"):
        read_listed(Path("trainings"))
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"op": "collective", "dtype": "bf16"}\n')
    with pytest.raises(BadInput, match="line 1: expected an operator that can be run"):
        read_listed(strange)


def test_a_chain_runs_its_members_one_after_another() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from wattcast.lab.campaigns.operator_calls import CallBuilder, OperandPools, build_call

    operands = OperandPools(torch, "cpu", {"bf16": 2**26, "fp32": 2**20})
    operands.fill("random")
    builder = CallBuilder(torch, operands, l2_byte=1e5)
    chain = next(chain for chain in read_chains() if chain.name == "mlp gpt2 1")
    with torch.no_grad():
        out = build_call(builder, chain.spec()).run(0)
    assert [t.numel() for t in out[1:4]] == [3072, 3072, 768]
    assert len(out) == len(chain.members)


def test_the_step_measures_members_first_and_keeps_chains_apart(
    bench: OperatorBench, tmp_path: Path
) -> None:
    STEPS["chains"](KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=2))
    found = [row_from_plain(row, ChainRow) for row in read_lines(tmp_path / "chain.jsonl")]
    assert [row.name for row in found] == [chain.name for chain in read_chains()[:2]]
    assert all(row.latency_s and not row.error for row in found)
    alone = {
        row["detail"]["spec"]: row["latency_s"] for row in read_lines(tmp_path / "burst.jsonl")
    }
    for row in found:
        assert row.alone_s == tuple(alone[spec] for spec in row.specs)
        assert row.id.startswith("chain-")


def test_a_member_that_fails_leaves_its_chain_without_a_sum(
    bench: OperatorBench, tmp_path: Path
) -> None:
    bench.gpu.fails = {read_chains()[0].members[1].id}
    STEPS["chains"](KernelCampaign(bench, tmp_path, time.monotonic() + 60, few=1))
    (row,) = (row_from_plain(plain, ChainRow) for plain in read_lines(tmp_path / "chain.jsonl"))
    assert row.alone_s == ()
    assert row.latency_s
    assert (
        find_chain_extras([{"name": row.name, "specs": row.specs, "latency_s": row.latency_s}], [])
        == []
    )


def test_chains_are_packed_beside_rows_and_summed_up(bench: OperatorBench, tmp_path: Path) -> None:
    STEPS["chains"](KernelCampaign(bench, tmp_path / "run", time.monotonic() + 60, few=1))
    assert pack_database([tmp_path / "run"], tmp_path / "db")["chains"] == 1
    (row,) = read_table(tmp_path / "db" / CHAINS_FILE)
    assert len(row["specs"]) == len(row["alone_s"]) == 8
    summary = summarise_database(tmp_path / "db")
    assert summary["chains"]["norm"]["chains"] == 1
    assert "| norm | 1 |" in make_summary_page(summary)


def test_the_extra_time_is_shared_among_kernels() -> None:
    """Two operators of three kernels: 10 us together, 4 and 3 alone, so 1 us more a kernel."""
    rows = [{"spec": "a", "kernel_names": ["x", "y"]}, {"spec": "b", "kernel_names": ["z"]}]
    chain = {"name": "norm gpt2 1", "specs": ["a", "b"], "alone_s": [4e-6, 3e-6], "latency_s": 1e-5}
    (extra,) = find_chain_extras([chain], rows)
    assert extra.per_node_s == pytest.approx(1e-6)
    assert find_chain_extras([chain], [])[0].per_node_s == pytest.approx(1.5e-6)
    assert find_chain_extras([chain | {"flags": ["clock_low"]}, chain | {"error": "x"}], rows) == []
    seen = summarise_chains([chain, chain | {"latency_s": 1.3e-5}], rows)
    assert seen["all"]["mean_s"] == pytest.approx(1.5e-6)
    assert seen["norm"]["share_of_chain"] == pytest.approx((0.3 + 6 / 13) / 2)


def test_the_plan_common_to_all_cards_is_of_rows_that_ship() -> None:
    """What is measured on every card was measured on another: otherwise cards could not be
    compared.
    """
    shipped = read_table(database_folder("h200") / ROWS_FILE)
    for name, kind, least in (
        ("common_burst", "burst", 200),
        ("common_sustained", "sustained", 50),
    ):
        specs = read_listed(PLANS / f"{name}.jsonl")
        known = {
            row["spec"] for row in shipped if row["kind"] == kind and row["chosen"] != "common"
        }
        assert len(specs) >= least
        assert {spec.chosen for spec in specs} == {"common"}
        assert all(spec.id in known for spec in specs)
