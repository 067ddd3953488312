"""Cold start: what an import and a first prediction cost over importing NumPy, in CPU time.

CPU time of fresh interpreters, the median of several, so that a busy machine does not decide.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.realtime  # beside nothing else
RUNS = 5
NUMPY = "import numpy"
PREDICT = (
    "from wattcast.cli.main import main\n"
    "import sys, io\n"
    "code = main(['predict', 'llama3-8b', '--gpu', 'h100-sxm', '--batch', '8', '--seq', '1024', '--json'])\n"
    "assert code == 0"
)
MEASURE = "\nimport resource, sys, json; u = resource.getrusage(resource.RUSAGE_SELF)\n"
REPORT = "sys.stderr.write(json.dumps([u.ru_utime + u.ru_stime, sorted(m.split('.')[0] for m in sys.modules)]))"


def run(code: str) -> tuple[float, set[str]]:
    done = subprocess.run([sys.executable, "-c", code + MEASURE + REPORT], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stderr.splitlines()[-1])
    return seconds, set(modules)


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    found: dict[str, list[float]] = {NUMPY: [], "import numpy, wattcast": [], PREDICT: []}
    for _ in range(RUNS):  # interleaved, so that drift hits all alike
        for code, seconds in found.items():
            seconds.append(run(code)[0])
    return {code: statistics.median(seconds) for code, seconds in found.items()}


def test_importing_wattcast_costs_next_to_nothing(costs: dict[str, float]) -> None:
    assert costs["import numpy, wattcast"] - costs[NUMPY] <= 0.050


def test_a_cold_prediction_costs_at_most_half_a_second(costs: dict[str, float]) -> None:
    assert costs[PREDICT] - costs[NUMPY] <= 0.5


def test_a_prediction_imports_no_heavy_library() -> None:
    _, modules = run(PREDICT)
    assert not modules & {"scipy", "polars", "matplotlib", "sklearn", "torch", "pandas", "pyarrow"}
    assert "numpy" in modules
