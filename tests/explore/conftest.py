"""A small study to sweep."""

from __future__ import annotations

import pytest

from wattcast.explore import explorations
from wattcast.explore.study import Study

AXES = ["clock=600MHz:1980MHz:60MHz", "sm_count=64:192:32", "memory.bandwidth=2TB/s:8TB/s:2TB/s"]


@pytest.fixture
def study() -> Study:
    """A sweep in which the governor steps in for some points and not for others."""
    return explorations.build_study(
        "gpt2",
        "h200",
        [*AXES, "voltage=0.9,1.1"],
        stack="eager",
        batch=64,
        seq=512,
        power_limit="300W",
    )
