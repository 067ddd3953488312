"""The microbenchmarks for AMD GPUs compile; no AMD GPU was at hand to run them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "studies" / "hip_units" / "hip_units.hip"


@pytest.mark.slow
def test_the_hip_program_compiles_and_says_that_it_never_ran(tmp_path: Path) -> None:
    assert "THIS HAS NEVER RUN" in SOURCE.read_text(encoding="utf-8")
    hipcc = shutil.which("hipcc")
    if hipcc is None:
        pytest.skip("no hipcc")
    command = [
        hipcc,
        "-O3",
        "-Wall",
        "-Werror",
        "--offload-arch=gfx90a",
        str(SOURCE),
        "-o",
        str(tmp_path / "units"),
    ]
    done = subprocess.run(
        command, env=os.environ | {"HIP_PLATFORM": "amd"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
