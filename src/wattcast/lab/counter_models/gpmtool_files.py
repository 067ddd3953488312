"""Read files of the form of ``micro_gtxtitanx.csv``: watts over the clock plane, utilisations at
the default clocks.

Four header lines (number of domains; default clock in MHz of each; components in each; component
names), then rows of watts, clock of each domain in MHz, and the components' utilisations, which
were measured at the default clocks only [Guerreiro2018]. Rows with equal utilisations are one
benchmark.

How activity scales. At other clocks the same work takes t/t₀ = max(f₀/f, U_dram·m₀/(s·m)) times as
long: a kernel follows the core clock f until its memory traffic would need more than the attainable
share s of the bandwidth at memory clock m. All its rates go down by that factor together. Without s
(None) core rates follow the core clock and memory rates the memory clock. The corner is rounded by
a norm of order 30, which keeps the law smooth."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from pathlib import Path

import numpy as np

from wattcast.control.program_blocks import parse_program_blocks
from wattcast.core.arrays import Array, index_distinct
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import (
    decode_text,
    read_bytes,
    read_number,
    read_shipped_table,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.counter_table import (
    CounterPredictor,
    CounterRates,
    CounterTable,
)
from wattcast.lab.counter_models.launch_power import query_nsys
from wattcast.lab.counter_models.rail_terms import ACTIVE_CYCLE
from wattcast.measure.power_log_forms import read_dcgm_rounds
from wattcast.power.activity import Activity, ActivitySource

HEADER_LINES = 4
BUSY_SHARE_EVENTS = {"core": "core_busy_share", "memory": "memory_busy_share"}
CORNER_SHARPNESS = 30.0
SATURATION = "memory_saturation"  # s among the numbers of a table's scaling
LARGEST_UTILISATION = 1.5  # counters overshoot a little
MHZ = 1e6
STRETCH = 10  # rounds of a DCGM log that are held out together
# component as the tool writes it -> event; the first word of a name is the family it shares
# strength with
COMPONENT_EVENTS = {
    row["component"]: row["event"]
    for row in read_shipped_table("wattcast.lab.counter_models", "map_gpmtool.csv")
}


@dataclass(frozen=True)
class UtilisationFile:
    """The contents of a file: utilisations at the default clocks, and names of the rows or their
    watts and clocks.
    """

    name: str
    share: Array  # (row, component), 0 to 1
    components: tuple[str, ...]
    on_memory: tuple[bool, ...]
    default_hz: tuple[float, float]
    names: tuple[str, ...] = ()  # (row,)
    power_w: Array = field(default_factory=lambda: np.zeros(0))  # (row,)
    clock_hz: Array = field(default_factory=lambda: np.zeros(0))
    memory_clock_hz: Array = field(default_factory=lambda: np.zeros(0))


MOST_MHZ = 1e12  # clocks in hertz by mistake are told by their spread, in `_read_file`


def read_utilisations(path: Path) -> UtilisationFile:
    """Read a file of this form and check every cell."""
    file, (power_w, mhz, memory_mhz), _ = _read_file(path, 3)
    for name, clocks in (("core", mhz), ("memory", memory_mhz)):
        if clocks.size and clocks.max() > MOST_MHZ:
            wanted = f"{name} clocks of at most {MOST_MHZ:g} MHz"
            raise bad_value(path.name, wanted, float(clocks.max()))
    return replace(
        file,
        power_w=power_w,
        clock_hz=mhz * MHZ,
        memory_clock_hz=memory_mhz * MHZ,
    )


def read_applications(path: Path) -> UtilisationFile:
    """Read a file with the same header whose rows are a name and utilisations."""
    file, _, names = _read_file(path, 1)
    return replace(file, names=names)


def _read_file(path: Path, before: int) -> tuple[UtilisationFile, Array, tuple[str, ...]]:
    """Return a file, and the numbers before its utilisations, or the name where there is one cell
    ``before`` them.
    """
    where = path.name
    text = decode_text(read_bytes(path), path.name)
    lines = [row for row in csv.reader(text.splitlines()) if row]
    if len(lines) < HEADER_LINES + 1:
        raise bad_value(where, f"{HEADER_LINES} header lines and rows", f"{len(lines)} lines")
    if lines[0][0].strip() != "2":
        raise bad_value(f"{where}: line 1", "2 clock domains (core, memory)", lines[0][0])
    default, sizes = (_read_cells(lines[n - 1], where, n) for n in (2, 3))
    names = tuple(cell.strip() for cell in lines[3])
    if len(default) != 2 or len(sizes) != 2 or int(sizes[0]) + int(sizes[1]) != len(names):
        raise bad_value(
            f"{where}: lines 2 to 4",
            "two clocks, two sizes, and that many names",
            f"{len(names)} names",
        )
    unknown = [name for name in names if name.upper() not in COMPONENT_EVENTS]
    if unknown:
        raise bad_value(
            f"{where}: line 4",
            f"components among {', '.join(COMPONENT_EVENTS)}",
            ", ".join(unknown),
        )
    rows = dict(enumerate(lines[HEADER_LINES:], HEADER_LINES + 1))
    for line, row in rows.items():
        if len(row) != before + len(names):
            wanted = (
                f"a name and {len(names)} utilisations"
                if before == 1
                else f"{before + len(names)} cells"
            )
            raise bad_value(f"{where}: line {line}", wanted, f"{len(row)}", "Is the file complete?")
    body = np.array(
        [_read_cells(row, where, line, 1 if before == 1 else 0) for line, row in rows.items()]
    )
    share = body[:, -len(names) :]
    _check_shares(share, names, where)
    on_memory = tuple(i >= int(sizes[0]) for i in range(len(names)))
    file = UtilisationFile(where, share, names, on_memory, (default[0] * MHZ, default[1] * MHZ))
    return file, body[:, : -len(names)].T, tuple(row[0] for row in rows.values())


def make_utilisation_table(file: UtilisationFile, saturation: float | None) -> CounterTable:
    """Return occurrences at every row's clocks under the scaling law above with s =
    ``saturation``.
    """
    work = ["/".join(f"{u:.6g}" for u in row) for row in file.share]
    seen, benchmark = index_distinct(work)
    busy_hz = np.array([file.default_hz[memory] for memory in file.on_memory])
    core = file.clock_hz / file.default_hz[0]
    memory = file.memory_clock_hz / file.default_hz[1]
    pace = _scale_rates(
        core[:, np.newaxis], memory[:, np.newaxis], file.share, file.on_memory, saturation
    )
    predictors = []
    for name, on_memory, full_hz in zip(
        file.components, file.on_memory, busy_hz.tolist(), strict=True
    ):
        rail = "memory" if on_memory else "core"
        family = name.upper().split()[0]
        predictors.append(
            CounterPredictor(COMPONENT_EVENTS[name.upper()], rail, family, name, full_hz)
        )
    scaling = {
        "default_clock_hz": file.default_hz[0],
        "default_memory_clock_hz": file.default_hz[1],
    }
    law = "core rates are taken to follow the core clock and memory rates the memory clock."
    if saturation is not None:
        scaling[SATURATION] = saturation
        law = (
            "all rates of a benchmark are taken to follow the core clock until it would "
            "need more than "
            f"{saturation:.0%} of the memory bandwidth, and the memory clock beyond."
        )
    names = tuple(f"benchmark {i + 1}" for i in range(len(seen)))
    return CounterTable(
        name=file.name,
        power_w=file.power_w,
        clock_hz=file.clock_hz,
        memory_clock_hz=file.memory_clock_hz,
        occurrence=file.share * busy_hz * pace,
        predictors=tuple(predictors),
        benchmark=benchmark,
        benchmark_names=names,
        group=np.arange(len(seen)),
        group_names=names,
        default_hz=file.default_hz,
        notes=(f"Utilisations were measured at the default clocks only; at others, {law}",),
        scaling=scaling,
    )


@dataclass(frozen=True)
class _DcgmSamples:
    """Samples of a log with a number in every column that is needed."""

    gpus: tuple[str, ...]  # of each sample
    rounds: tuple[int, ...]
    body: Array  # (sample, column): watts where logged, both clocks, shares of time
    units: tuple[dict[str, str], ...]
    seen: int  # samples of the log
    has_power: bool


def _read_dcgm_samples(path: Path, *, needs_power: bool) -> _DcgmSamples:
    known = read_shipped_table("wattcast.lab.counter_models", "map_dcgm.csv")
    text = read_bytes(path).decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    rounds = read_dcgm_rounds(lines, {row["field"]: row["column"] for row in known})
    seen = {column for each in rounds for values in each.values() for column in values}
    units = [row for row in known if row["event"] and row["column"] in seen]
    has_power = needs_power or "POWER" in seen
    needed = ["SMCLK", "MMCLK", *(row["column"] for row in units)]
    if has_power:
        needed.insert(0, "POWER")
    if not units or not seen.issuperset(needed):
        how = "dcgmi dmon -e 155,100,101,1002,1004,1005"
        wanted = f"columns POWER, SMCLK, MMCLK and units such as TENSO and DRAMA ({how})"
        raise bad_value(path.name, wanted, ", ".join(sorted(seen)) or "none")
    cells = []
    for number, each in enumerate(rounds):
        for gpu, values in each.items():
            cells.append((gpu, number, [values.get(column, np.nan) for column in needed]))
    kept = [cell for cell in cells if np.isfinite(cell[2]).all()]
    if not kept:
        raise bad_value(path.name, "a round with a number in every column", "none")
    body = np.array([row for _, _, row in kept])
    first_share = 3 if has_power else 2
    _check_shares(body[:, first_share:], needed[first_share:], path.name)
    gpus = tuple(gpu for gpu, _, _ in kept)
    numbers = tuple(number for _, number, _ in kept)
    return _DcgmSamples(gpus, numbers, body, tuple(units), len(cells), has_power)


def read_dcgm_rates(path: Path) -> CounterRates:
    """Read a log of ``dcgmi dmon`` as rows to apply a model to; it may lack the watts."""
    samples = _read_dcgm_samples(path, needs_power=False)
    body = samples.body
    power_w = None
    if samples.has_power:
        power_w = body[:, 0]
        body = body[:, 1:]
    clock_hz = body[:, 0] * MHZ
    memory_clock_hz = body[:, 1] * MHZ
    clocks = [memory_clock_hz if row["rail"] == "memory" else clock_hz for row in samples.units]
    names = [
        f"{gpu}, round {number + 1}"
        for gpu, number in zip(samples.gpus, samples.rounds, strict=True)
    ]
    return CounterRates(
        names=tuple(names),
        clock_hz=clock_hz,
        memory_clock_hz=memory_clock_hz,
        duration_s=np.ones(len(names)),
        occurrence=body[:, 2:] * np.stack(clocks, axis=1),
        predictors=_dcgm_predictors(samples.units),
        power_w=power_w,
    )


def _dcgm_predictors(units: Sequence[Mapping[str, str]]) -> tuple[CounterPredictor, ...]:
    return tuple(CounterPredictor(row["event"], row["rail"], "", row["column"]) for row in units)


def read_dcgm_table(path: Path) -> CounterTable:
    """Read a log of ``dcgmi dmon`` or scrapes of its exporter: watts, clocks and how busy each unit
    was.

    A share of time times the unit's clock is its busy cycles a second. ``STRETCH`` rounds of a GPU
    are one benchmark, because neighbouring rounds resemble each other; a round without all of its
    columns is left out."""
    samples = _read_dcgm_samples(path, needs_power=True)
    body = samples.body
    clock_hz = body[:, 1] * MHZ
    memory_clock_hz = body[:, 2] * MHZ
    stretches = [
        f"{gpu}, rounds {number // STRETCH * STRETCH + 1} on"
        for gpu, number in zip(samples.gpus, samples.rounds, strict=True)
    ]
    names, benchmark = index_distinct(stretches)
    clocks = [memory_clock_hz if row["rail"] == "memory" else clock_hz for row in samples.units]
    left_out = samples.seen - len(stretches)
    return CounterTable(
        name=path.name,
        power_w=body[:, 0],
        clock_hz=clock_hz,
        memory_clock_hz=memory_clock_hz,
        occurrence=body[:, 3:] * np.stack(clocks, axis=1),
        predictors=_dcgm_predictors(samples.units),
        benchmark=benchmark,
        benchmark_names=tuple(names),
        group=np.arange(len(names)),
        group_names=tuple(names),
        default_hz=(float(clock_hz.max()), float(memory_clock_hz.max())),
        notes=(f"{left_out} of {samples.seen} samples lack a column and are left out.",),
    )


NSYS_SAMPLES = """SELECT m.typeId & 255, m.timestamp, i.metricName, m.value FROM GPU_METRICS m
JOIN TARGET_INFO_GPU_METRICS i ON i.typeId = m.typeId AND i.metricId = m.metricId ORDER BY m.timestamp"""


def read_nsys_activity(
    path: Path,
    wanted: Sequence[str],
    clock_hz: float | None,
    memory_clock_hz: float | None,
) -> tuple[Array, Activity]:
    """Read the GPU metrics that Nsight Systems sampled: begin of each interval, and busy cycles of
    units in it.

    A sample stands for the time since the one before. Shares are those of DCGM (``map_dcgm.csv``),
    so models of ``--form dcgm`` apply. The GPC clock is kept in Hz although its name says MHz."""
    rows = query_nsys(path, NSYS_SAMPLES, "GPU metrics (nsys profile --gpu-metrics-devices 0)")
    gpus = {gpu for gpu, *_ in rows}
    columns = dict[str, dict[int, float]]()
    for _, time_ns, name, value in rows:
        columns.setdefault(name.split(" [")[0], {}).setdefault(time_ns, float(value))
    if len(gpus) != 1:
        raise bad_value(
            path.name,
            "GPU metrics of one GPU",
            f"{len(gpus)}",
            "Profile with --gpu-metrics-devices 0.",
        )
    known = {
        row["column"]: row
        for row in read_shipped_table("wattcast.lab.counter_models", "map_dcgm.csv")
    }
    parts = {column: row["nsys"].split(" + ") for column, row in known.items() if row["nsys"]}
    whole = {
        column: names for column, names in parts.items() if all(name in columns for name in names)
    }
    units = {
        known[column]["event"]: (column, names)
        for column, names in whole.items()
        if known[column]["event"]
    }
    if lacking := [event for event in wanted if event not in (*units, ACTIVE_CYCLE)]:
        raise bad_value(path.name, f"metrics for {', '.join(lacking)}", ", ".join(sorted(columns)))
    if clock_hz is None and "SMCLK" not in whole:
        raise bad_value(
            "--clock",
            "the core clock of the run",
            "none",
            "The metrics hold no GPC Clock Frequency.",
        )
    if memory_clock_hz is None and any(
        e in units and known[units[e][0]]["rail"] == "memory" for e in wanted
    ):
        raise bad_value(
            "--memory-clock", "the memory clock of the run, which nsys does not sample", "none"
        )
    used = [name for names in whole.values() for name in names]
    times = np.array(sorted(set.intersection(*(set(columns[name]) for name in used))))
    if len(times) < 2:
        raise bad_value(path.name, "two samples with every metric", f"{len(times)}")
    sampled = {
        c: np.sum([[columns[n][t] for t in times[1:]] for n in names], 0)
        for c, names in whole.items()
    }
    core_hz = np.full(len(times) - 1, clock_hz) if clock_hz else sampled["SMCLK"]
    core_hz = np.where(core_hz < 1e5, core_hz * MHZ, core_hz)
    duration_s = 1e-9 * np.diff(times)
    cycles = {"core": core_hz * duration_s, "memory": (memory_clock_hz or 0.0) * duration_s}
    share = {event: sampled[column] / 100.0 for event, (column, _) in units.items()}
    busy = {event: s * cycles[known[units[event][0]]["rail"]] for event, s in share.items()}
    busy[ACTIVE_CYCLE] = cycles["core"] * (np.max(list(share.values()), axis=0) > 0.0)
    at = OperatingPoint(clock_hz=core_hz, memory_clock_hz=memory_clock_hz)
    activity = Activity(
        duration_s, np.stack(list(busy.values()), -1), tuple(busy), at, ActivitySource.PROFILED
    )
    return 1e-9 * (times[:-1] - times[0]), activity


@dataclass(frozen=True)
class MeasuredPrograms:
    """Watts of programs over clocks: a row is one program at one pair of clocks."""

    names: tuple[str, ...]  # (row,)
    power_w: Array  # (row,)
    clock_hz: Array
    memory_clock_hz: Array


def read_measured_programs(path: Path) -> MeasuredPrograms:
    """Read watts of programs over clocks; one that begins twice is left out, as a name between two
    is missing.
    """
    programs = parse_program_blocks(decode_text(read_bytes(path), path.name), path.name)
    twice = {name.partition("#")[0] for name in programs if "#" in name}
    whole = {name: rows for name, rows in programs.items() if name.partition("#")[0] not in twice}
    if not whole:
        raise bad_value(path.name, "programs with rows of MHz, MHz, ms and W", "none")
    names = tuple(name for name, rows in whole.items() for _ in rows)
    clocks_hz = np.array([clocks for rows in whole.values() for clocks in rows])
    power_w = np.array([watts for rows in whole.values() for _, watts in rows.values()])
    return MeasuredPrograms(names, power_w, clocks_hz[:, 1], clocks_hz[:, 0])


def match_programs(measured: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Match names of programs that differ in case, signs or length (``correlation`` and ``CORR``).

    >>> match_programs(["correlation", "fdtd2d", "s3d"], ["CORR", "FDTD-2D"])
    {'correlation': 'CORR', 'fdtd2d': 'FDTD-2D'}
    """
    plain = {name: "".join(c for c in name.lower() if c.isalnum()) for name in (*measured, *known)}
    found = {}
    for name in dict.fromkeys(measured):
        same = [k for k in known if plain[k] == plain[name]]
        alike = [k for k in known if len(plain[k]) > 3 and plain[name].startswith(plain[k])]
        if same or len(alike) == 1:
            found[name] = (same or alike)[0]
    return found


