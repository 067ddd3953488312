"""``wattcast_power.hpp``, compiled: the watts of a C++ simulator are those of the command."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wattcast.core import files
from wattcast.lab.gpuwattch.simulated_power import make_power_trace
from wattcast.lab.gpuwattch.trace_request import TraceRequest

SAMPLES = 60
EXAMPLE = """
#include "wattcast_power.hpp"
#include <cstdio>
int main(int, char** argv) {
  wattcast::PowerMeter meter(argv[2], {"TOT_INST", "INT_ACC", "IDLE_CORE_N"}, {"--sms", "80"}, argv[1]);
  const auto watts = meter.sample(500, {1200, 38400, 2});
  if (watts[0] > 25.0) meter.set_clock(0.9e9, 0.85);
  std::printf("%s %d\\n", meter.parts()[0].c_str(), static_cast<int>(watts[0] > 0.0));
}
"""


def compile_program(source: Path, binary: Path) -> None:
    """Compile a program that includes the header, with warnings as errors."""
    header = Path(str(files("wattcast.lab.gpuwattch").joinpath("wattcast_power.hpp")))
    options = ["-std=c++11", "-Wall", "-Wextra", "-Werror", f"-I{header.parent}"]
    subprocess.run(["g++", *options, str(source), "-o", str(binary)], check=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program that is this version of ``wattcast``."""
    path = tmp_path / "wattcast"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m wattcast "$@"\n')
    path.chmod(0o755)
    return path


def run_simulator(binary: Path, *arguments: str) -> list[str]:
    """Run a compiled simulator and return the lines that it printed."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [str(binary), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=variables,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_the_header_gives_the_watts_of_the_command(
    reference: Path, program: Path, tmp_path: Path
) -> None:
    """The header of a metric trace is taken as it is: CONST_DYNAMICN was refused as unknown."""
    folder = reference / "simulator_runs" / "gtx480_gpuwattch"
    config = folder / "gpuwattch_gtx480.xml"
    energies = reference / "accelwattch" / "coefficients" / "gpuwattch_gtx480.csv"
    text = gzip.decompress((folder / "metric_trace.log.gz").read_bytes()).decode()
    trace = tmp_path / "metric_trace.log"
    trace.write_text("".join(text.splitlines(keepends=True)[: SAMPLES + 1]))
    binary = tmp_path / "simulator"
    compile_program(Path(__file__).with_name("simulator_samples.cpp"), binary)
    options = ["--energies", str(energies)]
    *watts, kind = run_simulator(binary, str(program), str(config), str(trace), *options)
    assert kind == "total"
    request = TraceRequest(trace, config, energies, tmp_path / "out", figure=False, parquet=False)
    make_power_trace(request)
    rows = (tmp_path / "out" / "power_trace.log").read_text().splitlines()[1:]
    total_w = np.array([float(row.split(",")[0]) for row in rows])
    # rows that GPGPU-Sim repeats where a kernel ends are dropped by the command
    kept = [float(watt) for watt in watts]
    assert len(total_w) <= len(kept) == SAMPLES
    place = 0
    for watt in total_w:
        while abs(kept[place] - watt) > 1e-5:
            place += 1
        place += 1


@pytest.mark.parametrize(
    "config",
    [
        "h200",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("b200", "accelwattch_ptx_sim.xml")),
    ],
)
def test_the_headers_own_example_runs(
    reference: Path, program: Path, tmp_path: Path, config: str
) -> None:
    """Three counters show three components; the example threw for every architecture."""
    source = tmp_path / "example.cpp"
    source.write_text(EXAMPLE)
    binary = tmp_path / "example"
    compile_program(source, binary)
    if config.endswith(".xml"):
        config = str(reference / "accelwattch" / "xml" / config)
    assert run_simulator(binary, str(program), config) == ["power_at_least 1"]
