"""Plans: a graph read off polynomials in the batch is the graph a trace gives, operator by operator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattcast.workload import models, plans
from wattcast.workload.architectures import Kind
from wattcast.workload.build import _traced
from wattcast.workload.models import Model
from wattcast.workload.options import Options
from wattcast.workload.plans import Plan, Traced, blocks_of, plan_of
from wattcast.workload.resolution import resolve
from wattcast.workload.sizes import Largest, Size

BATCHES = (1, 3, 8, 128)
UNEVEN = {("mixtral-8x7b", "decode")}  # twelve choices of eight experts
PHASES = {Kind.LANGUAGE: ("prefill", "decode", "train"), Kind.ENCODER: ("forward", "train")}
EVERY = [
    (name, phase) for name in models.names() for phase in PHASES.get(models.load(name).kind, ("forward", "train"))
]


def resolved(name: str, batch: int, **given: object) -> tuple[Model, Options]:
    model = models.load(name)
    sizes = {} if model.kind is Kind.VISION else {"seq": 384}
    return model, resolve(model, Options.of(batch=batch, **(sizes | given)))[0]


def compared(plan: Plan, model: Model, options: Options) -> int:
    """How many batches were alike, to the letter: labels and counts take no part in equality, but in words."""
    alike = 0
    for batch in {*BATCHES, plan.span.low, plan.span.low + 1, *plan.span.without} - {0}:
        if plan.span.holds(batch):
            blocks, held = plan.at(batch)
            expected, held_too = _traced(model, replace(options, batch=batch))
            assert repr(list(blocks)) == repr(expected)
            assert held == held_too
            alike += 1
    return alike


@pytest.mark.parametrize(("name", "phase"), EVERY)
def test_a_plan_gives_what_a_trace_gives(name: str, phase: str) -> None:
    model, options = resolved(name, 6, phase=phase)
    plan = plan_of(model, options, _traced)
    if (name, phase) in UNEVEN:
        assert plan is None
        return
    assert plan is not None
    assert compared(plan, model, options) >= 3


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llama3-8b", {"phase": "generate", "tokens": 40}),
        ("llama3-8b", {"phase": "train", "attention": "eager", "tp": 2, "pp": 2, "dp": 2}),
        ("llama3-8b", {"phase": "decode", "stack": "engine", "dtype": "fp8"}),
        ("mistral-7b", {"phase": "decode", "seq": 5000, "dtype": "int8"}),
        ("gpt2", {"phase": "train", "recompute": True, "dtype": "tf32"}),
        ("whisper-base", {"phase": "generate", "tokens": 9, "attention": "eager"}),
        ("qwen3-30b-a3b", {"phase": "train", "attention": "eager"}),
        ("clip-base", {"phase": "train", "attention": "eager"}),
    ],
)
def test_plans_hold_under_other_options(name: str, given: dict[str, object]) -> None:
    model, options = resolved(name, 5, **given)
    plan = plan_of(model, options, _traced)
    assert plan is not None
    assert compared(plan, model, options) >= 3


def test_what_a_compiler_fuses_has_no_plan() -> None:
    model, options = resolved("bert-base", 4, stack="compiled")
    assert plan_of(model, options, _traced) is None


class Tracing:
    """Traces, and remembers the batches it was asked for; None stands for one that leaves its marks."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def __call__(self, model: Model, options: Options) -> Traced:
        self.asked.append(options.batch if isinstance(options.batch, int) else None)
        return _traced(model, options)


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Tracing:
    monkeypatch.setattr(plans, "_STRUCTURES", {})
    return Tracing()


def test_a_structure_that_is_asked_for_again_and_again_is_traced_no_more(tracing: Tracing) -> None:
    for batch in (4, 5, 6, 7, 1, 8, 4096, 9):
        model, options = resolved("llama3-8b", batch)
        blocks, held = blocks_of(model, options, tracing)
        assert (repr(list(blocks)), held) == (repr(_traced(model, options)[0]), _traced(model, options)[1])
    assert tracing.asked == [4, 5, None, 1, 4096]  # at 4096 the batch is as long as the model is wide


def test_another_length_is_another_structure(tracing: Tracing) -> None:
    for seq in (128, 129, 130, 131):
        model, options = resolved("llama3-8b", 4, seq=seq)
        blocks_of(model, options, tracing)
    assert tracing.asked == [4, 4, 4, 4]


def test_where_no_plan_is_possible_there_are_few_tries(tracing: Tracing) -> None:
    for batch in range(2, 30):
        model, options = resolved("mixtral-8x7b", batch, phase="decode")
        blocks_of(model, options, tracing)
    assert tracing.asked.count(None) == 3
    assert [batch for batch in tracing.asked if batch is not None] == list(range(2, 30))


def test_no_size_that_follows_from_the_batch_stays_in_a_graph(tracing: Tracing) -> None:
    for batch in (4, 5, 6):
        model, options = resolved("clip-base", batch, phase="train")
        blocks, held = blocks_of(model, options, tracing)
    assert tracing.asked == [4, 5, None]
    values = [value for block in blocks for op in block.ops for value in vars(op).values()]
    assert not any(isinstance(value, (Size, Largest)) for value in [*values, held])


def test_structures_are_forgotten_oldest_first(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_STRUCTURES", 2)
    for seq in (10, 11, 12):
        model, options = resolved("gpt2", 4, seq=seq)
        blocks_of(model, options, tracing)
    assert len(plans._STRUCTURES) == 2
    assert all(12 in key or 11 in key for key in plans._STRUCTURES)
