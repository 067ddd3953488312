"""An engine's table of steps is made once, and again where anything that decides it changes."""

from __future__ import annotations

from typing import Any

import pytest

import wattcast
from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.serving import step_tabulation

JOB: dict[str, Any] = {
    **{"prompt": 64, "output": 16, "requests": 10, "seed": 3},
    **{"max_seqs": 8, "max_batched_tokens": 256},
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs that tables were made for."""
    names: list[str] = []
    tabulate = step_tabulation._tabulate_stage

    def count(gpu: Any, *rest: Any) -> Any:
        names.append(gpu.name)
        return tabulate(gpu, *rest)

    step_tabulation._recall_stage.cache_clear()
    monkeypatch.setattr(step_tabulation, "_tabulate_stage", count)
    return names


def test_another_rate_limit_or_host_of_an_engine_makes_no_table(made: list[str]) -> None:
    first = wattcast.simulate("gpt2", "h200", rate="5/s", **JOB)
    wattcast.simulate("gpt2", "h200", rate="50/s", power_limit="400W", **JOB)
    slow = wattcast.simulate("gpt2", "h200", rate="5/s", host_factor=3.0, **JOB)
    again = wattcast.simulate("gpt2", "h200", rate="5/s", **JOB)
    assert made == ["h200"]
    assert again.last_token_s.tolist() == first.last_token_s.tolist()
    assert again.summarise() == first.summarise()
    assert slow.summarise()["tpot_s"]["p50"] > first.summarise()["tpot_s"]["p50"]


def test_another_engine_makes_its_own_table(made: list[str]) -> None:
    wattcast.simulate("gpt2", "h200", rate="5/s", **JOB)
    others: list[dict[str, Any]] = [
        {"model": "gpt2-xl"},
        {"gpu": "h100-sxm"},
        {"max_seqs": 9},
        {"clock": "1.2GHz"},
        {"dtype": "fp16"},
        {"prompt": 900},
    ]
    for number, other in enumerate(others, start=2):
        asked = {"model": "gpt2", "gpu": "h200", "rate": "5/s", **JOB, **other}
        wattcast.simulate(asked.pop("model"), asked.pop("gpu"), **asked)
        assert len(made) == number, other


def test_a_changed_coefficient_makes_a_table(made: list[str]) -> None:
    """A trial of a coefficient would otherwise see what was tabulated before."""
    usual = wattcast.simulate("gpt2", "h200", rate="5/s", **JOB).summarise()
    with change_coefficient("kernel_times.lone_sm_share", 0.5):
        wattcast.simulate("gpt2", "h200", rate="5/s", **JOB)
        assert len(made) == 2
    assert wattcast.simulate("gpt2", "h200", rate="5/s", **JOB).summarise() == usual
    assert len(made) == 2
