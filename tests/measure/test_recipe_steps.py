"""The study of training recipes without a GPU: what is planned, drawn and masked."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "training_rows"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The study, imported by the worker that needs it: PyTorch's compiler takes seconds."""
    pytest.importorskip("torch", reason="PyTorch (CPU build) is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.syspath_prepend(STUDY)
    return importlib.import_module("measure_recipe_rows")


@pytest.fixture
def variants(study: Any) -> Any:
    return importlib.import_module("recipe_variants")


def test_held_out_rows_share_no_shape_with_those_that_are_fitted_to(study: Any) -> None:
    rows = {name: study.read_recipe_plan(name) for name in ("fitting", "held-out", "second")}
    shapes = {
        name: {(spec.model, spec.batch, spec.seq, spec.plan["recipe"]) for spec in specs}
        for name, specs in rows.items()
    }
    fitted_kinds = {spec.plan["recipe"] for spec in rows["fitting"]}
    for judged in ("held-out", "second"):
        assert not shapes["fitting"] & shapes[judged]
        assert len(rows[judged]) >= 16
        assert {spec.plan["recipe"] for spec in rows[judged]} == fitted_kinds
    assert not shapes["held-out"] & shapes["second"]


def test_every_planned_row_has_a_name_and_sizes_to_be_written_down(study: Any) -> None:
    bench = SimpleNamespace(run="run-1")
    for spec in study.read_recipe_plan():
        row = study.make_blank_model_row(bench, spec)
        assert (row.id, row.batch, row.seq) == (spec.plan["id"], spec.batch, spec.seq)
        assert bool(row.head) == (not spec.is_network)


def test_documents_fill_what_they_are_packed_into(variants: Any) -> None:
    lengths = variants.draw_lengths(16384, 1024)
    assert sum(lengths) == 16384
    assert len(lengths) == 16
    assert max(lengths) > 2 * min(lengths)
    assert lengths == variants.draw_lengths(16384, 1024)


def test_the_longest_sequence_of_a_padded_batch_fills_it(variants: Any) -> None:
    lengths = variants.draw_padded_lengths(8, 1024, 640)
    assert max(lengths) == 1024
    assert sum(lengths) / 8 == pytest.approx(640, abs=1)


def test_padding_is_masked_and_counts_in_no_loss(variants: Any) -> None:
    import torch

    plan = {"recipe": "padded", "documents": 6}
    tokens = torch.ones(2, 8, dtype=torch.long)
    inputs = variants.add_inputs(plan, {"input_ids": tokens, "labels": tokens}, "cpu")
    assert inputs["labels"][1].tolist() == [1, 1, 1, 1, -100, -100, -100, -100]
    assert inputs["attention_mask"].shape == (2, 1, 8, 8)
    assert inputs["attention_mask"][1, 0, 7].tolist() == [True] * 4 + [False] * 4
    assert not inputs["attention_mask"][0, 0, 0, 1:].any()


@pytest.mark.slow
def test_recipes_take_steps(capsys: pytest.CaptureFixture[str], study: Any) -> None:
    for name in ("packed-qwen3", "padded-qwen3", "conv-resnet50-256", "long-full"):
        study.run_dry(study.read_recipe_plan(only=name)[:1])
    lines = [line for line in capsys.readouterr().err.splitlines() if "losses" in line]
    assert len(lines) == 4
    assert all(line.endswith("finite True") for line in lines)
