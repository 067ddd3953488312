"""``wattcast lab fit`` and ``wattcast calibrate``: measurements -> coefficients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.component_commands import fit_component
from wattcast.cli.shared_options import (
    FIGURES,
    Environment,
    FigureOptions,
    Json,
    argument,
    folded,
    option,
    takes_options,
)
from wattcast.core.errors import BadInput, bad_value, resolve_name
from wattcast.core.units import parse, show
from wattcast.counter_models.two_rails import (
    RailsFit,
    fit_rails,
    format_event_cost,
    make_saved_rails,
    rails_fit_to_plain,
)

if TYPE_CHECKING:
    from wattcast.counter_models.counter_fit import CounterFit
    from wattcast.counter_models.fit_diagnostics import FittedCost
    from wattcast.fit.calibration import Calibration
    from wattcast.fit.table_fit import TableCalibration

fit_app = typer.Typer(add_completion=False, no_args_is_help=True, help="Fit models to measurements.")
TABLE_FORMS = ("table", "gpmtool", "dcgm")


_method = folded("How it is fitted")
_programs = folded("Programs never trained on")


@fit_app.callback()
def _fit() -> None:
    """Fit models to measurements."""


@fit_app.command("kernels")
def fit_kernels(
    database: str = typer.Argument(..., help="A kernel database: its folder, its rows.parquet, or a shipped name."),
    gpu: str = typer.Option(..., "--gpu", help="The catalogue GPU it was measured on."),
    out: str = typer.Option(".", "--out", help="Folder for bundle.yaml, arrays.npz and out_of_fold.parquet."),
    inherit: bool | None = typer.Option(
        None,
        "--inherit/--alone",
        help="Move the card's forecast by the rows, or fit from nothing; default: inherit below 1000 burst rows.",
    ),
    leave_out: bool = typer.Option(
        False,
        "--leave-out",
        help="Learn anew how far intervals reach for what was never measured: fifteen more fits, minutes.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the held-out ledger as JSON."),
) -> None:
    """Fit latency, power and clock of kernels: corrections, energies, V(f), clock law, intervals."""
    from wattcast.fit.database_fit import fit_kernel_database, write_fit
    from wattcast.validate import format_ledger, kernel_rows

    bundle, held = fit_kernel_database(database, gpu, lambda text: typer.echo(text, err=True), inherit, leave_out)
    write_fit(bundle, held, Path(out))
    rows = kernel_rows(held, gpu)
    typer.echo(json.dumps({"rows": rows}, indent=1) if as_json else format_ledger(rows))
    typer.echo(f"{Path(out) / 'bundle.yaml'} written", err=True)


@fit_app.command("engine")
def fit_engine(
    database: str = typer.Argument(
        ..., help="Rows of an engine's kernels: a folder, its rows.parquet, or h200/engine."
    ),
    gpu: str = typer.Option(..., "--gpu", help="The catalogue GPU they were measured on."),
    out: str = typer.Option(".", "--out", help="Folder for bundle.yaml and arrays.npz."),
    bundle: str = typer.Option("", "--bundle", help="Folder to start from, in place of the shipped one."),
) -> None:
    """Add an engine's kernels to a fitted bundle; rows that the database holds out stay unread."""
    from wattcast.fit.database_fit import fit_engine_database
    from wattcast.predictor.bundle.bundle_file import write_bundle

    found = fit_engine_database(
        database, gpu, Path(bundle) if bundle else None, lambda text: typer.echo(text, err=True)
    )
    write_bundle(found, Path(out) / "bundle.yaml")
    typer.echo(f"{Path(out) / 'bundle.yaml'} written: {found.provenance.note}", err=True)


