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
    CounterTable,
)
from wattcast.lab.counter_models.rail_terms import ACTIVE_CYCLE
from wattcast.power.activity import Activity, ActivitySource

HEADER_LINES = 4
BUSY_SHARE_EVENTS = {"core": "core_busy_share", "memory": "memory_busy_share"}
CORNER_SHARPNESS = 30.0
SATURATION = "memory_saturation"  # s among the numbers of a table's scaling
LARGEST_UTILISATION = 1.5  # counters overshoot a little
MHZ = 1e6
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


MOST_MHZ = 1e12  # a clock above this is no clock; one in hertz by mistake stays below it


def read_utilisations(path: Path) -> UtilisationFile:
    """Read a file of this form and check every cell."""
    file, (power_w, clock_mhz, memory_clock_mhz), _ = _read_file(path, 3)
    clocks_mhz = {"core": clock_mhz, "memory": memory_clock_mhz}
    for name, mhz in clocks_mhz.items():
        if mhz.size and mhz.max() > MOST_MHZ:
            expectation = f"{name} clocks of at most {MOST_MHZ:g} MHz"
            raise bad_value(path.name, expectation, float(mhz.max()))
    return replace(
        file,
        power_w=power_w,
        clock_hz=clock_mhz * MHZ,
        memory_clock_hz=memory_clock_mhz * MHZ,
    )


def read_applications(path: Path) -> UtilisationFile:
    """Read a file with the same header whose rows are a name and utilisations."""
    file, _, names = _read_file(path, 1)
    return replace(file, names=names)


@dataclass(frozen=True)
class _FileHeader:
    """The four header lines of a file."""

    default_hz: tuple[float, float]
    components: tuple[str, ...]
    on_memory: tuple[bool, ...]  # (component,)


def _read_file(path: Path, before: int) -> tuple[UtilisationFile, Array, tuple[str, ...]]:
    """Return a file, and the numbers before its utilisations, or the name where there is one cell
    ``before`` them.
    """
    where = path.name
    text = decode_text(read_bytes(path), where)
    lines = [row for row in csv.reader(text.splitlines()) if row]
    header = _read_header(lines, where)
    width = len(header.components)
    first_number = 1 if before == 1 else 0  # the cell before is a name
    cells = []
    for line, row in enumerate(lines[HEADER_LINES:], HEADER_LINES + 1):
        if len(row) != before + width:
            expectation = f"{before + width} cells"
            if before == 1:
                expectation = f"a name and {width} utilisations"
            place = f"{where}: line {line}"
            raise bad_value(place, expectation, f"{len(row)}", "Is the file complete?")
        cells.append(_read_cells(row, where, line, first_number))
    body = np.array(cells)
    share = body[:, -width:]
    places = [f"line {line}" for line in range(HEADER_LINES + 1, len(lines) + 1)]
    check_shares(share, header.components, places, where)
    file = UtilisationFile(
        where,
        share,
        header.components,
        header.on_memory,
        header.default_hz,
    )
    first_cells = tuple(row[0] for row in lines[HEADER_LINES:])
    return file, body[:, :-width].T, first_cells


def _read_header(lines: Sequence[Sequence[str]], where: str) -> _FileHeader:
    """Read and check the header lines: domains, default clocks, sizes and component names."""
    if len(lines) < HEADER_LINES + 1:
        raise bad_value(where, f"{HEADER_LINES} header lines and rows", f"{len(lines)} lines")
    if lines[0][0].strip() != "2":
        raise bad_value(f"{where}: line 1", "2 clock domains (core, memory)", lines[0][0])
    default_mhz = _read_cells(lines[1], where, 2)
    sizes = [int(size) for size in _read_cells(lines[2], where, 3)]
    names = tuple(cell.strip() for cell in lines[3])
    if len(default_mhz) != 2 or len(sizes) != 2 or sum(sizes) != len(names):
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
    return _FileHeader(
        default_hz=(default_mhz[0] * MHZ, default_mhz[1] * MHZ),
        components=names,
        on_memory=tuple(place >= sizes[0] for place in range(len(names))),
    )


def make_utilisation_table(file: UtilisationFile, saturation: float | None) -> CounterTable:
    """Return occurrences at every row's clocks under the scaling law above with s =
    ``saturation``.
    """
    work = ["/".join(f"{u:.6g}" for u in row) for row in file.share]
    seen, benchmark = index_distinct(work)
    full_hz = np.array([file.default_hz[memory] for memory in file.on_memory])
    core_hz, memory_hz = file.default_hz
    pace = _scale_rates(
        file.clock_hz[:, np.newaxis] / core_hz,
        file.memory_clock_hz[:, np.newaxis] / memory_hz,
        file.share,
        file.on_memory,
        saturation,
    )
    scaling = {
        "default_clock_hz": core_hz,
        "default_memory_clock_hz": memory_hz,
    }
    law = "core rates are taken to follow the core clock and memory rates the memory clock."
    if saturation is not None:
        scaling[SATURATION] = saturation
        law = (
            "all rates of a benchmark are taken to follow the core clock until it would "
            f"need more than {saturation:.0%} of the memory bandwidth, and the memory clock "
            "beyond."
        )
    names = tuple(f"benchmark {i + 1}" for i in range(len(seen)))
    return CounterTable(
        name=file.name,
        power_w=file.power_w,
        clock_hz=file.clock_hz,
        memory_clock_hz=file.memory_clock_hz,
        occurrence=file.share * full_hz * pace,
        predictors=_make_predictors(file, full_hz),
        benchmark=benchmark,
        benchmark_names=names,
        group=np.arange(len(seen)),
        group_names=names,
        default_hz=file.default_hz,
        notes=(f"Utilisations were measured at the default clocks only; at others, {law}",),
        scaling=scaling,
    )


