"""How long a prediction takes, beside what simulating or profiling the same kind of model took others.

Processor time of this process, warm: the median of several predictions of one model whose graph and factors
are forgotten between them. Paper 003 gives 1.8 s a workload for its own tool (Table II).
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.fitted import bundle_for
from wattcast.hardware import OperatingPoint
from wattcast.prediction import predict
from wattcast.validate.rows import Row, row
from wattcast.workload.build import _build, build
from wattcast.workload.options import Options

WHERE, TIMES = "wall time of one prediction", 5
PUBLISHED = "EnergAIzer 1.8 s (Table II)"


def wall_rows(gpu: str) -> list[Row]:
    """Seconds of each model of ``walltime.csv``."""
    chip = hardware.load(gpu)
    bundle = bundle_for(chip)
    out = []
    with Path(__file__).with_name("walltime.csv").open(newline="", encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    for entry in table:
        options = Options(batch=int(entry["batch"]), seq=int(entry["seq"]) if entry["seq"] else None)
        seconds = []
        for _ in range(TIMES + 1):
            _build.cache_clear()
            if bundle.learned is not None:
                bundle.learned._kept.clear()
            began_s = time.process_time()
            predict(build(entry["model"], options), chip, OperatingPoint(), bundle)
            seconds.append(time.process_time() - began_s)
        taken_s = float(np.median(seconds[1:]))
        more: dict[str, Any] = {"seconds": round(taken_s, 4), "profiled_s": float(entry["profiled_s"])}
        if entry["simulated_s"]:
            more["simulated_s"] = float(entry["simulated_s"])
        more["profiling_over_ours"] = round(more["profiled_s"] / taken_s)
        out.append(row(WHERE, entry["model"], TIMES, None, None, PUBLISHED, **more))
    return out
