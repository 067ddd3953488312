"""A profile of Nsight Compute stands beside what ``lab kernel`` predicts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from wattcast.cli.command_output import Environment
from wattcast.cli.main import main
from wattcast.core.errors import WattcastError
from wattcast.lab.validate.profiled_kernel import read_profiled_kernel

COUNTED = Path(__file__).parents[3] / "studies" / "kernel_phases" / "h200" / "kernel_counters.csv"
PRODUCT = "256x128_64x4"  # in the name of the kernel of 1024 x 7168 x 10240


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Return a profile of one product of an H200."""
    lines = COUNTED.read_text(errors="replace").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith('"ID"'))
    kernel = next(line for line in lines if PRODUCT in line)
    path = tmp_path / "ncu.csv"
    path.write_text("\n".join([lines[start], lines[start + 1], kernel]) + "\n")
    return path


def test_a_profile_has_time_and_bytes_of_every_level(profile: Path) -> None:
    counted = read_profiled_kernel(profile)
    assert [PRODUCT in name for name in counted.names] == [True]
    assert counted.seconds is not None
    assert 1e-4 < counted.seconds < 1e-3
    # both operands and the result at least
    operands = 2 * (1024 * 10240 + 7168 * 10240 + 1024 * 7168)
    assert operands * 0.9 < counted.level_byte["DRAM"] < counted.level_byte["L2"]
    assert counted.level_byte["L2"] < counted.level_byte["shared"]


def test_the_prediction_stands_beside_the_profile(profile: Path) -> None:
    out = io.StringIO()
    words = ["lab", "kernel", "linear", "1024x7168x10240", "--gpu", "h200"]
    words += ["--profile", str(profile)]
    assert main([*words, "--json"], Environment(out, io.StringIO())) == 0
    rows = {row["quantity"]: row for row in json.loads(out.getvalue())["profile"]["rows"]}
    assert set(rows) == {"time", "bytes of DRAM", "bytes of L2", "bytes of shared", "tile"}
    assert abs(rows["bytes of L2"]["difference"]) < 0.01
    assert rows["tile"]["predicted"] == rows["tile"]["counted"] == "256x128"

    printed = io.StringIO()
    assert main(words, Environment(printed, io.StringIO())) == 0
    assert "Beside the profile" in printed.getvalue()


def test_a_profile_without_bytes_or_time_says_what_to_collect(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(
        '"ID","Kernel Name","Block Size","Grid Size","sm__cycles_active.avg"\n'
        '"","","","","cycle"\n"0","gemm","(1, 1, 1)","(1, 1, 1)","5"\n'
    )
    with pytest.raises(WattcastError, match=r"ncu --metrics"):
        read_profiled_kernel(path)
