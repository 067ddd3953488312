"""The verbs of ``measure``: one function each, whose signature is its options on both command
lines.

``python -m wattcast.measure`` (the standard library's parser, for a bare GPU node) and ``wattcast
measure`` (typer) build their options from these signatures, so that names, defaults and help are
the same. No verb changes a clock, a limit or a mode of a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from wattcast.core.errors import CannotWrite, ExitCode
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse, parse_seconds
from wattcast.core.whole_files import check_writable, write_whole


@dataclass(frozen=True)
class VerbResult:
    """Hold what a verb prints: ``plain`` with ``--json`` or where there is no ``text``; ``note``
    goes to stderr.
    """

    plain: Any = None
    text: str | None = None
    note: str = ""
    exit_code: int = 0


Verb = Callable[..., VerbResult]
Source = Annotated[str, Option("auto|nvml|amd|rapl: where readings come from.")]
Device = Annotated[
    int | None,
    Option("Which device, counted from 0; default: the first that CUDA_VISIBLE_DEVICES shows."),
]


def run(
    command: Annotated[list[str], Option("The command, after --.", positional=True)],
    source: Source = "auto",
    device: Device = None,
    plot: Annotated[Path | None, Option("Save power over time (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, Option("Print JSON; the command's output goes to stderr.")] = False,
) -> VerbResult:
    """Measure time, joules, mean and peak watts and clock of a command; its exit code passes
    through.
    """
    from wattcast.measure.measured_run import run_command
    from wattcast.measure.run_figure import (
        check_figure_path,
        draw_run_power,
        save_run_figure,
    )

    if plot:
        check_figure_path(plot)
    words = command[1:] if command[:1] == ["--"] else command
    measured = run_command(words, source, device, pass_output=not json)
    code = measured.shell_code
    notes = []
    if plot:
        try:
            save_run_figure(draw_run_power(measured), plot)
        except CannotWrite as error:
            code = code or error.exit_code
            notes.append(str(error))
    if measured.identity.note:
        notes.append(measured.identity.note)
    if json:
        notes.append("")  # the note ends with a line of its own
    else:
        overhead = 100 * (measured.measurement.overhead or 0.0)
        notes.append(measured.measurement.sentence)
        notes.append(f"the sampler took {overhead:.2f} % of the processors")
    return VerbResult(measured.plain(), "", "\n".join(notes), code)


def idle(
    seconds: Annotated[str, Option("How long to watch, such as 3 or 1min.")] = "3",
    source: Source = "auto",
    device: Device = None,
) -> VerbResult:
    """Measure power with nothing to do, at the clock the device rests at."""
    from wattcast.measure.measured_run import measure_idle

    result, identity = measure_idle(parse_seconds(seconds, "--seconds"), source, device)
    return VerbResult({"device": identity.name} | result.plain(), result.sentence)


def sensor(
    out: Annotated[
        Path | None, Option("Folder for the periods and windows, and the samples.")
    ] = None,
    source: Source = "auto",
    device: Device = None,
) -> VerbResult:
    """Find update period and averaging window of the power sensor, and what they imply."""
    import json

    from wattcast.measure.sampler import probe_sensor

    code = 0
    note = ""
    if out:
        check_writable(out / "sensor.json")
    description, samples = probe_sensor(source, device)
    plain = description.plain()
    try:
        if out:
            samples.save(out / "sensor_samples.npz")
            write_whole(out / "sensor.json", json.dumps(plain, indent=1).encode())
    except CannotWrite as error:
        code = error.exit_code
        note = str(error)
    return VerbResult(plain, "\n".join(description.implies), note, code)


def log(
    file: Annotated[
        Path,
        Option(
            "Log of nvidia-smi, dcgmi, amd-smi, tegrastats or jtop, or CSV of a meter.",
            positional=True,
        ),
    ],
    interval: Annotated[
        str, Option("Time between lines, such as 100ms; for lines without a time of their own.")
    ] = "",
    time_format: Annotated[
        str, Option("How times are written: s, ms, us, ns, or such as '%d/%m/%Y %H:%M:%S'.")
    ] = "",
    start: Annotated[str, Option("Leave out what came before this time.", "from")] = "",
    end: Annotated[str, Option("Leave out what came after this time.", "to")] = "",
) -> VerbResult:
    """Read mean and largest watts and joules of each rail from a log that another tool wrote.

    A time or a value that cannot be read is refused with its line. A log with gaps, repeated times
    or impossible readings is summed up without these, with a flag that names them, and exits with
    5."""
    from wattcast.measure.power_logs import read_power_log

    interval_s = parse(interval, "s", "--interval") if interval else None
    start_s = parse(start, "s", "--from") if start else 0.0
    end_s = parse(end, "s", "--to") if end else float("inf")
    power_log = read_power_log(file, interval_s, time_format)
    rails = power_log.summarise(start_s, end_s)
    lines = []
    code = ExitCode.OK
    for name, rail in rails.items():
        flags = ""
        if rail.flags:
            flags = f" [{'; '.join(rail.flags)}]"
            code = ExitCode.REFUSED
        lines.append(
            f"{name}: {rail.power_w:.4g} W, at most {rail.largest_w:.4g} W, "
            f"{rail.energy_j:.4g} J in {rail.duration_s:.4g} s{flags}"
        )
    return VerbResult(
        plain={
            "form": power_log.form,
            "rails": {name: asdict(rail) for name, rail in rails.items()},
        },
        text="\n".join(lines),
        note=f"{file.name}: {power_log.form}",
        exit_code=code,
    )


VERBS: tuple[Verb, ...] = (run, idle, sensor, log)
