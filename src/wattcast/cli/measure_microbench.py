"""``wattcast measure microbench`` and ``wattcast measure multimedia``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Drawn, Figures, Format, Plot, Which

if TYPE_CHECKING:
    from wattcast.explore.microbench import Result
    from wattcast.hardware import Gpu
    from wattcast.measure.microbench.run import Request

Out = Annotated[Path | None, typer.Option(help="Folder for rows, saved as they come; a re-run continues there.")]
Budget = Annotated[str, typer.Option(help="Stop in time, such as 480s.")]
Repeats = Annotated[int, typer.Option(help="Rounds; 2 measures everything a second time.")]
Before = Annotated[Path | None, typer.Option("--from", help="Folder with rows measured before, to go on from.")]


def microbench(
    ctx: typer.Context,
    out: Out = None,
    only: Annotated[str, typer.Option(help="Names, groups or curves, comma-separated; see --list.")] = "",
    budget: Budget = "480s",
    repeats: Repeats = 1,
    before: Before = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the benchmarks.")] = False,
    counters: Annotated[bool, typer.Option(help="Hardware counters through ncu instead of time and power.")] = False,
    show: Annotated[
        str | None, typer.Option(help="Tables of results: a folder or file of rows, or a GPU whose results ship.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="With --show FOLDER: the device it was measured on.")] = "h200",
    plot: Plot = None,
    figure: Which = None,
    figures: Figures = None,
    format: Format = "png",
    write: Annotated[
        Path | None, typer.Option(help="With --show: save the tables as a page, or renew those of a page with marks.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="With --show: CSV of watts and counters, for `fit counters`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="With --show: print JSON.")] = False,
) -> None:
    """Time, power and energy of every unit of the GPU: arithmetic, memory, structure and mixes.

    Examples: wattcast measure microbench --out rows --repeats 2;  wattcast measure microbench --show rows
    """
    drawn = Drawn(plot, figure, figures, format)
    if drawn.any and (show is None or table is not None):
        from wattcast.errors import bad_value

        raise bad_value("--plot and --figures", "--show RESULTS, and no --table, beside them", "others")
    if show is not None:
        if table is not None:
            _table(ctx.obj, show, gpu, table)
        else:
            _show(ctx.obj, show, gpu, drawn, write, json)
        return
    from wattcast.measure.microbench import run

    raise typer.Exit(run.microbench(_request(out, budget, only, repeats, before, listed=listed, counters=counters)))


def multimedia(
    ctx: typer.Context, out: Out = None, budget: Budget = "240s", repeats: Repeats = 1, before: Before = None
) -> None:
    """Rotation, diamond motion search, 8x8 DCT and debarreling of an 80-frame full-HD clip, checked against NumPy."""
    from wattcast.measure.microbench import run

    raise typer.Exit(run.multimedia(_request(out, budget, "", repeats, before)))


def _request(
    out: Path | None,
    budget: str,
    only: str,
    repeats: int,
    before: Path | None,
    listed: bool = False,
    counters: bool = False,
) -> Request:
    from wattcast.measure.microbench.run import Request
    from wattcast.units import parse

    names = tuple(name for name in only.split(",") if name)
    return Request(out, parse(budget, "s", "--budget"), names, repeats, before, listed, counters)


def _show(env: Environment, show: str, gpu_name: str, drawn: Drawn, write: Path | None, json: bool) -> None:
    from wattcast.api import find_gpu
    from wattcast.explore.microbench import described, read_results, results_folder, results_of
    from wattcast.files import write_whole
    from wattcast.report import microbench as report

    folder = Path(show)
    gpu = find_gpu(gpu_name if folder.exists() else show)
    results = read_results(folder) if folder.exists() else results_of(gpu)
    if drawn.any:
        from wattcast.report.microbench_figures import all_figures

        where = folder if folder.exists() else results_folder(gpu)
        source = ", ".join(filter(None, [described(where) or gpu.title, f"{where.name}/microbench.jsonl"]))
        drawn.save(env, all_figures(results, gpu, source))
    if write is not None:
        from wattcast.report.microbench_page import has_tables, renewed

        page = write.read_text(encoding="utf-8") if write.is_file() else ""
        beside = (folder if folder.is_dir() else results_folder(gpu)) / "multimedia.jsonl"
        every = (*results, *read_results(beside)) if beside.is_file() else results
        text = renewed(page, every, gpu) if has_tables(page) else report.markdown(results, gpu)
        write_whole(write, text.encode())
    if json:
        env.json(report.plain(results, gpu))
        return
    console = env.console()
    for built in report.tables(results, gpu):
        console.print(built)
    console.print(report.FOOTNOTE, style="dim", highlight=False)
    again = _to_measure(results, gpu)
    if again:
        env.say(f"not measured, or by an older kernel: {', '.join(again)}")


def _to_measure(results: Sequence[Result], gpu: Gpu) -> list[str]:
    """Benchmarks that the device supports and whose newest kernel is not among ``results``."""
    from wattcast.measure.microbench.suite import suite

    number = gpu.compute_capability.replace(".", "")
    architecture = f"sm_{number}a" if number == "90" else f"sm_{number}"
    have = {r.name: r.version for r in results}
    return [b.name for b in suite() if b.supported(architecture) and have.get(b.name, 0) < b.version]


def _table(env: Environment, show: str, gpu_name: str, table: Path) -> None:
    import csv
    import io

    from wattcast.api import find_gpu
    from wattcast.explore.microbench import results_folder
    from wattcast.files import write_whole
    from wattcast.fit.counters_table import table_lines

    folder = Path(show)
    gpu = find_gpu(gpu_name if folder.exists() else show)
    lines = table_lines(folder if folder.exists() else results_folder(gpu), gpu.name)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for line in lines for name in line)))
    writer.writeheader()
    writer.writerows(lines)
    write_whole(table, stream.getvalue().encode())
    env.say(f"{len(lines)} rows with counters: {table}")
