"""``wattcast lab microbench``, ``lab multimedia``, ``lab bench`` and ``lab tune``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console

from wattcast.cli.command_builder import command, declare_verb, parse_pairs
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.figure_options import FigureOptions
from wattcast.core.errors import Refused, bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import encode_csv
from wattcast.core.units import parse, show
from wattcast.core.whole_files import write_whole
from wattcast.lab.microbench import microbench_sessions

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.lab.microbench.microbench_results import MicroRow
    from wattcast.lab.microbench.own_kernel import OwnKernel, OwnKernelResult, Roofline
    from wattcast.lab.microbench.tuning import TuningReport

declare_verb("lab multimedia", microbench_sessions.multimedia)


@command("lab microbench", FigureOptions, microbench_sessions.microbench)
def microbench(
    env: Environment,
    show: Annotated[
        str | None,
        Option("Tables of results: a folder or file of rows, or a GPU whose results ship."),
    ] = None,
    gpu: Annotated[str, Option("With --show FOLDER: the device it was measured on.")] = "h200",
    against: Annotated[
        str | None, Option("With --show: other results (folder, file or GPU) to set beside them.")
    ] = None,
    write: Annotated[
        Path | None,
        Option("With --show: save the tables as a page, or renew those of a page with marks."),
    ] = None,
    table: Annotated[
        Path | None, Option("With --show: CSV of watts and counters, for `lab fit counters`.")
    ] = None,
    **options: Any,
) -> CommandOutput:
    """Time, power and energy of every unit of the GPU: arithmetic, memory, structure and mixes.

    Curves: --only intensity sweeps flops a byte; --only walk,walk_dram,dense,ring finds lines and
    sectors, --only ways_16k,ways_64k,ways_256k sets, --only lines,atomic_lines parts and slices of
    the L2, --only launch times launches and graphs. --show RESULTS says what they tell.

    Examples: wattcast lab microbench --out rows --repeats 2;  wattcast lab microbench --show rows
    """
    if {"plot", "figures"} & env.typed_options and (show is None or table is not None):
        raise bad_value("--plot and --figures", "--show RESULTS without --table", "others")
    if against is not None:
        return _compare_results(show, against)
    if show is None:
        return CommandOutput.from_verb(microbench_sessions.microbench(**options))
    if (printed := _find_printed_values(show)) and table is None and write is None:
        return printed
    results, chip, place = _find_results(show, gpu)
    if table is None:
        return _show_results(results, chip, place, write)
    from wattcast.lab.counter_models.microbench_lines import make_table_lines

    lines = make_table_lines(place, chip.name)
    names = list(dict.fromkeys(name for line in lines for name in line))
    rows: list[list[Any]] = [names]
    for line in lines:
        cells = [line.get(name, "") for name in names]
        rows.append(cells)
    write_whole(table, encode_csv(rows))
    return CommandOutput(None, "", notes=[f"{len(lines)} rows with counters: {table}"])


def _find_printed_values(show: str) -> CommandOutput | None:
    """Return what a paper printed of a device whose rows do not ship, None for any other."""
    from wattcast.lab.microbench import microbench_report as report
    from wattcast.lab.microbench.microbench_results import (
        read_mipp_values,
        results_folder,
    )
    from wattcast.predictor.api import find_gpu

    devices = sorted({value.device for value in read_mipp_values()})
    if Path(show).exists() or not {show, show.lower()} & set(devices):
        return None
    chip = find_gpu(show)
    if results_folder(chip).exists():
        return None
    values = [value for value in read_mipp_values() if value.device == chip.name]
    table = report.make_paper_table(values)
    source = "MIPP (2016), Tables I to IV, errata applied (database/published/mipp.csv)"
    return CommandOutput(values, lambda console: console.print(table), notes=[source])


def _find_results(show: str, gpu_name: str = "h200") -> tuple[tuple[MicroRow, ...], Gpu, Path]:
    """Return results of a folder or file, or of a GPU whose results ship; with their GPU and where
    they lie.
    """
    from wattcast.lab.microbench.microbench_results import (
        read_results,
        read_shipped_results,
        results_folder,
    )
    from wattcast.predictor.api import find_gpu

    place = Path(show)
    if place.exists():
        gpu = find_gpu(gpu_name)
        return read_results(place), gpu, place
    gpu = find_gpu(show)
    return read_shipped_results(gpu), gpu, results_folder(gpu)


def _compare_results(show: str | None, against: str) -> CommandOutput:
    from wattcast.lab.microbench.microbench_report import (
        compare_results,
        draw_comparison,
        make_comparison_table,
    )

    if show is None:
        raise bad_value("--against", "--show RESULTS as well", "none")
    names = Path(show).name, Path(against).name
    rows = compare_results(_find_results(show)[0], _find_results(against)[0])
    if not rows:
        raise bad_value("--against", f"results with a benchmark that {show} has too", against)
    figures = {"microbench-comparison": partial(draw_comparison, rows, *names)}
    text = make_comparison_table(rows, *names)
    return CommandOutput(rows, lambda console: console.print(text), figures=lambda: figures)


def _show_results(
    results: tuple[MicroRow, ...],
    gpu: Gpu,
    place: Path,
    write: Path | None,
) -> CommandOutput:
    from wattcast.lab.microbench import microbench_report as report
    from wattcast.lab.microbench.benchmark_suite import list_benchmarks
    from wattcast.lab.microbench.microbench_results import describe_card

    if write is not None:
        if write.is_file() and "<!-- table:" in write.read_text(encoding="utf-8"):
            raise Refused(
                f"{write} keeps text around its tables: renew these with "
                "wattcast/lab/microbench/microbench_page.py."
            )
        write_whole(write, report.make_results_page(results, gpu).encode())
    number = gpu.compute_capability.replace(".", "")
    architecture = f"sm_{number}a" if number == "90" else f"sm_{number}"
    have = {r.name: r.version for r in results}
    missing = [
        b
        for b in list_benchmarks()
        if b.supported(architecture) and have.get(b.name, 0) < b.version
    ]
    again = [b.name for b in missing if b.has_run]
    notes = [f"not measured, or by an older kernel: {', '.join(again)}"] if again else []
    never_run = [b.curve for b in missing if not b.has_run]
    if never_run:
        curves = ", ".join(dict.fromkeys(never_run))
        notes.append(f"{len(never_run)} kernels have run on no card yet, of the curves {curves}")
    source = ", ".join(
        filter(None, [describe_card(place) or gpu.title, f"{place.name}/microbench.jsonl"])
    )

    def print_text(console: Console) -> None:
        for built in report.make_tables(results, gpu):
            console.print(built)
        console.print(report.FOOTNOTE, style="dim")

    return CommandOutput(
        partial(report.results_to_plain, results, gpu),
        print_text,
        figures=partial(report.make_microbench_figures, results, gpu, source),
        notes=notes,
    )


@command("lab bench")
def bench(
    source: Annotated[Path, Option("CUDA source, .cu.", positional=True)],
    kernel: Annotated[str, Option("A __global__ function of it.")],
    blocks: Annotated[str, Option("Blocks of a launch: 4096 or 64x64.")],
    threads: Annotated[str, Option("Threads of a block: 256 or 16x16.")] = "256",
    shared: Annotated[str, Option("Dynamic shared memory of a block, such as 48KiB.")] = "0B",
    setting: Annotated[
        list[str] | None,
        Option("NAME=VALUE of a number, NAME=256MiB of a buffer; may repeat.", "set"),
    ] = None,
    profile: Annotated[
        Path | None, Option("Export of ncu of this kernel: roofline and advice beside the watts.")
    ] = None,
    gpu: Annotated[
        str, Option("With --profile: the device, for its peaks and microbenchmarks.")
    ] = "h200",
    launches: Annotated[
        int,
        Option(
            "Only launch the kernel so often, for a profiler: ncu --set full wattcast lab bench ..."
        ),
    ] = 0,
    quick: Annotated[bool, Option("Shorter windows: a smoke test.")] = False,
) -> CommandOutput:
    """Time, watts and joules of your own kernel under the meter of the microbenchmarks, with
    roofline and advice from its profile.

    Example: wattcast lab bench my.cu --kernel saxpy --blocks 65536 --set x=64MiB --set y=64MiB
    --set n=16777216 --set a=2
    """
    from wattcast.lab.microbench import own_kernel
    from wattcast.measure.cuda_device import CudaDevice

    shape = own_kernel.LaunchShape(
        own_kernel.parse_shape(blocks, "--blocks"),
        own_kernel.parse_shape(threads, "--threads"),
        int(parse(shared, "byte", "--shared")),
    )
    settings = parse_pairs(setting, "--set", "NAME=VALUE", str)
    if not source.is_file():
        raise bad_value("SOURCE", "a CUDA source", str(source))
    parameters = own_kernel.find_parameters(source.read_text(encoding="utf-8"), kernel)
    own_kernel.read_settings(parameters, settings)  # told before a device is opened
    own = own_kernel.OwnKernel(CudaDevice.open(), source, kernel, shape, settings)
    if launches:
        own_kernel.launch_for_profiler(own, launches)
        return CommandOutput({"launches": launches}, f"{launches} launches")
    measured = own_kernel.measure_own_kernel(own, quick)
    profiled = None if profile is None else _read_own_profile(profile, own, measured, gpu)
    return CommandOutput(
        partial(_own_kernel_to_plain, measured, profiled),
        partial(_print_own_kernel, measured, profiled),
        notes=_note_own_kernel(measured, profiled),
    )


@dataclass(frozen=True)
class _OwnProfile:
    """What a profile of a measured kernel adds: its roofline, and what to change."""

    roofline: Roofline
    tuned: TuningReport


def _read_own_profile(
    profile: Path,
    own: OwnKernel,
    measured: OwnKernelResult,
    gpu: str,
) -> _OwnProfile:
    from wattcast.lab.counter_models.profiler_counters import read_ncu_metrics
    from wattcast.lab.microbench import own_kernel, profile_sets, tuning, unit_work
    from wattcast.lab.microbench.microbench_results import read_shipped_results
    from wattcast.predictor.api import find_gpu

    chip = find_gpu(gpu)
    pipes = profile_sets.PipeRates.of(chip)
    launches, exported = read_ncu_metrics(profile)
    names = [launch.kernel.split("(")[0] for launch in launches]
    places = [place for place, name in enumerate(names) if name in own.names]
    if not places:
        seen = ", ".join(sorted(set(names)))
        raise bad_value(profile.name, f"a launch of {own.names[0]}", seen or "none")
    whole = profile_sets.complete_metrics(exported, launches, pipes)
    counts = {name: float(column[places[-1]]) for name, column in whole.items()}
    dram = sum(counts.get(unit_work.METRICS[way], 0.0) for way in ("dram_read", "dram_written"))
    roofline = own_kernel.make_roofline(
        chip,
        measured.row.launch_s or 0.0,
        own_kernel.count_flop(counts),
        dram,
        measured.row.sm_clock_hz,
    )
    tuned = tuning.tune_export(profile, read_shipped_results(chip), pipes)
    return _OwnProfile(roofline, tuned)


def _own_kernel_to_plain(
    measured: OwnKernelResult,
    profiled: _OwnProfile | None,
) -> dict[str, object]:
    from wattcast.lab.microbench import microbench_report as report

    row = measured.row
    plain: dict[str, object] = {
        "kernel": row.name,
        "time_s": row.launch_s,
        "time_spread_s": row.launch_spread_s,
        "launches": row.launches,
        "power_w": row.power_w,
        "idle_power_w": row.idle_power_w,
        "energy_j": measured.energy_j,
        "above_idle_j": measured.above_idle_j,
        "sm_clock_hz": row.sm_clock_hz,
        "temperature_c": row.temperature_c,
        "resident_blocks": measured.resident_blocks,
        "waves": measured.waves,
        "throttle": row.throttle,
        "flags": row.flags,
    }
    if profiled is not None:
        roofline = profiled.roofline
        plain["roofline"] = {
            "flop": roofline.flop,
            "dram_byte": roofline.dram_byte,
            "flop_per_byte": roofline.intensity,
            "bound": roofline.bound,
            "reached": roofline.reached,
        }
        plain["advice"] = report.tuning_to_plain(profiled.tuned)
    return plain


def _print_own_kernel(
    measured: OwnKernelResult,
    profiled: _OwnProfile | None,
    console: Console,
) -> None:
    from wattcast.lab.microbench import microbench_report as report

    row = measured.row
    above_idle = _show_measured(measured.above_idle_j, "J")
    console.print(
        f"{row.name}: {_show_measured(row.launch_s, 's')}, {_show_measured(row.power_w, 'W')}, "
        f"{show(measured.energy_j, 'J')} a launch ({above_idle} above idle)"
    )
    console.print(
        f"at {_show_measured(row.sm_clock_hz, 'Hz')}, {measured.resident_blocks} blocks resident on an SM, "
        f"{measured.waves:.2f} waves"
    )
    if profiled is None:
        return
    roofline = profiled.roofline
    console.print(
        f"roofline: {show(roofline.flop, 'flop')} ({roofline.precision}), "
        f"{show(roofline.dram_byte, 'byte')} of device memory, {roofline.intensity:.3g} FLOP a "
        f"byte: bound by {roofline.bound}, {roofline.reached:.0%} of the roof"
    )
    console.print(report.make_advice_table(profiled.tuned))


def _show_measured(value: float | None, unit: str) -> str:
    """Return a figure of a kernel, or say that the sensor gave none."""
    return "unknown" if value is None else show(value, unit)


def _note_own_kernel(measured: OwnKernelResult, profiled: _OwnProfile | None) -> list[str]:
    row = measured.row
    notes = [f"{flag.replace('_', ' ')}" for flag in row.flags]
    if "sw_power_cap" in row.throttle:
        notes.append("at the power limit: time and watts are those of this limit")
    notes.append(
        "buffers hold random numbers, or zeros where they are no floats; data decide power"
    )
    if profiled is not None:
        notes.append("FLOP of tensor cores and of pairs of halves are not counted")
    return notes


@command("lab tune")
def tune(
    profile: Annotated[
        Path | None,
        Option(
            "Nsight Compute's CSV (ncu --csv --page raw) or .ncu-rep, also of --set full.",
            positional=True,
        ),
    ] = None,
    gpu: Annotated[str, Option("The device; its microbenchmark results are used.")] = "h200",
    results: Annotated[
        Path | None, Option("Folder or file of `lab microbench`, instead of what ships.")
    ] = None,
    source: Annotated[
        Path | None,
        Option("Its instructions: CSV of ncu --page source, or .ncu-rep. Adds where warps wait."),
    ] = None,
    collect: Annotated[
        bool, Option("Print the ncu command that collects everything this can use, and end.")
    ] = False,
) -> CommandOutput:
    """Rank what to change in profiled kernels by joules: memory access, divergence, fp64, waiting,
    atomics, passes.

    Example: wattcast lab tune profile.csv --gpu h200
    """
    from wattcast.lab.microbench import microbench_report as report
    from wattcast.lab.microbench import (
        microbench_results,
        profile_sets,
        source_page,
        tuning,
    )
    from wattcast.predictor.api import find_gpu

    if collect:
        command_line = tuning.collect_command()
        return CommandOutput({"command": command_line}, command_line)
    if profile is None:
        do = "Collect one with the command that --collect prints."
        raise bad_value("PROFILE", "an export of Nsight Compute", "none", do)
    chip = find_gpu(gpu)
    shipped = microbench_results.read_shipped_results
    measured = shipped(chip) if results is None else microbench_results.read_results(results)
    tuned = tuning.tune_export(profile, measured, profile_sets.PipeRates.of(chip))
    notes = [
        f"not judged: {name}, for want of {', '.join(metrics)}"
        for name, metrics in tuned.missing.items()
    ]
    if notes:
        notes.append("wattcast lab tune --collect prints the ncu command that collects them")
    lines = (
        [] if source is None else source_page.find_hot_lines(source_page.read_source_page(source))
    )

    def print_text(console: Console) -> None:
        console.print(report.make_advice_table(tuned))
        if lines:
            console.print(report.make_source_table(lines))

    return CommandOutput(
        lambda: {**report.tuning_to_plain(tuned), "source": lines}, print_text, notes=notes
    )