def fit_host(
    ctx: typer.Context,
    database: Annotated[
        str, argument("Whole-model rows: a database, models.parquet, journals, or a CSV of your own.")
    ],
    gpu: Annotated[str, option("The catalogue GPU they were measured on.")],
    out: Annotated[Path | None, option("Folder for the GPU's bundle with this launch cost.")] = None,
    json: Json = False,
) -> None:
    """Fit what issuing an operator costs the host, from rows launched eagerly.

    Example: wattcast lab fit host mine.csv --gpu h200     (columns model, batch, seq, phase, latency_s: "2.9 ms")
    """
    from dataclasses import asdict

    from wattcast import hardware
    from wattcast.fit.whole_models import fit_host_database, with_launch_cost
    from wattcast.predictor.bundle import bundle_for
    from wattcast.predictor.bundle.calibrated import save_bundle
    from wattcast.report.text_tables import print_rows

    env: Environment = ctx.obj
    found = fit_host_database(database, gpu)
    if out is not None:
        bundle = with_launch_cost(bundle_for(hardware.load_gpu(gpu)), found.host_s)
        env.say(f"bundle saved: {save_bundle(bundle, out)}")
    errors = {name: found.error(f"{name}_s") for name in ("predicted", "default", "left_out")}
    if json:
        env.json({"host_s": found.host_s, "error": errors, "rows": [asdict(row) for row in found.rows]})
        return
    columns = {"name": "workload", "operators": "operators", "latency_s": "measured", "predicted_s": "fitted"}
    columns |= {"default_s": "default", "host_s": "asks for"}
    rows = [asdict(row) | ({"host_s": "GPU-bound"} if row.host_s is None else {}) for row in found.rows]
    print_rows(env.console(), rows, columns)
    env.stdout.write(
        f"{show(found.host_s, 's', 3)} an operator (use: --host-launch {found.host_s * 1e6:.3g}us); mean error "
        f"{errors['predicted']:.1%}, model left out {errors['left_out']:.1%}, with the default "
        f"{show(found.default_s, 's', 3)} {errors['default']:.1%}\n"
    )


def fit_sensitivity(
    ctx: typer.Context,
    table: Annotated[Path, argument("CSV of kernels over settings with counters.")],
    out: Annotated[Path | None, option("Save the model as YAML.")] = None,
    name: Annotated[str | None, option("Name of the model; default: the table's.")] = None,
    json: Json = False,
) -> None:
    """Fit predictors of compute and bandwidth sensitivity to counters, as paper 004 does.

    Example: wattcast manage simulate --export table.csv && wattcast lab sensitivity table.csv --out model.yaml
    """
    import msgspec

    from wattcast.manage import sensitivity_model

    env: Environment = ctx.obj
    data = sensitivity_model.read_sensitivity_table(table)
    source = f"fitted by Wattcast to {table.name}, {len(data.kernels)} kernels"
    fitted = sensitivity_model.fit_sensitivity(
        data.counters, data.sensitivity, data.groups, name or table.stem, source
    )
    if out is not None:
        sensitivity_model.write_sensitivity_model(fitted.model, out)
        env.say(f"model saved: {out}")
    result = {
        "model": msgspec.to_builtins(fitted.model),
        "kernels": fitted.rows,
        "error": dict(fitted.error),
        "left_out_error": dict(fitted.left_out_error),
        "correlation": dict(fitted.correlation),
        "published": {"error": {"compute": 0.0571, "bandwidth": 0.0303}, "source": "paper 004, section 7.2"},
    }
    if json:
        env.json(result)
        return
    for which, side in (("compute", fitted.model.compute), ("bandwidth", fitted.model.bandwidth)):
        env.console().print(
            f"{which}: error {fitted.error[which]:.2%}, applications left out in turn "
            f"{fitted.left_out_error[which]:.2%}, correlation {fitted.correlation[which]:.2f}; "
            f"counters {', '.join(side.coefficients)}"
        )


def calibrate(
    ctx: typer.Context,
    gpu: Annotated[str, option("Catalogue name (`wattcast gpus`) or your own YAML file.")],
    file: Annotated[
        Path | None,
        argument(
            "CSV or JSON of whole models: workload, batch, seq ..., latency_ms, energy_j or power_w, clock_mhz."
        ),
    ] = None,
    table: Annotated[
        list[Path] | None,
        option(
            "Kernel tables in the format of NVIDIA's aiconfigurator (CSV, Parquet), or a folder of them, or of "
            "kernel rows of your own; may be repeated."
        ),
    ] = None,
    check: Annotated[
        bool, option("With --table: compare the GPU's bundle with all rows and fit nothing.", "--check")
    ] = False,
    out: Annotated[Path | None, option("Folder for the bundle; default: calibrated/GPU.")] = None,
    factor: Annotated[
        list[str] | None, option("Your own efficiency factor to start from, such as dram_energy=1.2.")
    ] = None,
    json: Json = False,
) -> None:
    """Adjust a GPU's forecast to measurements: of whole models (FILE), or of kernels (--table).

    Whole models move launch cost, efficiencies, energy scale and idle offset: as many as the rows support. Kernel
    tables fit corrections of products, attention and experts, with one shape in five held out to judge them.

    Example: wattcast calibrate --gpu a100-sxm mine.csv; then predict with --bundle calibrated/a100-sxm-80gb

    Example: wattcast calibrate --gpu l40s --table tables/l40s
    """
    if (file is None) == (not table):
        raise BadInput("calibrate takes one of two: FILE with whole models, or --table with kernel tables.")
    if table:
        _calibrate_on_tables(ctx.obj, table, gpu, out, check, json)
        return
    assert file is not None, "checked above"
    from wattcast.cli.shared_options import parse_factors
    from wattcast.fit import calibration_rows
    from wattcast.predictor.api import find_gpu

    env: Environment = ctx.obj
    chip = find_gpu(gpu)
    folder = out or Path("calibrated") / chip.name
    found = calibration_rows.calibrate(file, chip, out=folder, factors=parse_factors(factor or []))
    if json:
        env.json(_calibration_to_plain(found, chip.name, folder))
    else:
        _print_calibration(env, found, chip.name)
    env.say(f"{found.bundle.gpu} saved in {folder}; use it with --bundle {folder}")


