"""Cold starts, as ratios over importing NumPy."""

from __future__ import annotations

import os
import subprocess
import sys


def _cpu_s(code: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def track_cold_import_over_numpy() -> float:
    return _cpu_s("import numpy, wattcast") / _cpu_s("import numpy")


def track_cold_predict_over_numpy() -> float:
    call = "main(['predict', 'gpt2', '--gpu', 'h200', '--json'])"
    return _cpu_s(f"from wattcast.cli.main import main; {call}") / _cpu_s("import numpy")