def _make_predictors(file: UtilisationFile, full_hz: Array) -> tuple[CounterPredictor, ...]:
    """Return the event, rail, family and full use of each component."""
    predictors = []
    for place, name in enumerate(file.components):
        upper = name.upper()
        predictors.append(
            CounterPredictor(
                event=COMPONENT_EVENTS[upper],
                rail="memory" if file.on_memory[place] else "core",
                family=upper.split()[0],
                column=name,
                full=float(full_hz[place]),
            )
        )
    return tuple(predictors)


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
    repeated = {name.partition("#")[0] for name in programs if "#" in name}
    names: list[str] = []
    clocks_hz: list[tuple[float, float]] = []  # memory, core
    power_w: list[float] = []
    for name, rows in programs.items():
        if name.partition("#")[0] in repeated:
            continue
        for clocks, (_, watts) in rows.items():
            names.append(name)
            clocks_hz.append(clocks)
            power_w.append(watts)
    if not names:
        raise bad_value(path.name, "programs with rows of MHz, MHz, ms and W", "none")
    memory_clock_hz, clock_hz = np.array(clocks_hz).T
    return MeasuredPrograms(tuple(names), np.array(power_w), clock_hz, memory_clock_hz)


def match_programs(measured: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Match names of programs that differ in case, signs or length (``correlation`` and ``CORR``).

    >>> match_programs(["correlation", "fdtd2d", "s3d"], ["CORR", "FDTD-2D"])
    {'correlation': 'CORR', 'fdtd2d': 'FDTD-2D'}
    """
    letters = {name: _keep_letters(name) for name in (*measured, *known)}
    matches = {}
    for name in dict.fromkeys(measured):
        equal = [other for other in known if letters[other] == letters[name]]
        beginnings = [
            other
            for other in known
            if len(letters[other]) > 3 and letters[name].startswith(letters[other])
        ]
        if equal:
            matches[name] = equal[0]
        elif len(beginnings) == 1:
            matches[name] = beginnings[0]
    return matches


def _keep_letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


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
    core = clock_hz[:, np.newaxis] / default_hz[0]
    memory = memory_clock_hz[:, np.newaxis] / default_hz[1]
    on_memory = np.array(work.on_memory)
    share = work.share[:, np.newaxis, :]  # (application, 1, component)
    pace = _scale_rates(
        core,
        memory,
        share,
        work.on_memory,
        scaling.get(SATURATION),
    )
    full_hz = np.array([default_hz[memory] for memory in work.on_memory])
    component_cycles = (work.share * full_hz)[:, np.newaxis, :] * pace

    is_active = np.asarray((work.share > 0).any(axis=1))
    active_cycles = is_active[:, np.newaxis] * clock_hz
    # the share of its peak, at the clock of its rail, at which each component runs
    used = share * pace / np.where(on_memory, memory, core)
    core_share = used[..., ~on_memory].max(axis=-1, initial=0.0)
    memory_share = used[..., on_memory].max(axis=-1, initial=0.0)
    value = np.concatenate(
        [
            active_cycles[..., np.newaxis],
            component_cycles,
            core_share[..., np.newaxis],
            memory_share[..., np.newaxis],
        ],
        axis=-1,
    )
    events = (
        ACTIVE_CYCLE,
        *(COMPONENT_EVENTS[name.upper()] for name in work.components),
        *BUSY_SHARE_EVENTS.values(),
    )
    return Activity(
        np.ones((*value.shape[:2], 1)),
        value[:, :, np.newaxis, :],
        events,
        OperatingPoint(
            clock_hz=clock_hz[:, np.newaxis],
            memory_clock_hz=memory_clock_hz[:, np.newaxis],
        ),
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


def check_shares(
    share: Array,
    names: Sequence[str],
    places: Sequence[str],
    where: str,
) -> None:
    """Refuse shares beyond 0 to ``LARGEST_UTILISATION``; ``places`` says where each row stands."""
    outside = np.argwhere((share < 0) | (share > LARGEST_UTILISATION))
    if outside.size:
        row, column = outside[0].tolist()
        raise bad_value(
            f"{where}: {names[column]}, {places[row]}",
            "a share of the peak, 0 to 1",
            float(share[row, column]),
            "Percent instead of shares? Divide by 100.",
        )


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