def _calibrate_on_tables(
    env: Environment, tables: list[Path], gpu: str, out: Path | None, check: bool, json: bool
) -> None:
    from wattcast.fit import table_fit
    from wattcast.predictor.bundle.calibrated import save_bundle

    found = table_fit.check_tables(tables, gpu) if check else table_fit.calibrate_tables(tables, gpu, env.say)
    folder = out or Path("calibrated") / found.bundle.gpu
    saved = None if check else save_bundle(found.bundle, folder)
    if json:
        plain = {"gpu": found.bundle.gpu, "rows": found.fitted, "held_out": found.held_out}
        plain |= {"errors_percent": [vars(e) for e in found.errors], "notes": list(found.notes)}
        env.json(plain if saved is None else plain | {"bundle": str(folder)})
    else:
        _print_table_errors(env, found)
    if saved is not None:
        env.say(f"{saved} written; use it with --bundle {folder}")


def _print_table_errors(env: Environment, found: TableCalibration) -> None:
    from rich.markup import escape

    from wattcast.report.text_tables import print_notes, print_rows

    console = env.console()
    heading = f"{found.fitted} rows fitted, {found.held_out} held out" if found.fitted else f"{found.held_out} rows"
    console.print(f"[bold]{escape(found.bundle.gpu)}[/bold], {heading}", highlight=False)
    columns = {"what": "mean error", "engine": "engine", "band": "latency", "rows": "rows", "forecast": "forecast"}
    percent = ({name: f"{getattr(e, name):.1f} %" for name in ("forecast", "calibrated")} for e in found.errors)
    rows = [vars(e) | said for e, said in zip(found.errors, percent, strict=True)]
    print_rows(console, rows, columns | {"calibrated": str(found.bundle.status)})
    print_notes(console, [*found.bundle.assumptions[:1], *found.notes])


def _calibration_to_plain(found: Calibration, gpu: str, folder: Path) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "rows": found.rows,
        "learned": [vars(item) for item in found.learned],
        "not_supported": list(found.left),
        "latency_error_percent": vars(found.latency),
        "power_error_percent": vars(found.power),
        "notes": list(found.notes),
        "bundle": str(folder),
    }


def _print_calibration(env: Environment, found: Calibration, gpu: str) -> None:
    from rich.markup import escape

    from wattcast.report.text_tables import new_table

    console = env.console()
    console.print(f"[bold]{escape(gpu)}[/bold], {found.rows} row{'s' if found.rows > 1 else ''}", highlight=False)
    learned = new_table("learned", "value", "90% interval", "surer than before by")
    for item in found.learned:
        unit = " W" if item.name == "idle_offset" else ""
        ends = f"{item.low:.3g} to {item.high:.3g}{unit}"
        learned.add_row(item.name, f"{item.value:.3g}{unit}", ends, f"{max(item.sure, 0.0):.0%}")
    console.print(learned)
    if found.left:
        console.print(f"Left as forecast, for want of rows that tell: {', '.join(found.left)}", highlight=False)
    errors = new_table("mean error", "forecast", "calibrated", "left out one at a time")
    for name, e in (("latency", found.latency), ("power", found.power)):
        errors.add_row(name, *("-" if x is None else f"{x:.1f} %" for x in (e.forecast, e.fitted, e.left_out)))
    console.print(errors)
    for note in found.notes:
        console.print(f"  - {escape(note)}", style="dim", highlight=False)


