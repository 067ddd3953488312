"""The hardware catalogue: every name is there, every number has a source, peaks are the published
ones.

The readers are tested on broken copies of a real file: each must be refused with one sentence that
names the file and the key.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.core import units
from wattcast.core.errors import BadInput, MissingSpecification, UnknownName
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu, gpu_names, load_gpu, load_gpu_file
from wattcast.hardware.catalogue_reader import (
    GPU_ALIASES,
    MAX_GPU_FILE_BYTE,
    list_boards,
    node_of_gpu,
    parse_gpu,
    strip_board,
)
from wattcast.hardware.gpu import ClockCurve

NAMES = [
    *(
        "v100-sxm",
        "a100-pcie-40gb",
        "a100-sxm-80gb",
        "a10",
        "a40",
        "l4",
        "l40s",
        "h100-pcie",
        "h100-sxm",
        "h200",
    ),
    *(
        "b200",
        "gtx-titan-x",
        "quadro-gv100",
        "tegra-k1",
        "gtx-660",
        "gtx-480",
        "quadro-fx-5600",
        "hd-7970",
    ),
    *(
        "rtx-4090",
        "l40",
        "rtx-a6000",
        "a30",
        "t4",
        "h100-nvl",
        "h200-nvl",
        "v100-pcie",
        "p100-pcie",
        "quadro-rtx-6000",
    ),
    *(
        "mi300x",
        "mi325x",
        "mi355x",
        "rtx-5090",
        "rtx-pro-6000",
        "gb200",
        "gb300",
        "b300",
        "h20",
        "a16",
        "gh200",
    ),
    "jetson-agx-orin",
    *("rtx-3070", "rtx-3090", "jetson-nano", "jetson-orin-nano", "jetson-orin-nx", "jetson-thor"),
]

# Dense peaks as their sources print them. A clock stands where the peak is stated at another clock
# than clocks.boost: Hopper and Blackwell state tensor peaks at one clock and the others at a higher
# one. Peaks of the seven cards whose sources say "quoted from memory" were written down together
# with their rates. They show that SMs, rates and clocks of such a file agree, not that the
# documents say so.
PEAKS = """\
gpu,pipe,dtype,peak,clock,source
rtx-4090,tensor,fp16,165.2 TFLOP/s,,NVIDIA Ada whitepaper V2.1 appendix
rtx-4090,tensor,tf32,82.6 TFLOP/s,,NVIDIA Ada whitepaper V2.1 appendix
l40,tensor,fp16,181.05 TFLOP/s,,NVIDIA L40 datasheet (2023)
l40,tensor,tf32,90.5 TFLOP/s,,NVIDIA L40 datasheet (2023)
l40,tensor,int8,362 TOP/s,,NVIDIA L40 datasheet (2023)
rtx-a6000,tensor,fp16,154.8 TFLOP/s,,NVIDIA GA102 whitepaper V2 appendix
rtx-a6000,tensor,tf32,77.4 TFLOP/s,,NVIDIA GA102 whitepaper V2 appendix
rtx-a6000,tensor,int8,309.7 TOP/s,,NVIDIA GA102 whitepaper V2 appendix
a30,tensor,fp16,165 TFLOP/s,,NVIDIA A30 datasheet (2022)
a30,tensor,tf32,82 TFLOP/s,,NVIDIA A30 datasheet (2022)
a30,tensor,int8,330 TOP/s,,NVIDIA A30 datasheet (2022)
v100-pcie,cuda,fp32,14 TFLOP/s,,NVIDIA Tesla V100 datasheet (2017)
v100-pcie,tensor,fp16,112 TFLOP/s,,NVIDIA Tesla V100 datasheet (2017)
p100-pcie,cuda,fp32,9.3 TFLOP/s,,NVIDIA Tesla P100 datasheet (2016)
quadro-rtx-6000,cuda,fp32,16.3 TFLOP/s,,NVIDIA Turing whitepaper appendix
quadro-rtx-6000,tensor,fp16,130.5 TFLOP/s,,NVIDIA Turing whitepaper appendix
quadro-rtx-6000,tensor,int8,261 TOP/s,,NVIDIA Turing whitepaper appendix
h100-nvl,tensor,fp64,60 TFLOP/s,1785 MHz,NVIDIA H100 NVL datasheet (2024)
h200-nvl,tensor,fp64,60 TFLOP/s,1785 MHz,NVIDIA H200 NVL datasheet (2024)
rtx-4090,cuda,fp32,82.6 TFLOP/s,,NVIDIA Ada whitepaper V2.1 appendix
rtx-4090,tensor,bf16,165.2 TFLOP/s,,NVIDIA Ada whitepaper V2.1 appendix
rtx-4090,tensor,fp8,330.3 TFLOP/s,,NVIDIA Ada whitepaper V2.1 appendix
rtx-4090,tensor,int8,660.6 TOP/s,,NVIDIA Ada whitepaper V2.1 appendix
l40,cuda,fp32,90.5 TFLOP/s,,NVIDIA L40 datasheet (2023)
l40,tensor,bf16,181.05 TFLOP/s,,NVIDIA L40 datasheet (2023)
l40,tensor,fp8,362 TFLOP/s,,NVIDIA L40 datasheet (2023)
rtx-a6000,cuda,fp32,38.7 TFLOP/s,,NVIDIA RTX A6000 datasheet (2021)
rtx-a6000,tensor,bf16,154.8 TFLOP/s,,NVIDIA GA102 whitepaper V2 appendix
a30,cuda,fp32,10.3 TFLOP/s,,NVIDIA A30 datasheet (2022)
a30,tensor,bf16,165 TFLOP/s,,NVIDIA A30 datasheet (2022)
a30,tensor,fp64,10.3 TFLOP/s,,NVIDIA A30 datasheet (2022)
t4,cuda,fp32,8.1 TFLOP/s,,NVIDIA T4 datasheet (2019)
t4,tensor,fp16,65 TFLOP/s,,NVIDIA T4 datasheet (2019)
t4,tensor,int8,130 TOP/s,,NVIDIA T4 datasheet (2019)
h100-nvl,cuda,fp32,60 TFLOP/s,1785 MHz,NVIDIA H100 NVL datasheet (2024)
h200-nvl,cuda,fp32,60 TFLOP/s,1785 MHz,NVIDIA H200 NVL datasheet (2024)
v100-sxm,cuda,fp64,7.8 TFLOP/s,,NVIDIA V100 datasheet (2020)
v100-sxm,cuda,fp32,15.7 TFLOP/s,,NVIDIA V100 datasheet (2020)
v100-sxm,cuda,fp16,31.4 TFLOP/s,,NVIDIA A100 whitepaper v1.0 table 4
v100-sxm,tensor,fp16,125 TFLOP/s,,NVIDIA V100 datasheet (2020)
quadro-gv100,cuda,fp64,7.4 TFLOP/s,,NVIDIA Quadro GV100 datasheet (2018)
quadro-gv100,cuda,fp32,14.8 TFLOP/s,,NVIDIA Quadro GV100 datasheet (2018)
quadro-gv100,tensor,fp16,118.5 TFLOP/s,,NVIDIA Quadro GV100 datasheet (2018)
a100-pcie-40gb,cuda,fp64,9.7 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,cuda,fp32,19.5 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,cuda,fp16,78 TFLOP/s,,NVIDIA A100 whitepaper v1.0 table 4
a100-pcie-40gb,cuda,bf16,39 TFLOP/s,,NVIDIA A100 whitepaper v1.0 table 4
a100-pcie-40gb,tensor,fp64,19.5 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,tensor,tf32,156 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,tensor,bf16,312 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,tensor,fp16,312 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-pcie-40gb,tensor,int8,624 TOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,cuda,fp64,9.7 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,cuda,fp32,19.5 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,cuda,fp16,78 TFLOP/s,,NVIDIA A100 whitepaper v1.0 table 4
a100-sxm-80gb,cuda,bf16,39 TFLOP/s,,NVIDIA A100 whitepaper v1.0 table 4
a100-sxm-80gb,tensor,fp64,19.5 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,tensor,tf32,156 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,tensor,bf16,312 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,tensor,fp16,312 TFLOP/s,,NVIDIA A100 datasheet r4 (2021)
a100-sxm-80gb,tensor,int8,624 TOP/s,,NVIDIA A100 datasheet r4 (2021)
a10,cuda,fp32,31.2 TFLOP/s,,NVIDIA A10 datasheet (2021)
a10,tensor,tf32,62.5 TFLOP/s,,NVIDIA A10 datasheet (2021)
a10,tensor,bf16,125 TFLOP/s,,NVIDIA A10 datasheet (2021)
a10,tensor,fp16,125 TFLOP/s,,NVIDIA A10 datasheet (2021)
a10,tensor,int8,250 TOP/s,,NVIDIA A10 datasheet (2021)
a40,cuda,fp32,37.4 TFLOP/s,,NVIDIA A40 datasheet (2021)
a40,tensor,tf32,74.8 TFLOP/s,,NVIDIA A40 datasheet (2021)
a40,tensor,bf16,149.7 TFLOP/s,,NVIDIA A40 datasheet (2021)
a40,tensor,fp16,149.7 TFLOP/s,,NVIDIA A40 datasheet (2021)
a40,tensor,int8,299.3 TOP/s,,NVIDIA A40 datasheet (2021)
l4,cuda,fp32,30.3 TFLOP/s,,NVIDIA L4 datasheet (2023)
l4,tensor,tf32,60 TFLOP/s,,NVIDIA L4 datasheet (2023): half of 120 with sparsity
l4,tensor,bf16,121 TFLOP/s,,NVIDIA L4 datasheet (2023): half of 242 with sparsity
l4,tensor,fp16,121 TFLOP/s,,NVIDIA L4 datasheet (2023): half of 242 with sparsity
l4,tensor,fp8,242.5 TFLOP/s,,NVIDIA L4 datasheet (2023): half of 485 with sparsity
l4,tensor,int8,242.5 TOP/s,,NVIDIA L4 datasheet (2023): half of 485 with sparsity
l40s,cuda,fp32,91.6 TFLOP/s,,NVIDIA L40S datasheet (2023)
l40s,tensor,tf32,183 TFLOP/s,,NVIDIA L40S datasheet (2023)
l40s,tensor,bf16,362.05 TFLOP/s,,NVIDIA L40S datasheet (2023)
l40s,tensor,fp16,362.05 TFLOP/s,,NVIDIA L40S datasheet (2023)
l40s,tensor,fp8,733 TFLOP/s,,NVIDIA L40S datasheet (2023)
l40s,tensor,int8,733 TOP/s,,NVIDIA L40S datasheet (2023)
h100-pcie,cuda,fp64,25.6 TFLOP/s,1755 MHz,NVIDIA H100 whitepaper V1.04
h100-pcie,cuda,fp32,51.2 TFLOP/s,1755 MHz,NVIDIA H100 whitepaper V1.04
h100-pcie,cuda,fp16,102.4 TFLOP/s,1755 MHz,NVIDIA H100 whitepaper V1.04
h100-pcie,cuda,bf16,102.4 TFLOP/s,1755 MHz,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,fp64,51.2 TFLOP/s,1755 MHz,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,tf32,378 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,bf16,756 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,fp16,756 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,fp8,1513 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-pcie,tensor,int8,1513 TOP/s,,NVIDIA H100 whitepaper V1.04
h100-sxm,cuda,fp64,33.5 TFLOP/s,1980 MHz,NVIDIA H100 whitepaper V1.04
h100-sxm,cuda,fp32,66.9 TFLOP/s,1980 MHz,NVIDIA H100 whitepaper V1.04
h100-sxm,cuda,fp16,133.8 TFLOP/s,1980 MHz,NVIDIA H100 whitepaper V1.04
h100-sxm,cuda,bf16,133.8 TFLOP/s,1980 MHz,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,fp64,66.9 TFLOP/s,1980 MHz,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,tf32,494.7 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,bf16,989.4 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,fp16,989.4 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,fp8,1978.9 TFLOP/s,,NVIDIA H100 whitepaper V1.04
h100-sxm,tensor,int8,1978.9 TOP/s,,NVIDIA H100 whitepaper V1.04
h200,cuda,fp64,34 TFLOP/s,1980 MHz,NVIDIA H200 datasheet (2024)
h200,cuda,fp32,67 TFLOP/s,1980 MHz,NVIDIA H200 datasheet (2024)
h200,tensor,fp64,67 TFLOP/s,1980 MHz,NVIDIA H200 datasheet (2024)
h200,tensor,tf32,494.5 TFLOP/s,,NVIDIA H200 datasheet (2024): half of 989 with sparsity
h200,tensor,bf16,989.5 TFLOP/s,,NVIDIA H200 datasheet (2024): half of 1979 with sparsity
h200,tensor,fp16,989.5 TFLOP/s,,NVIDIA H200 datasheet (2024): half of 1979 with sparsity
h200,tensor,fp8,1979 TFLOP/s,,NVIDIA H200 datasheet (2024): half of 3958 with sparsity
h200,tensor,int8,1979 TOP/s,,NVIDIA H200 datasheet (2024): half of 3958 with sparsity
b200,cuda,fp64,37 TFLOP/s,1965 MHz,NVIDIA HGX B200 datasheet (2025): an eighth of 296
b200,cuda,fp32,75 TFLOP/s,1965 MHz,NVIDIA HGX B200 datasheet (2025): an eighth of 600
b200,tensor,fp64,37 TFLOP/s,1965 MHz,NVIDIA HGX B200 datasheet (2025): an eighth of 296
b200,tensor,tf32,1125 TFLOP/s,,NVIDIA HGX B200 datasheet (2025): a sixteenth of 18 PFLOP/s with sparsity
b200,tensor,bf16,2250 TFLOP/s,,NVIDIA HGX B200 datasheet (2025): a sixteenth of 36 PFLOP/s with sparsity
b200,tensor,fp16,2250 TFLOP/s,,NVIDIA HGX B200 datasheet (2025): a sixteenth of 36 PFLOP/s with sparsity
b200,tensor,fp8,4500 TFLOP/s,,NVIDIA HGX B200 datasheet (2025): a sixteenth of 72 PFLOP/s with sparsity
b200,tensor,int8,4500 TOP/s,,NVIDIA HGX B200 datasheet (2025): a sixteenth of 72 POP/s with sparsity
gtx-titan-x,cuda,fp32,6.691 TFLOP/s,1089 MHz,TechPowerUp GeForce GTX TITAN X
tegra-k1,cuda,fp32,326 GFLOP/s,,NVIDIA Jetson TK1 figures (2014)
gtx-660,cuda,fp32,1.981 TFLOP/s,1032 MHz,TechPowerUp GeForce GTX 660
gtx-480,cuda,fp32,1344.96 GFLOP/s,,NVIDIA GTX 480 (2010): 480 cores x 2 x 1401 MHz
gtx-480,cuda,fp64,168.12 GFLOP/s,,NVIDIA GTX 480 (2010): an eighth of fp32
quadro-fx-5600,cuda,fp32,345.6 GFLOP/s,,TechPowerUp Quadro FX 5600
hd-7970,cuda,fp32,4096 GFLOP/s,,Harmonia (2015) section 2.2
hd-7970,cuda,fp32,3.789 TFLOP/s,925 MHz,TechPowerUp Radeon HD 7970
hd-7970,cuda,fp64,947.2 GFLOP/s,925 MHz,TechPowerUp Radeon HD 7970
h20,tensor,fp16,148 TFLOP/s,,zangshuxian.com
h20,tensor,bf16,148 TFLOP/s,,zangshuxian.com: as fp16
h20,tensor,tf32,74 TFLOP/s,,zangshuxian.com
h20,tensor,fp8,296 TFLOP/s,,zangshuxian.com
h20,tensor,int8,296 TOP/s,,willitrunai.com
gb200,tensor,fp4,10000 TFLOP/s,,NVIDIA GB200 NVL72 table: half of 20 PFLOP/s with sparsity
b200,tensor,fp4,9000 TFLOP/s,,NVIDIA GB200 NVL72 and HGX B200 table: half of 18 PFLOP/s with sparsity
rtx-pro-6000,tensor,fp4,2000 TFLOP/s,,topcpu.net: half of 4000 TOP/s with sparsity
gb200,tensor,tf32,1250 TFLOP/s,,NVIDIA GB200 NVL72 table: half of 2.5 PFLOP/s with sparsity
gb200,tensor,bf16,2500 TFLOP/s,,NVIDIA GB200 NVL72 table: half of 5 PFLOP/s with sparsity
gb200,tensor,fp16,2500 TFLOP/s,,NVIDIA GB200 NVL72 table: half of 5 PFLOP/s with sparsity
gb200,tensor,fp8,5000 TFLOP/s,,NVIDIA GB200 NVL72 table: half of 10 PFLOP/s with sparsity
gb200,tensor,int8,5000 TOP/s,,NVIDIA GB200 NVL72 table: half of 10 POP/s with sparsity
gb200,tensor,fp64,40 TFLOP/s,2062 MHz,NVIDIA GB200 NVL72 table
gb200,cuda,fp32,80 TFLOP/s,2062 MHz,NVIDIA GB200 NVL72 table
b300,tensor,tf32,1125 TFLOP/s,,glennklockwood.com
b300,tensor,bf16,2250 TFLOP/s,,glennklockwood.com
b300,tensor,fp16,2250 TFLOP/s,,glennklockwood.com
b300,tensor,fp8,4500 TFLOP/s,,glennklockwood.com
b300,tensor,fp4,13500 TFLOP/s,,PrimeIntellect-ai/prime-rl#3168 by NVIDIA's pages
gb300,tensor,tf32,1250 TFLOP/s,,verda.com
gb300,tensor,bf16,2500 TFLOP/s,,verda.com and PrimeIntellect-ai/prime-rl#3168
gb300,tensor,fp16,2500 TFLOP/s,,verda.com
gb300,tensor,fp8,5000 TFLOP/s,,verda.com
gb300,tensor,fp4,15000 TFLOP/s,,verda.com and PrimeIntellect-ai/prime-rl#3168
rtx-5090,tensor,fp16,209.5 TFLOP/s,,Linux Format May 2025: a quarter of 838 with sparsity and fp16 sums
rtx-5090,tensor,bf16,209.5 TFLOP/s,,Linux Format May 2025: a quarter of 838 with sparsity and fp16 sums
rtx-5090,tensor,fp4,1676 TFLOP/s,,Linux Format May 2025: half of 3352 with sparsity
rtx-5090,cuda,fp32,104.8 TFLOP/s,,pcpartcomparison.com
rtx-pro-6000,tensor,bf16,500 TFLOP/s,,topcpu.net: an eighth of 4000 TOP/s fp4 with sparsity
rtx-pro-6000,tensor,fp16,500 TFLOP/s,,topcpu.net: an eighth of 4000 TOP/s fp4 with sparsity
rtx-pro-6000,tensor,fp8,1000 TFLOP/s,,topcpu.net: a quarter of 4000 TOP/s fp4 with sparsity
rtx-pro-6000,cuda,fp32,125 TFLOP/s,,topcpu.net
a16,tensor,fp16,17.9 TFLOP/s,,NVIDIA A16 table at panchaea.com
a16,tensor,tf32,9 TFLOP/s,,NVIDIA A16 table at panchaea.com
a16,tensor,int8,35.9 TOP/s,,NVIDIA A16 table at panchaea.com
a16,cuda,fp32,4.5 TFLOP/s,,NVIDIA A16 table at panchaea.com
jetson-agx-orin,tensor,int8,85 TOP/s,,Jetson AGX Orin technical brief: half of 170 with sparsity
jetson-agx-orin,cuda,fp32,5.3 TFLOP/s,,Jetson AGX Orin technical brief
rtx-3090,tensor,fp16,71 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3090,tensor,bf16,71 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3090,tensor,tf32,35.6 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3090,tensor,int8,284 TOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3090,cuda,fp32,35.6 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3070,tensor,fp16,40.6 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3070,tensor,bf16,40.6 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3070,tensor,tf32,20.3 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3070,tensor,int8,162.6 TOP/s,,NVIDIA Ampere GA102 whitepaper V2
rtx-3070,cuda,fp32,20.3 TFLOP/s,,NVIDIA Ampere GA102 whitepaper V2
jetson-thor,tensor,fp4,1035 TFLOP/s,,Jetson Thor data sheet: half of 2070 with sparsity
jetson-orin-nx,tensor,int8,30 TOP/s,,Jetson Orin NX data sheet: half of 60 of the GPU with sparsity
mi300x,tensor,fp64,163.4 TFLOP/s,,AMD ROCm documentation
mi300x,tensor,tf32,653.7 TFLOP/s,,AMD ROCm documentation
mi300x,tensor,fp16,1307.4 TFLOP/s,,AMD ROCm documentation
mi300x,tensor,bf16,1307.4 TFLOP/s,,AMD ROCm documentation
mi300x,tensor,fp8,2614.9 TFLOP/s,,AMD ROCm documentation
mi300x,tensor,int8,2614.9 TOP/s,,AMD ROCm documentation
mi300x,cuda,fp32,163.4 TFLOP/s,,AMD ROCm documentation
mi300x,cuda,fp64,81.7 TFLOP/s,,AMD ROCm documentation
mi325x,tensor,fp16,1307 TFLOP/s,,Vultr after AMD's product page
mi355x,tensor,fp8,5000 TFLOP/s,,AMD at ISSCC 2026
mi355x,tensor,fp4,10066 TFLOP/s,,AMD Instinct MI355X datasheet: 10.1 PFLOP/s
mi355x,tensor,fp64,78.6 TFLOP/s,,humeconsulting.co
"""
# Rates that follow from others of the same chip or its kin; no page read states the peak.
FOLLOWING = {
    **{name: {"bf16", "fp16", "tf32", "fp8", "int8"} for name in ("h100-nvl", "h200-nvl")},
    "gh200": {"bf16", "fp16", "tf32", "fp8", "int8", "fp64"},
    "rtx-5090": {"tf32", "fp8", "int8"},
    "rtx-pro-6000": {"tf32", "int8"},
    "a16": {"bf16"},
    "jetson-agx-orin": {"bf16", "fp16"},
    "jetson-orin-nx": {"bf16", "fp16"},
    # 40 TOP/s with sparsity, of which 20.5 dense are a rounding away
    "jetson-orin-nano": {"bf16", "fp16", "int8"},
    "jetson-thor": {"bf16", "fp16", "fp8"},
    "mi325x": {"bf16", "tf32", "fp8", "int8", "fp64"},
    "mi355x": {"bf16", "fp16", "int8"},
}
FP32_FOLLOWING = {"h20", "gh200", "b300", "gb300", "mi325x", "mi355x"}
FP32_FOLLOWING |= {"jetson-nano", "jetson-orin-nano", "jetson-orin-nx", "jetson-thor"}
PEAK_ROWS = list(csv.DictReader(StringIO(PEAKS)))


@pytest.fixture(params=NAMES)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return load_gpu(request.param)


def test_the_catalogue_holds_exactly_the_frozen_names() -> None:
    assert gpu_names() == sorted(NAMES)


def test_every_number_has_a_source(gpu: Gpu) -> None:
    paths = [path for path, _ in _numbers(gpu, "")]
    assert len(paths) >= 14
    without = [
        path for path in paths if path not in gpu.claims or not gpu.claims[path].source.strip()
    ]
    assert without == []


def test_what_is_unknown_says_why_and_is_not_also_claimed(gpu: Gpu) -> None:
    assert not set(gpu.unknown) & set(gpu.claims)
    assert all(len(why.split()) >= 2 for why in gpu.unknown.values())
    absent = [path for path, value in _leaves(gpu, "") if value is None]
    assert sorted(absent) == sorted(gpu.unknown)


def test_what_a_prediction_needs_is_known(gpu: Gpu) -> None:
    assert gpu.memory.kind != "unknown"
    assert Dtype.FP32 in gpu.pipes.cuda_flop_per_cycle
    for path in (
        "sm_count",
        "memory.capacity_byte",
        "memory.byte_per_s",
        "clocks.boost_hz",
        "power.limit_w",
    ):
        assert gpu.need(path) > 0
    assert 0 < gpu.clocks.boost_hz <= gpu.clocks.max_hz


def test_orders_that_hold_on_any_chip(gpu: Gpu) -> None:
    clocks, power = gpu.clocks, gpu.power
    assert _in_order(clocks.min_hz, clocks.base_hz, clocks.max_hz)
    assert _in_order(power.min_limit_w, power.limit_w, power.max_limit_w)
    assert _in_order(gpu.sm.shared_byte_per_block, gpu.sm.shared_byte)
    assert list(clocks.memory_hz) == sorted(clocks.memory_hz, reverse=True)
    assert gpu.memory.clock_hz is None or gpu.memory.clock_hz in clocks.memory_hz


def test_peaks_are_the_published_ones() -> None:
    """SMs x rate x clock within 2 %: datasheets round to two or three digits."""
    for row in PEAK_ROWS:
        gpu, dtype = load_gpu(row["gpu"]), Dtype.parse(row["dtype"])
        rates = (
            gpu.pipes.tensor_flop_per_cycle
            if row["pipe"] == "tensor"
            else gpu.pipes.cuda_flop_per_cycle
        )
        clock_hz = units.parse(row["clock"], "Hz") if row["clock"] else gpu.clocks.boost_hz
        peak_per_s = units.parse(row["peak"], "op/s" if dtype is Dtype.INT8 else "flop/s")
        assert gpu.sm_count * rates[dtype] * clock_hz == pytest.approx(peak_per_s, rel=0.02), row
        assert row["source"], row
        assert not row["clock"] or clock_hz <= 1.02 * gpu.clocks.max_hz, row


def test_every_tensor_rate_has_a_published_peak() -> None:
    published = {(row["gpu"], row["dtype"]) for row in PEAK_ROWS if row["pipe"] == "tensor"}
    held = {
        (name, str(dtype)) for name in NAMES for dtype in load_gpu(name).pipes.tensor_flop_per_cycle
    }
    assert held - published == {
        (name, dtype) for name, dtypes in FOLLOWING.items() for dtype in dtypes
    }
    assert published <= held


def test_every_gpu_has_a_published_fp32_peak() -> None:
    assert {
        row["gpu"] for row in PEAK_ROWS if (row["pipe"], row["dtype"]) == ("cuda", "fp32")
    } == set(NAMES) - FP32_FOLLOWING


def test_memory_bandwidth_follows_from_bus_and_clock() -> None:
    """Bus width x transfers a clock x clock, where the bus is published: a check on clock
    conventions.
    """
    bus_bit = {
        "v100-sxm": 4096,
        "quadro-gv100": 4096,
        "a100-pcie-40gb": 5120,
        "a100-sxm-80gb": 5120,
        "h100-pcie": 5120,
    }
    bus_bit |= {
        "h100-sxm": 5120,
        "h200": 6016,
        "b200": 7680,
        "a10": 384,
        "a40": 384,
        "l4": 192,
        "l40s": 384,
    }
    bus_bit |= {
        "gtx-titan-x": 384,
        "gtx-660": 192,
        "gtx-480": 384,
        "quadro-fx-5600": 384,
        "tegra-k1": 64,
    }
    for name, bits in bus_bit.items():
        memory = load_gpu(name).memory
        assert memory.clock_hz is not None
        assert bits / 8 * 2 * memory.clock_hz == pytest.approx(memory.byte_per_s, rel=0.01), name


def test_curves_have_rising_clocks_and_voltages_that_never_fall(gpu: Gpu) -> None:
    for curve in (gpu.power.idle_w, gpu.power.voltage_v):
        if curve is not None:
            assert (np.diff(curve.clock_hz) > 0).all()
            assert (curve.value > 0).all()
            assert curve.clock_hz[-1] <= gpu.clocks.max_hz
            assert gpu.clocks.min_hz is None or curve.clock_hz[0] >= gpu.clocks.min_hz
    if gpu.power.voltage_v is not None:
        assert (np.diff(gpu.power.voltage_v.value) >= 0).all()
        assert 0.5 < gpu.power.voltage_v.value[0] <= gpu.power.voltage_v.value[-1] < 1.3


def test_which_gpus_have_published_curves() -> None:
    assert {n for n in NAMES if load_gpu(n).power.voltage_v} == {
        "a100-pcie-40gb",
        "a100-sxm-80gb",
        "tegra-k1",
        "hd-7970",
    }
    assert {n for n in NAMES if load_gpu(n).power.idle_w} == {
        "a100-pcie-40gb",
        "a100-sxm-80gb",
        "h100-sxm",
        "v100-pcie",
        "quadro-rtx-6000",
    }


@pytest.mark.parametrize(
    ("name", "curve", "clock", "value", "unit"),
    [
        ("a100-pcie-40gb", "voltage_v", "900 MHz", "693.75 mV", "V"),
        ("a100-pcie-40gb", "voltage_v", "1410 MHz", "893.75 mV", "V"),
        ("a100-sxm-80gb", "voltage_v", "1410 MHz", "918.75 mV", "V"),
        ("a100-pcie-40gb", "idle_w", "1410 MHz", "67.34 W", "W"),
        ("a100-sxm-80gb", "idle_w", "210 MHz", "60.28 W", "W"),
        ("h100-sxm", "idle_w", "1980 MHz", "120.14 W", "W"),
        ("hd-7970", "voltage_v", "925 MHz", "1.17 V", "V"),
        ("tegra-k1", "voltage_v", "852 MHz", "1.05 V", "V"),
    ],
)
def test_curves_at_published_points(
    name: str, curve: str, clock: str, value: str, unit: str
) -> None:
    found = getattr(load_gpu(name).power, curve).value_at(units.parse(clock, "Hz"))
    assert found == pytest.approx(units.parse(value, unit), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "folder", "table", "within"),
    [
        ("a100-pcie-40gb", "yz8", "supply_voltage", 0.001),
        ("a100-sxm-80gb", "netsres117", "supply_voltage", 0.001),
        ("a100-pcie-40gb", "yz8", "idle_power", 0.3),
        ("a100-sxm-80gb", "netsres117", "idle_power", 0.3),
        ("h100-sxm", "h100", "idle_power", 0.3),
    ],
)
def test_thinned_curves_reproduce_the_whole_table(
    name: str, folder: str, table: str, within: float
) -> None:
    """Within 1 mV and 0.3 W at every clock of the EnergAIzer artifact but the H100's 345 MHz, an
    outlier.
    """
    published = _reference_table(folder, table)
    if name == "h100-sxm":
        assert published.pop(345e6) > 1.5 * published[360e6]
    power = load_gpu(name).power
    curve, scale = (power.voltage_v, 1e-3) if table == "supply_voltage" else (power.idle_w, 1.0)
    assert curve is not None
    clock_hz = np.array(list(published))
    expected = np.array(list(published.values()), dtype=float) * scale
    assert np.abs(curve.value_at(clock_hz) - expected).max() <= within
    kept = np.isin(clock_hz, curve.clock_hz)
    assert kept.sum() == curve.clock_hz.size
    np.testing.assert_allclose(curve.value_at(clock_hz[kept]), expected[kept], rtol=1e-12)


def test_the_h100_voltage_table_is_empty() -> None:
    assert set(_reference_table("h100", "supply_voltage").values()) == {None}
    assert "null" in load_gpu("h100-sxm").unknown["power.voltage_v"]


def test_disputed_numbers_name_both_sides() -> None:
    l40s = load_gpu("l40s")
    assert l40s.memory.byte_per_s == 864e9
    claim = l40s.claims["memory.byte_per_s"]
    assert "NVIDIA" in claim.source
    assert (
        "846 GB/s",
        "Lee et al., EnergAIzer, arXiv:2604.20105 (2026), Table IV",
    ) in claim.disputed
    assert any(
        value == "50 MB" for value, _ in load_gpu("h200").claims["l2.capacity_byte"].disputed
    )
    assert load_gpu("h200").need("l2.capacity_byte") == 60 * 2**20


def test_aliases_resolve_and_spelling_does_not_matter() -> None:
    assert set(GPU_ALIASES.values()) <= {*NAMES, *list_boards()}
    assert not set(GPU_ALIASES) & set(NAMES)
    for alias, name in GPU_ALIASES.items():
        assert load_gpu(alias) is load_gpu(name)
    assert load_gpu("H100 SXM") is load_gpu("h100_sxm") is load_gpu("h100-sxm")


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_that_drivers_print_are_known(printed: str, name: str) -> None:
    """A log of power says which card it is of as nvidia-smi does; most such names were refused."""
    assert load_gpu(printed) is load_gpu(name)


def test_a_board_is_its_gpu_under_another_name() -> None:
    assert not set(list_boards()) & set(NAMES)
    for name, part_number in list_boards().items():
        board, gpu = load_gpu(part_number.lower()), load_gpu(strip_board(name))
        assert (board.name, board.board, gpu.board) == (name, part_number, "")
        assert replace(board, name=gpu.name, title=gpu.title, board="") == gpu
        assert node_of_gpu(name) == node_of_gpu(gpu.name)
        assert name in list_boards(gpu.name)
    assert list_boards("a10") == {}


def test_an_unknown_gpu_gets_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match=r"unknown gpu 'h201'.*h20"):
        load_gpu("h201")


def test_an_unpublished_number_says_why() -> None:
    with pytest.raises(
        MissingSpecification, match=r"a40: l2.byte_per_cycle is unknown \(not published for GA102\)"
    ):
        load_gpu("a40").need("l2.byte_per_cycle")


def test_no_gpu_file_names_this_machine() -> None:
    text = "".join(_bytes(name).decode() for name in NAMES)
    assert not re.search(r"/work/|/tmp/|/home/", text)


# Broken files. Each is the H200's with one edit: (what is broken, edit, what the message must
# hold).

Edit = Callable[[str], str]


def _put(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert text.count(old) >= 1, old
        return text.replace(old, new, 1)

    return edit


BROKEN: list[tuple[str, Edit, str]] = [
    (
        "unknown key",
        _put("  boost:", "  bosst:"),
        r"clocks: .*unknown field `bosst`.*Closest: boost",
    ),
    ("unknown top key", _put("vendor:", "vendro:"), r"vendro"),
    (
        "unknown key of a leaf",
        _put("{value: 132, ", "{value: 132, unit: SM, "),
        r"sm_count: .*unit",
    ),
    ("missing group", _put("links:", "links: {}\nold:"), r"links|old"),
    (
        "wrong unit",
        _put("value: 60 MiB", "value: 60 MHz"),
        r"l2\.capacity: expected a quantity in byte.*60 MHz",
    ),
    (
        "no unit",
        _put("value: 60 MiB", "value: 60"),
        r"l2\.capacity: .*Write the unit beside the number",
    ),
    (
        "unit on a count",
        _put("value: 132,", "value: 132 W,"),
        r"sm_count: expected a pure number, got '132 W'",
    ),
    (
        "flop for op",
        _put("{value: 8192 OP/cycle", "{value: 8192 FLOP/cycle"),
        r"pipes\.tensor_per_cycle_sm\.int8",
    ),
    (
        "missing source",
        _put("{value: 132, source: attributes}", "{value: 132}"),
        r"sm_count: expected a source",
    ),
    (
        "undeclared source",
        _put("132, source: attributes", "132, source: hearsay"),
        r"sm_count\.source.*'hearsay'",
    ),
    ("NaN", _put("value: 132,", "value: .nan,"), r"sm_count\.value: expected a finite number"),
    ("infinity", _put("value: 132,", "value: .inf,"), r"sm_count\.value: expected a finite number"),
    (
        "NaN in words",
        _put("value: 700 W", "value: nan W"),
        r"power\.limit: expected a quantity in W",
    ),
    (
        "negative",
        _put("value: 700 W", "value: -700 W"),
        r"power\.limit: expected a number above zero",
    ),
    ("zero", _put("value: 132,", "value: 0,"), r"sm_count: expected a number above zero"),
    ("list for a number", _put("value: 132,", "value: [132],"), r"sm_count\.value"),
    ("boolean for a number", _put("value: 132,", "value: true,"), r"sm_count\.value"),
    (
        "needed but unknown",
        _put("{value: 132, source: attributes}", "{unknown: secret}"),
        r"sm_count: expected a value",
    ),
    (
        "value and unknown",
        _put("{value: 132, source", "{value: 132, unknown: secret, source"),
        r"sm_count: .*both",
    ),
    (
        "neither",
        _put("{value: 132, source: attributes}", "{source: attributes}"),
        r"sm_count: .*neither",
    ),
    (
        "unknown dtype",
        _put("    fp8:", "    fp9:"),
        r"mine.yaml: pipes.tensor_per_cycle_sm: .*fp8.*'fp9'",
    ),
    ("disputed unit", _put("value: 50 MB,", "value: 50 MHz,"), r"l2\.capacity\.disputed: .*50 MHz"),
    (
        "disputed source",
        _put("50 MB, source: whitepaper", "50 MB, source: x"),
        r"l2\.capacity\.disputed\.source",
    ),
    (
        "memory clock",
        _put("- {value: 2201 MHz", "- {value: 2201 W"),
        r"clocks\.memory\[1\]: .*2201 W",
    ),
    (
        "anchor",
        _put("value: 132,", "value: &sms 132,"),
        r"line \d+: expected plain values, got 'an anchor or alias'",
    ),
    (
        "alias",
        _put("value: 132,", "value: *sms ,"),
        r"line \d+: expected plain values|not valid YAML",
    ),
    (
        "duplicate key",
        _put("vendor: NVIDIA", "vendor: NVIDIA\nvendor: AMD"),
        r"'vendor' stands twice",
    ),
    (
        "duplicate key inside",
        _put("{value: 132,", "{value: 132, value: 133,"),
        r"'value' stands twice",
    ),
    ("tab", _put("  boost:", "\tboost:"), r"not valid YAML"),
    (
        "tag",
        _put("value: 132,", "value: !!python/name:os.system ,"),
        r"line \d+: expected plain values, got .a tag",
    ),
    ("not a mapping", lambda text: "- 1\n- 2\n", r"expected `object`, got `array`"),
    ("empty", lambda text: "", r"expected `object`, got `null`"),
    ("deep", lambda text: "[" * 500 + "]" * 500, r"at most 64 levels"),
    (
        "curve lengths",
        _put(
            'idle: {unknown: "no',
            'idle: {clock: [1 GHz, 2 GHz], value: [80 W], source: nvml, note: "no',
        ),
        r"power\.idle: expected 2 values, one a clock, got 1",
    ),
    (
        "curve unit",
        _put(
            'idle: {unknown: "no',
            'idle: {clock: [1 GHz, 2 V], value: [80 W, 90 W], source: nvml, note: "no',
        ),
        r"power\.idle\.clock\[1\]: expected a quantity in Hz.*2 V",
    ),
    (
        "curve number",
        _put('idle: {unknown: "no', 'idle: {clock: [1 GHz], value: [80], source: nvml, note: "no'),
        r"power\.idle\.value\[0\]",
    ),
]


@pytest.mark.parametrize(("edit", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_file_is_refused_by_name_and_key(edit: Edit, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_gpu(edit(_bytes("h200").decode()).encode(), "mine", "mine.yaml")
    said = str(caught.value)
    assert re.search(message, said), said
    assert "\n" not in said
    assert len(said) < 600
    if message != r"mine.yaml: pipes.tensor_per_cycle_sm: .*fp8.*'fp9'":
        assert said.startswith("mine.yaml:")


def test_falling_clocks_in_a_curve_are_refused() -> None:
    edit = _put(
        'idle: {unknown: "no',
        'idle: {clock: [2 GHz, 1 GHz], value: [80 W, 90 W], source: nvml, note: "no',
    )
    with pytest.raises(BadInput, match="rising clocks"):
        parse_gpu(edit(_bytes("h200").decode()).encode(), "mine", "mine.yaml")


def test_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(BadInput, match=r"mine.yaml: not UTF-8 text \(byte 7\)"):
        parse_gpu(b"title: \xff\xfe", "mine", "mine.yaml")


@given(st.data())
def test_a_truncated_file_is_refused_wherever_it_ends(data: st.DataObject) -> None:
    whole = _bytes("h200").rstrip()
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadInput, match=r"^mine\.yaml: "):
        parse_gpu(whole[:end], "mine", "mine.yaml")


@given(st.text(max_size=40))
def test_any_text_for_a_number_is_a_quantity_or_an_error_with_its_path(text: str) -> None:
    value = json.dumps(text)  # a JSON string is a YAML string
    mine = _put("value: 700 W", f"value: {value}")(_bytes("h200").decode()).encode()
    if (limit_w := _watt(text)) is not None and limit_w > 0:
        assert parse_gpu(mine, "mine", "mine.yaml").power.limit_w == limit_w
    else:
        with pytest.raises(BadInput, match=r"^mine\.yaml: (power\.limit: |not valid YAML)"):
            parse_gpu(mine, "mine", "mine.yaml")


@given(st.integers(10, 100), st.sampled_from(["W", "kW", "mW"]))
def test_a_users_limit_arrives_in_watts(number: int, unit: str) -> None:
    mine = _put("value: 700 W", f"value: {number} {unit}")(_bytes("h200").decode())
    scale = {"W": 1.0, "kW": 1e3, "mW": 1e-3}[unit]
    assert parse_gpu(mine.encode(), "mine", "mine.yaml").power.limit_w == pytest.approx(
        number * scale
    )


def test_a_users_own_file_loads_under_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "my-h200.yaml"
    path.write_bytes(_bytes("h200"))
    mine = load_gpu_file(path)
    assert mine.name == "my-h200"
    assert mine.clocks == load_gpu("h200").clocks
    assert mine.claims == load_gpu("h200").claims


def test_a_users_file_that_is_too_large_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * (MAX_GPU_FILE_BYTE + 1))
    with pytest.raises(BadInput, match=r"big.yaml: expected at most \d+ bytes"):
        load_gpu_file(path)
    with pytest.raises(BadInput, match=r"none.yaml: cannot be read"):
        load_gpu_file(tmp_path / "none.yaml")


def _watt(text: str) -> float | None:
    try:
        return units.parse(text, "W")
    except BadInput:
        return None


def _bytes(name: str) -> bytes:
    import wattcast.hardware

    return (Path(wattcast.hardware.__file__).parent / "catalogue" / f"{name}.yaml").read_bytes()


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything a file states as a number, curves and None included."""
    for item in fields(node):
        value, path = getattr(node, item.name), f"{prefix}{item.name}"
        if item.name in ("claims", "unknown", "node") or isinstance(value, str):
            continue
        if is_dataclass(value) and not isinstance(value, ClockCurve):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, Mapping):
            yield from ((f"{path}.{key}", number) for key, number in value.items())
        elif isinstance(value, tuple):
            yield from ((f"{path}[{i}]", number) for i, number in enumerate(value))
        else:
            yield path, value


def _numbers(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    return ((path, value) for path, value in _leaves(node, prefix) if value is not None)


def _in_order(*values: Any) -> bool:
    known = [value for value in values if value is not None]
    return known == sorted(known)


def _reference_table(folder: str, table: str) -> dict[float, Any]:
    beside = Path(__file__).resolve().parents[3] / "shared" / "reference"
    root = Path(os.environ.get("WATTCAST_REFERENCE", beside))
    path = root / "energaizer" / "config" / "dvfs" / folder / f"{table}.json"
    if not path.is_file():
        pytest.skip(
            "the EnergAIzer artifact is not here; set WATTCAST_REFERENCE to the reference folder"
        )
    return {float(clock) * 1e6: value for clock, value in json.loads(path.read_text()).items()}


def test_a_node_where_a_gpu_is_wanted_says_which_gpus_it_has() -> None:
    with pytest.raises(BadInput, match=r"such as h100-sxm, h20, with `--node hgx-h100`"):
        load_gpu("hgx-h100")
