"""``wattcast lab microbench``, ``lab multimedia`` and ``lab tune``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console

from wattcast.cli.command_builder import command, declare_verb
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.figure_options import FigureOptions
from wattcast.core.errors import Refused, bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.lab.microbench import microbench_sessions

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.lab.microbench.microbench_results import MicroRow

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

    Examples: wattcast lab microbench --out rows --repeats 2;  wattcast lab microbench --show rows
    """
    if {"plot", "figures"} & env.typed_options and (show is None or table is not None):
        raise bad_value(
            "--plot and --figures", "--show RESULTS, and no --table, beside them", "others"
        )
    if against is not None:
        return _compare_results(show, against)
    if show is None:
        return CommandOutput.from_verb(microbench_sessions.microbench(**options))
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
        raise bad_value("--against", "--show RESULTS beside it", "none")
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
    again = [
        b.name
        for b in list_benchmarks()
        if b.supported(architecture) and have.get(b.name, 0) < b.version
    ]
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
        notes=[f"not measured, or by an older kernel: {', '.join(again)}"] if again else [],
    )


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
    table = report.make_advice_table(tuned)
    return CommandOutput(
        partial(report.tuning_to_plain, tuned), lambda console: console.print(table), notes=notes
    )