def application_activity(
    work: UtilisationFile,
    scaling: Mapping[str, float],
    clock_hz: Array,
    memory_clock_hz: Array,
) -> Activity:
    """Return one second of each application at each pair of clocks, ``(application, pair, 1)``, by
    the law above.

    ``scaling`` has the numbers of the law, as a table made of utilisations or a saved model holds
    them."""
    if "default_clock_hz" not in scaling:
        raise bad_value(
            "scaling", "a model fitted to utilisations at default clocks", "one that was not"
        )
    default_hz = scaling["default_clock_hz"], scaling["default_memory_clock_hz"]
    core = clock_hz / default_hz[0]
    memory = memory_clock_hz / default_hz[1]
    busy_hz = np.array([default_hz[m] for m in work.on_memory])
    at_default = (work.share * busy_hz)[:, np.newaxis, :]
    share = work.share[:, np.newaxis, :]
    factor = _scale_rates(
        core[:, np.newaxis], memory[:, np.newaxis], share, work.on_memory, scaling.get(SATURATION)
    )
    busy = np.asarray((work.share > 0).any(axis=1))[:, np.newaxis] * clock_hz
    on_memory = np.array(work.on_memory)
    relative = np.where(on_memory, memory[:, np.newaxis], core[:, np.newaxis])
    used = share * factor / relative  # share of its peak at which each component runs
    shares = [
        used[..., where].max(axis=-1, initial=0.0)[..., np.newaxis]
        for where in (~on_memory, on_memory)
    ]
    value = np.concatenate([busy[..., np.newaxis], at_default * factor, *shares], axis=-1)
    names = (
        ACTIVE_CYCLE,
        *(COMPONENT_EVENTS[name.upper()] for name in work.components),
        *BUSY_SHARE_EVENTS.values(),
    )
    at = OperatingPoint(
        clock_hz=clock_hz[:, np.newaxis], memory_clock_hz=memory_clock_hz[:, np.newaxis]
    )
    return Activity(
        np.ones((*value.shape[:2], 1)),
        value[:, :, np.newaxis, :],
        names,
        at,
        ActivitySource.PROFILED,
    )