@takes_options(FIGURES)
def fit_counters_command(
    ctx: typer.Context,
    table: Annotated[Path, argument("CSV or Parquet of counters and watts.")],
    columns: Annotated[
        Path | None, option("YAML map of the table's columns, or the name of one that ships, such as h200.")
    ] = None,
    form: Annotated[
        str, option("table; gpmtool for files like micro_gtxtitanx.csv; dcgm for logs of dcgmi dmon.")
    ] = "table",
    estimator: Annotated[str, _method("nnls (non-negative), ols (ordinary) or huber (robust nnls).")] = "nnls",
    model: Annotated[
        list[str] | None, _method("Kinds: rate, linear_with_clocks, switched_capacitance, hybrid_rail.")
    ] = None,
    folds: Annotated[int, _method("Parts of benchmarks to hold out; 0 leaves one out at a time.", min=0)] = 0,
    clusters: Annotated[int, _method("Clusters of similar work; 0: as many as predictors.", min=0)] = 0,
    offset: Annotated[
        list[str] | None, _method("Memory clock at which power is off the line: 204MHz; repeatable.")
    ] = None,
    advice: Annotated[bool, option("Say how many clocks are needed and what to measure next.")] = True,
    name: Annotated[str | None, option("Name of the saved model; default: the table's.")] = None,
    device: Annotated[str, option("The device that was measured, for the saved model.")] = "",
    predict: Annotated[
        Path | None, _programs("Their utilisations (gpmtool form, no watts), with --json or --measured.")
    ] = None,
    measured: Annotated[
        Path | None, _programs("With --predict: their watts by clock (names, then rows of MHz, MHz, ms, W).")
    ] = None,
    out: Annotated[Path | None, option("Save the model as YAML.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Fit counter models to a table, judge them on work they have not seen, and explain them.

    Example: wattcast lab fit counters micro_gtxtitanx.csv --form gpmtool --out titanx.yaml
    Example: wattcast lab fit counters micro.csv --form gpmtool --predict real.csv --measured real_time_power.csv
    """
    from wattcast.counter_models.counter_fit import (
        CounterFitOptions,
        counter_fit_to_plain,
        fit_counters,
        make_saved_model,
        predict_applications,
        predict_programs,
        read_counter_tables,
    )
    from wattcast.counter_models.gpmtool_files import read_applications, read_measured_programs
    from wattcast.counter_models.model_selection import CostEstimator
    from wattcast.counter_models.rail_terms import CounterModelKind
    from wattcast.power.power_model import save_model

    env: Environment = ctx.obj
    drawn = FigureOptions(*(options[name] for name in FIGURES))
    form = resolve_name("form", form, TABLE_FORMS)
    if form == "table" and columns is None:
        raise bad_value("--columns", "a YAML map of the table's columns", "none", "Or say --form gpmtool.")
    if predict is not None and not ((json or measured) and form == "gpmtool"):
        wanted = "--form gpmtool, and --json or --measured"
        raise bad_value("--predict", wanted, f"--form {form}" + (" --json" if json else ""))
    if measured is not None and predict is None:
        raise bad_value("--measured", "--predict FILE beside it, with the programs' utilisations", "none")
    by = CostEstimator(resolve_name("estimator", estimator, list(CostEstimator)))
    kinds = tuple(CounterModelKind(resolve_name("model kind", kind, list(CounterModelKind))) for kind in model or [])
    offset_hz = tuple(parse(text, "Hz", "--offset") for text in offset or ())
    asked = CounterFitOptions(by, kinds or tuple(CounterModelKind), folds, clusters, advice, offset_hz=offset_hz)
    tables = read_counter_tables(table, form, columns)
    if next(iter(tables.values())).rail_w:
        if estimator != "nnls" or model or folds or clusters or offset:
            raise bad_value(
                "--estimator, --model, --folds, --clusters, --offset",
                "none of them, since the map has a rail measured by itself",
                "some",
                "Remove `rails` from the map to fit all kinds of model to the total.",
            )
        rails = fit_rails(next(iter(tables.values())))
        if out is not None:
            save_model(make_saved_rails(rails, name or table.stem, device), out)
            env.say(f"model saved: {out}")
        if drawn.any:
            from wattcast.counter_models.counter_figures import make_rails_figures

            drawn.save(env, make_rails_figures(rails, device))
        if json:
            env.json(rails_fit_to_plain(rails))
        else:
            _print_rails(env, rails)
        return
    programs = read_applications(predict) if predict is not None else None
    watts = read_measured_programs(measured) if measured is not None else None
    result = fit_counters(tables, asked, env.say)
    if programs is not None and watts is not None:
        result = predict_programs(result, programs, watts)
    if out is not None:
        save_model(make_saved_model(result, name or table.stem, device), out)
        env.say(f"model saved: {out}")
    if drawn.any:
        from wattcast.counter_models.counter_figures import make_counter_figures

        drawn.save(env, make_counter_figures(result))
    if json:
        predictions = predict_applications(result, programs) if programs is not None else []
        env.json(counter_fit_to_plain(result) | {"predictions": predictions})
        return
    _print_fit(env, result)


def _print_fit(env: Environment, result: CounterFit) -> None:
    from wattcast.counter_models.counter_fit import main_model_kind
    from wattcast.counter_models.fit_diagnostics import smallest_sufficient_clocks
    from wattcast.report.text_tables import new_table

    console, main = env.console(), main_model_kind(result)
    tested = result.tested
    heads = ("model", "fitted", "unseen benchmark", "default known", "unseen cluster", "unseen group")
    errors = new_table(*heads, *(["never trained on"] if tested else []), title="Error, %")
    for kind in result.kinds.values():
        held = kind.held_out
        known = held["benchmark"].anchored
        cells = [held[by].score.mape if by in held else None for by in ("cluster", "group")]
        values = [kind.in_sample.mape, held["benchmark"].score.mape, known.mape if known else None, *cells]
        values += [tested.mape(kind.model)] if tested else []
        errors.add_row(str(kind.model), *("-" if v is None else f"{v:.2f}" for v in values))
    console.print(errors)
    if tested:
        each = new_table("never trained on", "rows", "measured, W", "mean error, %", "bias, %", title=str(main.model))
        for row in tested.summarise(main.model):
            each.add_row(row[0], str(row[1]), *(f"{value:.1f}" for value in row[2:]))
        console.print(each)
    shown = [f"{c.value:.4g}" for c in main.diagnosis.coefficients]
    _print_costs(env, f"Costs of the {main.model} model", main.diagnosis.coefficients, shown)
    for rail in (rail for rail in result.rails if rail.clock_hz.size > 1):
        curve = ", ".join(f"{f / 1e6:.0f}: {v:.3f}" for f, v in zip(rail.clock_hz, rail.relative, strict=True))
        console.print(f"Relative voltage of the {rail.rail} rail by MHz: {curve}", highlight=False)
    if result.training_clocks:
        best = smallest_sufficient_clocks(list(result.training_clocks))
        every = max(result.training_clocks, key=lambda subset: subset.points)
        console.print(
            f"Training clocks: {best.points} of {every.points} pairs are enough ({best.mape:.2f} % against "
            f"{every.mape:.2f} %).",
            highlight=False,
        )
    for candidate in result.candidates[:1]:
        console.print(
            f"Measure next: {candidate.name} (takes away {candidate.variance:.0%} of the costs' variance).",
            highlight=False,
        )
    for words in (*result.warnings, *result.table.notes):
        console.print(f"  - {words}", style="dim", highlight=False, markup=False)


def _print_costs(env: Environment, title: str, costs: Sequence[FittedCost], shown: Sequence[str]) -> None:
    from wattcast.report.text_tables import new_table

    table = new_table("cost", "value", "95 % interval", "at largest, W", "VIF", title=title)
    for c, value in zip(costs, shown, strict=True):
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        table.add_row(c.name, value, interval, f"{c.largest_w:.1f}", f"{c.vif:.1f}" if c.vif else "-")
    env.console().print(table)


def _print_rails(env: Environment, result: RailsFit) -> None:
    from wattcast.report.text_tables import new_table

    console, plain = env.console(), rails_fit_to_plain(result)
    shown = [format_event_cost(c.name, c.value) for c in result.coefficients]
    _print_costs(env, "Costs at relative voltage 1", result.coefficients, shown)
    others = plain["other_kinds"]
    errors = new_table("rows", "n", "two rails", *(kind.split("_")[0] for kind in others), title="Error, %")
    for what, n, error in plain["errors"]:
        cells = (error, *(found.get(what) for found in others.values()))
        errors.add_row(what, str(n), *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    console.print(errors)
    tested = new_table("row not trained on", "measured, W", "predicted, W", "%", title="Test rows")
    for row in plain["test"]:
        off = 100.0 * (row["predicted_w"] / row["measured_w"] - 1.0)
        tested.add_row(row["benchmark"], f"{row['measured_w']:.1f}", f"{row['predicted_w']:.1f}", f"{off:+.1f}")
    console.print(tested)
    trials = ", ".join(f"{lean:g}: {error:.2f} %" for lean, error in result.trials.items())
    console.print(f"Leaning {result.leaning:g}, by error on held-out {result.table.choose_on} rows ({trials}).")
    for words in result.warnings:
        console.print(f"  - {words}", style="dim", highlight=False, markup=False)


fit_app.command("counters")(fit_counters_command)
fit_app.command("component")(fit_component)
fit_app.command("host")(fit_host)
