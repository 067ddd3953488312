"""How served points are chosen and asked: as their published command lines started the engines."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.lab.validate.public_checks import served_points
from wattcast.lab.validate.public_checks.served_points import ServedPoint, choose_points
from wattcast.lab.validate.public_checks.served_recipes import find_recipe


def make_point(name: str = "a", **changed: object) -> ServedPoint:
    values: dict[str, object] = {
        "name": name,
        "model": "llama3-70b",
        "quantization": "fp8",
        "gpu": "h200",
        "engine": "trtllm",
        "gpus": 4,
        "expert_gpus": 1,
        "concurrency": 16,
        "prompt": 1024,
        "output": 1024,
        "is_drawn": True,
        "ttft_s": 0.1,
        "tpot_s": 0.01,
    }
    return ServedPoint(**{**values, **changed})


def test_points_that_may_be_looked_at_are_never_judged() -> None:
    points = [make_point(str(number), concurrency=number) for number in range(1, 30)]
    judged = choose_points(points, 5)
    others = choose_points(points, 24, 5)
    assert len(judged) == 5
    assert len(others) == 24
    assert not {point.name for point in judged} & {point.name for point in others}


def test_lengths_are_drawn_evenly_up_to_the_nominal_ones() -> None:
    trace = served_points._draw_requests(make_point(concurrency=64))
    assert len(trace) == 640
    assert trace.prompt_tokens.min() >= 0.8 * 1024
    assert trace.prompt_tokens.max() <= 1024
    assert trace.prompt_tokens.mean() == pytest.approx(0.9 * 1024, rel=0.01)
    stated = served_points._draw_requests(make_point(is_drawn=False))
    assert np.all(stated.prompt_tokens == 1024)
    assert np.all(stated.output_tokens == 1024)


def test_recipes_are_those_of_the_command_lines() -> None:
    """What the named files of InferenceX set, read by hand."""
    llama = find_recipe("trtllm", "h200", "llama3-70b", "fp8", 4, 16, (1024, 1024))
    assert llama["kv_dtype"] == "fp8"
    assert llama["max_batched_tokens"] == 2068
    assert "batch_wait_timeout_iters=20" in llama["engine_args"]
    eight = find_recipe("trtllm", "b200", "llama3-70b", "fp8", 8, 16, (1024, 1024))
    assert eight["max_batched_tokens"] == 16384
    assert "engine_args" not in eight
    deepseek = find_recipe("trtllm", "h200", "deepseek-v3", "fp8-block", 8, 64, (8192, 1024))
    assert deepseek["max_batched_tokens"] == 8320
    assert deepseek["memory_utilisation"] == 0.75
    few = find_recipe("sglang", "b200", "deepseek-v3", "nvfp4", 8, 8, (1024, 1024))
    many = find_recipe("sglang", "b200", "deepseek-v3", "nvfp4", 8, 64, (1024, 1024))
    assert few["engine_args"] == "scheduler_recv_interval=10"
    assert many["engine_args"] == "scheduler_recv_interval=30"
    assert "kv_dtype" not in find_recipe("sglang", "h200", "deepseek-v3", "fp8-block", 8, 8, (1, 1))
    assert find_recipe("vllm", "b200", "minimax-m2", "nvfp4", 2, 8, (1024, 1024)) == {}


def test_a_point_is_asked_with_its_recipe_and_the_engine(monkeypatch) -> None:
    asked: dict[str, object] = {}

    class Answer:
        ttft_s = np.array([0.1, 0.3])
        tpot_s = np.array([0.01, 0.03])

    def answer(model: str, **options: object) -> Answer:
        asked.update(options)
        return Answer()

    monkeypatch.setattr(served_points, "simulate", answer)
    assert served_points.ask_point(make_point()) == pytest.approx((0.2, 0.02))
    assert asked["engine"] == "trtllm"
    assert asked["kv_dtype"] == "fp8"
    served_points.ask_point(make_point(is_drawn=False, prompt=9000))
    assert asked["max_batched_tokens"] == 9016