def _scale_rates(
    clock: Array,
    memory_clock: Array,
    share: Array,
    on_memory: tuple[bool, ...],
    saturation: float | None,
) -> Array:
    """Return the factor of each component's rate at clocks relative to the defaults; components
    come last.
    """
    if saturation is None:
        return np.where(np.array(on_memory), memory_clock, clock)
    traffic = share[..., list(on_memory)].max(axis=-1, initial=0.0)[..., np.newaxis]
    return relative_pace(clock, memory_clock, traffic, saturation)


def relative_pace(
    clock: Array,
    memory_clock: Array,
    memory_share: Array,
    saturation: float,
) -> Array:
    """Return work per second relative to the default clocks, t₀/t of the law above.

    ``clock`` and ``memory_clock`` are relative to the defaults, ``memory_share`` is U_dram there.

    >>> float(relative_pace(np.float64(0.5), np.float64(1.0), np.float64(0.2), 0.8).round(6))
    0.5
    >>> float(relative_pace(np.float64(1.0), np.float64(0.25), np.float64(0.4), 0.8).round(6))
    0.5
    """
    need = memory_share / saturation
    sharpness = CORNER_SHARPNESS
    now = ((1.0 / clock) ** sharpness + (need / memory_clock) ** sharpness) ** (1.0 / sharpness)
    then = (1.0 + need**sharpness) ** (1.0 / sharpness)
    return np.asarray(then / now)


def _check_shares(
    share: Array,
    names: Sequence[str],
    where: str,
) -> None:
    over = np.argwhere((share < 0) | (share > LARGEST_UTILISATION))
    if over.size:
        (row, column), do = over[0], "Percent instead of shares? Divide by 100."
        place = f"{where}: {names[column]}, line {row + HEADER_LINES + 1}"
        raise bad_value(place, "a share of the peak, 0 to 1", float(share[row, column]), do)


def _read_cells(
    row: Sequence[str],
    where: str,
    line: int,
    first: int = 0,
) -> list[float]:
    return [
        read_number(cell, f"{where}: line {line}, cell {i}")
        for i, cell in enumerate(row[first:], first + 1)
    ]
