"""``wattcast lab microbench``, ``lab multimedia`` and ``lab tune``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.shared_options import (
    FIGURES,
    Environment,
    FigureOptions,
    Json,
    argument,
    make_command,
    option,
    print_result,
    takes_options,
    takes_verb_options,
)
from wattcast.core.errors import Refused, bad_value
from wattcast.core.whole_files import write_whole
from wattcast.microbench import microbench_sessions


@takes_options(FIGURES)
@takes_verb_options(microbench_sessions.microbench)
def microbench(
    ctx: typer.Context,
    show: Annotated[
        str | None, option("Tables of results: a folder or file of rows, or a GPU whose results ship.")
    ] = None,
    gpu: Annotated[str, option("With --show FOLDER: the device it was measured on.")] = "h200",
    against: Annotated[
        str | None, option("With --show: other results (folder, file or GPU) to set beside them.")
    ] = None,
    write: Annotated[
        Path | None, option("With --show: save the tables as a page, or renew those of a page with marks.")
    ] = None,
    table: Annotated[Path | None, option("With --show: CSV of watts and counters, for `lab fit counters`.")] = None,
    json: Annotated[bool, option("With --show: print JSON.", "--json")] = False,
    **options: Any,
) -> None:
    """Time, power and energy of every unit of the GPU: arithmetic, memory, structure and mixes.

    Examples: wattcast lab microbench --out rows --repeats 2;  wattcast lab microbench --show rows
    """
    drawn = FigureOptions(*(options.pop(name) for name in FIGURES))
    if drawn.any and (show is None or table is not None):
        raise bad_value("--plot and --figures", "--show RESULTS, and no --table, beside them", "others")
    if against is not None:
        _compare_results(ctx.obj, show, against, drawn, json)
        return
    if show is not None:
        if table is not None:
            _write_table(ctx.obj, show, gpu, table)
        else:
            _show_results(ctx.obj, show, gpu, drawn, write, json)
        return
    print_result(ctx.obj, microbench_sessions.microbench(**options), json)


def _compare_results(env: Environment, show: str | None, against: str, drawn: FigureOptions, json: bool) -> None:
    from wattcast.microbench.microbench_report import compare_results, draw_comparison, make_comparison_table
    from wattcast.microbench.microbench_results import read_results, read_shipped_results
    from wattcast.predictor.api import find_gpu

    if show is None:
        raise bad_value("--against", "--show RESULTS beside it", "none")
    both = [Path(p) for p in (show, against)]
    found = [read_results(p) if p.exists() else read_shipped_results(find_gpu(p.name)) for p in both]
    rows = compare_results(found[0], found[1])
    if not rows:
        raise bad_value("--against", f"results with a benchmark that {show} has too", against)
    if drawn.any:
        drawn.save(env, {"microbench-comparison": partial(draw_comparison, rows, both[0].name, both[1].name)})
    if json:
        env.json(rows)
    else:
        env.console().print(make_comparison_table(rows, both[0].name, both[1].name))


multimedia = make_command(microbench_sessions.multimedia)


def _show_results(
    env: Environment, show: str, gpu_name: str, drawn: FigureOptions, write: Path | None, json: bool
) -> None:
    from wattcast.microbench import microbench_report as report
    from wattcast.microbench.benchmark_suite import list_benchmarks
    from wattcast.microbench.microbench_results import (
        describe_card,
        read_results,
        read_shipped_results,
        results_folder,
    )
    from wattcast.predictor.api import find_gpu

    folder = Path(show)
    gpu = find_gpu(gpu_name if folder.exists() else show)
    results = read_results(folder) if folder.exists() else read_shipped_results(gpu)
    if drawn.any:
        where = folder if folder.exists() else results_folder(gpu)
        source = ", ".join(filter(None, [describe_card(where) or gpu.title, f"{where.name}/microbench.jsonl"]))
        drawn.save(env, report.make_microbench_figures(results, gpu, source))
    if write is not None:
        if write.is_file() and "<!-- table:" in write.read_text(encoding="utf-8"):
            raise Refused(f"{write} keeps text around its tables: renew these with studies/microbench_page.py.")
        write_whole(write, report.make_results_page(results, gpu).encode())
    if json:
        env.json(report.results_to_plain(results, gpu))
        return
    console = env.console()
    for built in report.make_tables(results, gpu):
        console.print(built)
    console.print(report.FOOTNOTE, style="dim", highlight=False)
    number = gpu.compute_capability.replace(".", "")
    architecture = f"sm_{number}a" if number == "90" else f"sm_{number}"
    have = {r.name: r.version for r in results}
    again = [b.name for b in list_benchmarks() if b.supported(architecture) and have.get(b.name, 0) < b.version]
    if again:
        env.say(f"not measured, or by an older kernel: {', '.join(again)}")


def _write_table(env: Environment, show: str, gpu_name: str, table: Path) -> None:
    import csv
    import io

    from wattcast.counter_models.profiler_counters import make_table_lines
    from wattcast.microbench.microbench_results import results_folder
    from wattcast.predictor.api import find_gpu

    folder = Path(show)
    gpu = find_gpu(gpu_name if folder.exists() else show)
    lines = make_table_lines(folder if folder.exists() else results_folder(gpu), gpu.name)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for line in lines for name in line)))
    writer.writeheader()
    writer.writerows(lines)
    write_whole(table, stream.getvalue().encode())
    env.say(f"{len(lines)} rows with counters: {table}")


def tune(
    ctx: typer.Context,
    profile: Annotated[Path, argument("Nsight Compute's CSV (ncu --csv, or --page raw) or .ncu-rep.")],
    gpu: Annotated[str, option("The device; its microbenchmark results are used.")] = "h200",
    results: Annotated[Path | None, option("Folder or file of `lab microbench`, instead of what ships.")] = None,
    json: Json = False,
) -> None:
    """Rank what to change in profiled kernels by joules: memory access, divergence, fp64, waiting, atomics, passes.

    Example: wattcast lab tune profile.csv --gpu h200
    """
    from wattcast.microbench.microbench_report import make_advice_table, tuning_to_plain
    from wattcast.microbench.microbench_results import read_results, read_shipped_results
    from wattcast.microbench.tuning import tune_export as library
    from wattcast.predictor.api import find_gpu

    env: Environment = ctx.obj
    measured = read_results(results) if results is not None else read_shipped_results(find_gpu(gpu))
    found = library(profile, measured)
    if json:
        env.json(tuning_to_plain(found))
        return
    env.console().print(make_advice_table(found))
    for name, metrics in found.missing.items():
        env.say(f"not judged: {name}, for want of {', '.join(metrics)}")
