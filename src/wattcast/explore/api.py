"""Explore from Python: the same names and units as the command line.

    from wattcast import explore
    found = explore.designs("llama3-8b", "h200", ["sm_count=64:192:4", "memory.bandwidth=2TB/s,8TB/s"], seq=1024)
    found.summary.front["latency_s"]

Columns are NumPy arrays in SI units, named with their unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wattcast import units
from wattcast.api import find_gpu
from wattcast.errors import bad_value
from wattcast.explore import space as spaces
from wattcast.explore import where as constraints
from wattcast.explore.study import Study
from wattcast.explore.sweep import Progress, Runner, Swept, run
from wattcast.fitted import Bundle, bundle_for
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.workload import source
from wattcast.workload.graph import Graph
from wattcast.workload.options import Options

Workload = str | Path | Graph | Mapping[str, object]


def designs(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    *,
    where: Sequence[str] = (),
    sample: str | None = None,
    seed: int = 0,
    front: Sequence[str] = ("latency_s", "power_w"),
    clock: str | None = None,
    power_limit: str | None = None,
    out: str | Path | None = None,
    runner: Runner | None = None,
    progress: Progress | None = None,
    yes: bool = False,
    bundle: Bundle | None = None,
    **options: object,
) -> Swept:
    """Every point of a space of chips and settings, with the governor; the front, the best, all of them to ``out``.

    ``vary`` and ``where`` are written as on the command line (``explore/space.py``); ``options`` are those of
    :class:`~wattcast.workload.options.Options`.
    """
    found = study(workload, gpu, vary, where, sample, seed, clock, power_limit, bundle, **options)
    return run(found, None if out is None else Path(out), tuple(front), runner, progress, yes)


def study(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    where: Sequence[str] = (),
    sample: str | None = None,
    seed: int = 0,
    clock: str | None = None,
    power_limit: str | None = None,
    bundle: Bundle | None = None,
    **options: object,
) -> Study:
    """The study these words describe."""
    chip = find_gpu(gpu)
    space = spaces.parse(list(vary), chip, sample, seed)
    for name, value in (("clock", clock), ("power_limit", power_limit)):
        if value is not None and any(axis.field.name == name for axis in space.axes):
            raise bad_value(name, "one value, or --vary", "both")
    at = OperatingPoint(
        clock_hz=None if clock is None else _clock(chip, clock),
        power_limit_w=None if power_limit is None else units.parse(power_limit, "W", "power_limit"),
    )
    graph = source.load(workload, Options.of(**options))
    return Study(graph, chip, bundle or bundle_for(chip), space, at, constraints.parse(where, chip, space.columns))


def _clock(gpu: Gpu, text: str) -> float:
    """A locked clock within what the card can be set to, as a space of one value would check it."""
    return float(spaces.parse([f"clock={text}"], gpu).axes[0].values[0])
