"""Studies whose axes are every size of a chip, and designs drawn from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast.explore import explorations
from wattcast.explore.study import Columns, Study

# Name, least and most value, and how the values are written on the command line
RESOURCES = {
    "sm_count": "24:480",
    "l2.capacity": "4MB:8GB",
    "memory.bandwidth": "0.4TB/s:20TB/s",
    "sm.shared_capacity": "32KiB:1024KiB",
    "sm.registers": "8192:262144",
    "sm.threads": "256:4096",
    "sm.shared_per_cycle": "16B/cycle:512B/cycle",
    "pipes.int32_per_cycle_sm": "8OP/cycle:256OP/cycle",
    "pipes.sfu_per_cycle_sm": "2OP/cycle:64OP/cycle",
    "tensor": "0.1:8",
    "sparsity": "1:2",
    "clock": "600MHz:1980MHz",
}
L2_WIDTH = {"l2.per_cycle": "500B/cycle:20000B/cycle"}

# Every law of designs is checked on these: language models by prompt, by step and in training,
# vision, encoders, experts, eager and compiled stacks.
WORKLOADS: list[tuple[str, dict[str, Any]]] = [
    ("llama3-8b", {"phase": "decode", "batch": 8, "seq": 1024}),
    ("llama3-8b", {"batch": 4, "seq": 512}),
    ("gpt2", {"stack": "eager", "batch": 16, "seq": 256}),
    ("resnet50", {"batch": 32}),
    ("llama3-8b", {"phase": "train", "batch": 1, "seq": 512}),
    ("qwen3-30b-a3b", {"phase": "decode", "batch": 32, "seq": 2048}),
    ("llama3-8b", {"phase": "decode", "batch": 64, "seq": 4096, "dtype": "fp8"}),
    ("llama3-8b", {"phase": "decode", "batch": 1, "seq": 8192, "weights": "int4"}),
    ("llama3-8b", {"stack": "eager", "batch": 1, "seq": 2048}),
    ("bert-large", {"batch": 32, "seq": 128}),
    ("bert-base", {"batch": 8, "seq": 512, "dtype": "fp32"}),
    ("gpt2-xl", {"phase": "decode", "batch": 4, "seq": 512, "stack": "compiled"}),
    ("opt-6.7b", {"batch": 2, "seq": 1024, "stack": "eager"}),
    ("vit-large", {"batch": 16}),
    ("resnet101", {"batch": 8, "phase": "train"}),
    ("mixtral-8x7b", {"phase": "decode", "batch": 16, "seq": 1024}),
    ("qwen3-8b", {"batch": 1, "seq": 16384}),
    ("mistral-7b", {"phase": "decode", "batch": 128, "seq": 512}),
    ("gpt2-large", {"batch": 4, "seq": 1024, "attention": "eager", "stack": "eager"}),
    ("llama3-70b", {"phase": "decode", "batch": 16, "seq": 1024, "tp": 4}),
]
POWER_WITHOUT_BOUND = "100000W"


def build_laws_study(workload: str, options: dict[str, Any], *, l2_width: bool) -> Study:
    """Build a study over every resource, at fixed clocks and with power unbounded.

    The supply's slow-down under tensor load stays: a fixed clock is the one that was set.
    """
    axes = RESOURCES | (L2_WIDTH if l2_width else {})
    words = [f"{name}={span}" for name, span in axes.items()]
    return explorations.build_study(
        workload,
        "h200",
        words,
        sample="random:256",
        power_limit=POWER_WITHOUT_BOUND,
        **options,
    )


def draw_designs(study: Study, count: int, seed: int) -> Columns:
    """Draw designs over the study's axes, evenly in the logarithm; a tenth of the values are the
    base's own.
    """
    random = np.random.default_rng(seed)
    columns: Columns = {}
    for axis in study.space.axes:
        low, high = float(axis.values.min()), float(axis.values.max())
        values = np.exp(random.uniform(np.log(low), np.log(high), count))
        if axis.field.name == "sparsity":
            values = random.choice([1.0, 2.0], count)
        columns[axis.field.column] = np.round(values) if axis.field.whole else values
    return columns
