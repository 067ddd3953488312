"""The search for how GPUs share a job: which ways are traced and timed, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from wattcast.core.errors import BadInput
from wattcast.options.training_options import TrainingRecipe
from wattcast.training import strategy_search
from wattcast.training.microbatch import MicrobatchWork, measure_memory, trace_microbatch
from wattcast.training.strategy_search import JobSetting, extrapolate_memory
from wattcast.training.train_job import TrainingResult, train
from wattcast.training.training_strategy import TrainingStrategy
from wattcast.workload.model_catalogue import load_model

WIDE: dict[str, Any] = {"gpus": 1024, "tokens": "1B"}


ALL_SETTINGS = [pytest.param(goal, 1, marks=pytest.mark.slow) for goal in ("time", "energy")]


@pytest.mark.parametrize(("minimise", "step"), [("time", 3), *ALL_SETTINGS])
def test_no_option_beats_the_search_over_a_thousand_gpus(minimise: str, step: int) -> None:
    """Whoever sets by hand what the search left open finds nothing faster or thriftier."""
    best = train("llama3-8b", "h100-sxm", minimise=minimise, **WIDE)

    def spend(result: TrainingResult) -> float:
        step = result.step
        spent = step.latency_s if minimise == "time" else step.energy_j
        return float(spent) / result.strategy.global_batch

    settings: list[dict[str, Any]] = [
        {"tp": 1},
        {"tp": 4},
        {"pp": 2},
        {"sharding": "zero1"},
        {"sharding": "zero3"},
        {"recompute": "none"},
        {"recompute": "full"},
        {"micro_batch": 2, "tp": 2},
        {"micro_batch": 4, "tp": 8},
        {"tp": 8, "pp": 4, "micro_batch": 1},
    ]
    for setting in settings[::step]:
        own = train("llama3-8b", "h100-sxm", minimise=minimise, **WIDE, **setting)
        assert spend(own) >= spend(best) * (1.0 - 1e-9), setting


def test_memory_of_large_micro_batches_lies_on_a_line() -> None:
    """A micro-batch of 16 sequences keeps what the line through those of one and two says."""
    model = load_model("mixtral-8x7b")
    recipe = TrainingRecipe()
    traced = {size: trace_microbatch(model, recipe, size, 512, 2) for size in (1, 2)}
    strategy = TrainingStrategy(tp=2, micro_batch=16)
    line = measure_memory(extrapolate_memory(traced, 16), recipe, strategy)
    exact = measure_memory(trace_microbatch(model, recipe, 16, 512, 2), recipe, strategy)
    assert line.total_byte == pytest.approx(exact.total_byte, rel=1e-6)


def test_ways_that_are_not_timed_are_hardly_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search traced every micro-batch of every layout, most of which were never timed."""
    traced: set[tuple[int, int]] = set()
    trace = JobSetting.trace

    def count(job: JobSetting, strategy: TrainingStrategy) -> MicrobatchWork:
        traced.add((strategy.tp, strategy.micro_batch))
        return trace(job, strategy)

    monkeypatch.setattr(JobSetting, "trace", count)
    result = train("llama3-8b", "h100-sxm", gpus=8, tokens="1B")
    ways = {(way.strategy.tp, way.strategy.micro_batch) for way in result.candidates}
    timed = {(way.strategy.tp, way.strategy.micro_batch) for way in result.candidates if way.step}
    assert timed <= traced
    assert len(traced) <= 0.7 * len(ways)


def test_the_best_way_has_the_memory_of_its_own_trace() -> None:
    """Memory that lies on a line decides what is traced, and never what is reported."""
    result = train("gpt2", "h100-sxm", gpus=1, tokens="1B", seq=512)
    work = trace_microbatch(
        load_model("gpt2"), result.recipe, result.strategy.micro_batch, result.seq
    )
    memory = measure_memory(work, result.recipe, result.strategy)
    assert result.memory.total_byte == memory.total_byte


def test_a_long_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said while thousands of ways were searched."""
    monkeypatch.setattr(strategy_search, "PROGRESS_S", 0.0)
    lines: list[str] = []
    train("gpt2", "h100-sxm", gpus=8, tokens="1B", seq=512, progress=lines.append)
    assert any("ways traced" in line for line in lines)
    assert "timing" in lines[-1]


def test_a_short_search_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of progress come once a second, not with every way."""
    monkeypatch.setattr(strategy_search, "PROGRESS_S", 3600.0)
    lines: list[str] = []
    train("gpt2", "h100-sxm", gpus=8, tokens="1B", seq=512, progress=lines.append)
    assert lines == []


def test_progress_is_no_option_of_the_job() -> None:
    """An unknown option is still refused by name."""
    with pytest.raises(BadInput, match="progres"):
        train("gpt2", "h100-sxm", gpus=1, tokens="1B", progres=print)  # type: ignore[call-overload]
