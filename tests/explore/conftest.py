"""A small workload and the verbs under test."""

from __future__ import annotations

import pytest

from wattcast.cli import main
from wattcast.explore import api
from wattcast.explore.study import Study

AXES = ["clock=600MHz:1980MHz:60MHz", "sm_count=64:192:32", "memory.bandwidth=2TB/s:8TB/s:2TB/s"]


@pytest.fixture(autouse=True)
def _verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "explore", "explore")
    monkeypatch.setitem(main.COMMANDS, "plan", "plan")


@pytest.fixture
def study() -> Study:
    """A sweep in which the governor steps in for some points and not for others."""
    return api.study("gpt2", "h200", [*AXES, "voltage=0.9,1.1"], batch=64, seq=512, power_limit="300W")
