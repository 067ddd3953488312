"""Stacks of made-up layers: listed as the front end spells them, built on the CPU, measured on a
stand-in GPU.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_stacks
import pytest

from wattcast.core.measured_rows import ChainRow, KernelRow, RowKind, row_from_plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import CHAINS_FILE, read_table
from wattcast.lab.__main__ import main
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.database_files import pack_database
from wattcast.lab.campaigns.kernel_campaign import STEPS
from wattcast.lab.campaigns.kernel_chains import FEW, MANY, make_chain_row, read_chains
from wattcast.lab.campaigns.model_campaign import read_model_plan
from wattcast.lab.campaigns.operator_rows import KernelCampaign


def test_the_list_is_what_the_front_end_spells() -> None:
    assert make_stacks.FILE.read_text(encoding="utf-8").splitlines() == make_stacks.lines()


def test_no_stack_is_a_model_that_is_measured_whole() -> None:
    assert not {stack.dims.model for stack in read_chains("stacks")} & {
        spec.model for spec in read_model_plan()
    }
    assert (
        len({stack.spec(MANY).id for stack in read_chains("stacks")})
        == len(read_chains("stacks"))
        >= 20
    )
    assert all(len(stack.members) >= 15 for stack in read_chains("stacks"))


@pytest.mark.parametrize("size", ["decode 1 512", "train 1 256"])
def test_a_stack_hands_on_its_results(size: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    from wattcast.lab.campaigns.operator_calls import CallBuilder, OperandPools, build_call

    stack = next(
        stack for stack in read_chains("stacks") if stack.name == f"stack qwen3-2560 {size}"
    )
    dims = replace(
        stack.dims, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocab=50
    )
    small = replace(stack, dims=dims, batch=2, seq=8)
    builder = CallBuilder(torch, OperandPools(torch, "cpu", {"bf16": 2**12}), l2_byte=1e5)
    calls = [build_call(builder, small.spec(layers)) for layers in (FEW, MANY)]
    assert calls[1].fixed_byte > calls[0].fixed_byte
    with (
        torch.no_grad()
    ):  # as the campaign runs everything; a step of training asks for gradients itself
        found = calls[0].run(0)
    if stack.phase == "train":
        assert torch.isfinite(found)
    else:
        assert found.logits.shape == (2, 1, 50)


def test_a_layer_is_the_difference_of_two_depths() -> None:
    few, many = (
        KernelRow(
            f"burst-{s}",
            RowKind.BURST,
            "stack",
            {},
            latency_s=s,
            latency_spread_s=0.0,
            flags=flags,
            run="r",
        )
        for s, flags in ((3.0, ("clock_low",)), (11.0, ()))
    )
    stack = read_chains("stacks")[0]
    alone_s = {member.id: 0.01 for member in stack.members}
    row = make_chain_row(stack, [few, many], alone_s)
    assert row.latency_s == pytest.approx(8.0 / (MANY - FEW))
    assert row.handed_on
    assert row.flags == ("clock_low",)
    assert sum(row.alone_s) == pytest.approx(0.4)
    assert len(row.operators) == len(row.specs) == 40
    del alone_s[stack.members[3].id]
    assert make_chain_row(stack, [few, many], alone_s).alone_s == ()


def test_the_step_measures_operators_first_and_packs_layers_with_chains(
    bench: OperatorBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_timed = bench.gpu.timed
    graphs = itertools.count(1)

    def timed_longer(*arguments: Any, **options: Any) -> Any:
        """Let each graph take longer than the one before, as one with more layers does."""
        return plain_timed(*arguments, **options) * (1.0 + 0.01 * next(graphs))

    monkeypatch.setattr(bench.gpu, "timed", timed_longer)
    STEPS["stacks"](KernelCampaign(bench, tmp_path, time.monotonic() + 120, few=1))
    (found,) = [row_from_plain(row, ChainRow) for row in read_lines(tmp_path / "chain.jsonl")]
    alone = {
        row["detail"]["spec"]: row["latency_s"] for row in read_lines(tmp_path / "burst.jsonl")
    }
    assert found.name == read_chains("stacks")[0].name
    assert not found.error
    assert found.alone_s == tuple(alone[spec] for spec in found.specs)
    pack_database([tmp_path], tmp_path / "out")
    (row,) = read_table(tmp_path / "out" / CHAINS_FILE)
    assert row["handed_on"] is True
    assert json.loads(row["operators"][0])["op"] == "cast"


def test_every_step_can_be_found_from_help(call, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the command, and of the module that a bare GPU node runs."""
    told = call("lab", "kernels", "--help").out
    with pytest.raises(SystemExit):
        main(["kernels", "--help"])
    for text in (told, capsys.readouterr().out):
        unbroken = "".join(text.replace("│", "").split())  # lines end where the terminal does
        assert [
            step for step in STEPS if step not in {"chains", "stacks"} and step not in unbroken
        ] == []
