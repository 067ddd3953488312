"""`lab bench`: a kernel of the user's own under the meter of the microbenchmarks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_machine import Machine, compiled

from judge_full_set import MEASURED
from wattcast.core.errors import BadInput, ExitCode
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.lab.microbench.own_kernel import (
    KernelParameter,
    count_flop,
    find_entry,
    find_parameters,
    make_operands,
    make_roofline,
    parse_shape,
    read_settings,
)

SOURCE = """
// __global__ void own_saxpy(int wrong);
/* a kernel as users write them */
template <int N> __device__ float twice(float x) { return N * x; }
__global__ void __launch_bounds__(256)
own_saxpy(const float *__restrict__ x, float* y, unsigned int n, double a)
{
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += (float)a * twice<2>(x[i]);
}
extern "C" __global__ void own_empty(void) {}
"""
PARAMETERS = (
    KernelParameter("x", "float", True),
    KernelParameter("y", "float", True),
    KernelParameter("n", "unsigned int", False),
    KernelParameter("a", "double", False),
)
SETTINGS = {"x": "4MiB", "y": "4MiB", "n": "1048576", "a": "0.5"}


def run(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wattcast", "lab", "bench", *words],
        env=machine.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def tell(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def test_a_signature_is_read_and_another_kernel_named() -> None:
    assert find_parameters(SOURCE, "own_saxpy") == PARAMETERS
    assert find_parameters(SOURCE, "own_empty") == ()
    with pytest.raises(BadInput, match="own_empty"):
        find_parameters(SOURCE, "saxpy")
    with pytest.raises(BadInput, match="float4"):
        find_parameters("__global__ void f(float4 x) {}", "f")


def test_nothing_is_guessed_of_parameters() -> None:
    """What is not told is named at once, with the words to tell it."""
    assert read_settings(PARAMETERS, SETTINGS) == (1 << 22, 1 << 22, 1048576, 0.5)
    with pytest.raises(BadInput, match=r"not told: y, a\. .*--set y=256MiB --set a=1"):
        read_settings(PARAMETERS, {"x": "1MiB", "n": "1"})
    with pytest.raises(BadInput, match="parameters of the kernel"):
        read_settings(PARAMETERS, SETTINGS | {"z": "1"})
    with pytest.raises(BadInput, match="unsigned int"):
        read_settings(PARAMETERS, SETTINGS | {"n": "many"})


def test_shapes_and_operands() -> None:
    assert parse_shape("64x32", "--blocks") == (64, 32, 1)
    with pytest.raises(BadInput, match="--blocks"):
        parse_shape("64x0", "--blocks")
    numbers = make_operands("float", 1 << 25)
    assert numbers.nbytes == 1 << 25
    assert 0.49 < numbers.mean() < 0.51
    assert not make_operands("int", 64).any()


def test_a_mangled_name_is_found() -> None:
    cubin = compiled(SOURCE, "sm_90a")
    assert find_entry(cubin, "own_empty") == "own_empty"
    assert find_entry(cubin, "own_saxpy").startswith("_Z9own_saxpy")
    with pytest.raises(BadInput, match="own_empty"):
        find_entry(cubin, "own_sax")


def test_a_roofline_counts_each_precision_with_its_own_peak() -> None:
    """fp64 has half of the H200's rate of fp32: as much work reaches twice the share."""
    gpu = load_gpu("h200")
    seconds = 1e-3
    bytes_alone = make_roofline(gpu, seconds, {}, 4.8e12 * seconds)
    assert bytes_alone.bound == "memory"
    assert bytes_alone.reached == pytest.approx(1.0)
    single = make_roofline(gpu, seconds, {Dtype.FP32: 1e10}, 1e6, 1.98e9)
    double = make_roofline(gpu, seconds, {Dtype.FP64: 1e10}, 1e6, 1.98e9)
    assert single.bound == double.bound == "compute"
    assert double.reached == pytest.approx(2.0 * single.reached)
    rates = {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum.per_cycle_elapsed": 3.0}
    counted = count_flop(rates | {"sm__cycles_elapsed.max": 10.0})
    assert counted == {Dtype.FP32: 60.0, Dtype.FP64: 0.0}


def test_a_kernel_is_measured_on_a_device(machine: Machine, tmp_path: Path) -> None:
    """The stand-in keeps time alone: 100 us a launch at 300 W."""
    source = tmp_path / "my.cu"
    source.write_text(SOURCE)
    words = [str(source), "--kernel", "own_saxpy", "--blocks", "4096", "--quick", "--json"]
    done = run(machine, *words, *tell(SETTINGS))
    assert done.returncode == ExitCode.OK, done.stderr
    plain = json.loads(done.stdout)
    assert plain["kernel"] == "own_saxpy"
    assert plain["power_w"] == pytest.approx(300.0, rel=0.03)
    assert plain["time_s"] >= 0.999e-4
    assert plain["energy_j"] == pytest.approx(plain["power_w"] * plain["time_s"])
    assert plain["resident_blocks"] == 8
    assert plain["waves"] == pytest.approx(4096 / (4 * 8))
    profile = tmp_path / "profile.csv"
    exported = gzip.decompress((MEASURED["eighth"] / "before_full.csv.gz").read_bytes()).decode()
    profile.write_text(exported.replace("octaves__before", "own_saxpy"))
    done = run(machine, *words, *tell(SETTINGS), "--profile", str(profile))
    plain = json.loads(done.stdout)
    adds, muls, fmas = 25.0, 24.0, 24.0  # of a thread of that kernel, by its machine code
    assert plain["roofline"]["flop"] == pytest.approx((adds + muls + 2 * fmas) * 2**24, rel=0.01)
    assert plain["roofline"]["bound"] == "memory"
    named = {line["bottleneck"] for line in plain["advice"]["advice"]}
    assert "conversions" in named
    launched = run(machine, *words, *tell(SETTINGS), "--launches", "3")
    assert json.loads(launched.stdout) == {"launches": 3}
    lacking = run(machine, *words, "--set", "n=1")
    assert lacking.returncode == ExitCode.BAD_INPUT
    assert "not told: x, y, a" in lacking.stderr
