"""``wattcast lab fit`` and ``wattcast calibrate``: measurements -> coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast.cli.command_builder import command, parse_factors
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import JSON
from wattcast.cli.component_commands import fit_component as fit_component
from wattcast.cli.figure_options import FigureOptions
from wattcast.core.errors import (
    BadInput,
    bad_value,
    resolve_name,
)
from wattcast.core.option_declaration import Option
from wattcast.core.units import show
from wattcast.options.setting_options import ENGINES
from wattcast.report.text_tables import (
    new_table,
    print_notes,
    print_rows,
)

if TYPE_CHECKING:
    from wattcast.calibrate.calibration import Calibration
    from wattcast.calibrate.table_fit import TableCalibration
    from wattcast.lab.counter_models.counter_fit import (
        CounterFit,
        HeldBackRows,
        RailVoltageReport,
    )
    from wattcast.lab.counter_models.fit_diagnostics import ClockSubset, FittedCost
    from wattcast.lab.counter_models.rail_terms import CounterModelKind
    from wattcast.lab.counter_models.rails_apart import RailsFit
    from wattcast.report.figure_style import FigureMaker

TABLE_FORMS = ("table", "gpmtool", "dcgm")


@command("lab fit kernels")
def fit_kernels(
    env: Environment,
    database: Annotated[
        str,
        Option(
            "A kernel database: its folder, its rows.parquet, or a shipped name.", positional=True
        ),
    ],
    gpu: Annotated[str, Option("The catalogue GPU it was measured on.")],
    out: Annotated[
        Path, Option("Folder for bundle.json, arrays.npz and out_of_fold.parquet.")
    ] = Path(),
    inherit: Annotated[
        bool | None,
        Option(
            "Move the card's forecast by the rows, or fit from nothing; default: inherit "
            "below 1000 burst rows.",
            "inherit/alone",
        ),
    ] = None,
    leave_out: Annotated[
        bool,
        Option(
            "Learn anew how far intervals reach for what was never measured: fifteen more "
            "fits, minutes."
        ),
    ] = False,
) -> CommandOutput:
    """Fit latency, power and clock of kernels: corrections, energies, V(f), clock law,
    intervals.
    """
    from wattcast.lab.fit.database_fit import fit_kernel_database, write_fit
    from wattcast.lab.validate import kernel_checks, ledger

    bundle, held_out = fit_kernel_database(
        database,
        gpu,
        env.say,
        inherit,
        leave_out,
    )
    write_fit(bundle, held_out, out)
    rows = kernel_checks.kernel_rows(held_out, gpu)
    return CommandOutput(
        {"rows": rows}, ledger.format_ledger(rows), notes=[f"{out / 'bundle.json'} written"]
    )


@command("lab fit engine")
def fit_engine(
    env: Environment,
    database: Annotated[
        str,
        Option(
            "Rows of an engine's kernels: a folder, its rows.parquet, or h200/engine.",
            positional=True,
        ),
    ],
    gpu: Annotated[str, Option("The catalogue GPU they were measured on.")],
    out: Annotated[Path, Option("Folder for bundle.json and arrays.npz.")] = Path(),
    bundle: Annotated[
        Path | None, Option("Folder to start from, in place of the shipped one.")
    ] = None,
    family: Annotated[
        str, Option("Replace one family of kernels alone, such as engine_weight_only.")
    ] = "",
) -> None:
    """Add an engine's kernels to a fitted bundle; rows that the database holds out stay unread."""
    from wattcast.lab.fit.database_fit import fit_engine_database
    from wattcast.predictor.bundle.bundle_file import write_bundle

    extended = fit_engine_database(
        database,
        gpu,
        bundle,
        env.say,
        family,
    )
    write_bundle(extended, out / "bundle.json")
    env.say(f"{out / 'bundle.json'} written: {extended.provenance.note}")


@command("lab fit host")
def fit_host(
    env: Environment,
    database: Annotated[
        str,
        Option(
            "Whole-model rows: a database, models.parquet, journals, or a CSV of your own.",
            positional=True,
        ),
    ],
    gpu: Annotated[str, Option("The catalogue GPU they were measured on.")],
    out: Annotated[
        Path | None, Option("Folder for the GPU's bundle with this launch cost.")
    ] = None,
) -> CommandOutput:
    """Fit what issuing an operator costs the host, from rows launched eagerly.

    Example: wattcast lab fit host mine.csv --gpu h200     (columns model, batch, seq, phase,
    latency_s: "2.9 ms")"""
    from wattcast import hardware
    from wattcast.calibrate import whole_models
    from wattcast.predictor.bundle import bundle_for
    from wattcast.predictor.bundle.calibrated import save_bundle

    host_fit = whole_models.fit_host_database(database, gpu)
    if out is not None:
        bundle = whole_models.with_launch_cost(bundle_for(hardware.load_gpu(gpu)), host_fit.host_s)
        env.say(f"bundle saved: {save_bundle(bundle, out)}")
    errors = {name: host_fit.error(f"{name}_s") for name in ("predicted", "default", "left_out")}
    plain = [asdict(row) for row in host_fit.rows]

    def print_text(console: Console) -> None:
        columns = {
            "name": "workload",
            "operators": "operators",
            "latency_s": "measured",
            "predicted_s": "fitted",
        }
        columns |= {"default_s": "default", "host_s": "asks for"}
        rows = [row | ({"host_s": "GPU-bound"} if row["host_s"] is None else {}) for row in plain]
        print_rows(console, rows, columns)
        env.stdout.write(
            f"{show(host_fit.host_s, 's', 3)} an operator (use: --host-launch "
            f"{host_fit.host_s * 1e6:.3g}us); mean error "
            f"{errors['predicted']:.1%}, model left out {errors['left_out']:.1%}, with the default "
            f"{show(host_fit.default_s, 's', 3)} {errors['default']:.1%}\n"
        )

    return CommandOutput(
        {
            "host_s": host_fit.host_s,
            "error": errors,
            "rows": plain,
        },
        print_text,
    )


@command("lab sensitivity")
def fit_sensitivity(
    env: Environment,
    table: Annotated[Path, Option("CSV of kernels over settings with counters.", positional=True)],
    out: Annotated[Path | None, Option("Save the model as YAML.")] = None,
    name: Annotated[str | None, Option("Name of the model; default: the table's.")] = None,
) -> CommandOutput:
    """Fit predictors of compute and bandwidth sensitivity to counters, as paper 004 does.

    Example: wattcast manage simulate --export table.csv && wattcast lab sensitivity table.csv --out
    model.yaml"""
    import msgspec
    import yaml

    from wattcast.control import sensitivity_model
    from wattcast.core.whole_files import write_whole

    data = sensitivity_model.read_sensitivity_table(table)
    source = f"fitted by Wattcast to {table.name}, {len(data.kernels)} kernels"
    fitted = sensitivity_model.fit_sensitivity(
        data.counters,
        data.sensitivity,
        data.groups,
        name or table.stem,
        source,
    )
    if out is not None:
        write_whole(
            out, yaml.safe_dump(msgspec.to_builtins(fitted.model), sort_keys=False).encode()
        )
        env.say(f"model saved: {out}")
    plain = {
        "model": msgspec.to_builtins(fitted.model),
        "kernels": fitted.rows,
        "error": dict(fitted.error),
        "left_out_error": dict(fitted.left_out_error),
        "correlation": dict(fitted.correlation),
        "published": {
            "error": {"compute": 0.0571, "bandwidth": 0.0303},
            "source": "paper 004, section 7.2",
        },
    }
    lines = (
        f"{which}: error {fitted.error[which]:.2%}, applications left out in turn "
        f"{fitted.left_out_error[which]:.2%}, correlation {fitted.correlation[which]:.2f}; "
        f"counters {', '.join(side.coefficients)}"
        for which, side in (
            ("compute", fitted.model.compute),
            ("bandwidth", fitted.model.bandwidth),
        )
    )
    return CommandOutput(plain, "\n".join(lines))


@command("calibrate")
def calibrate(
    env: Environment,
    gpu: Annotated[str, Option("Catalogue name (`wattcast gpus`) or your own YAML file.")],
    file: Annotated[
        Path | None,
        Option(
            "CSV or JSON of whole models: workload, batch, seq ..., latency_ms, energy_j "
            "or power_w, clock_mhz.",
            positional=True,
        ),
    ] = None,
    table: Annotated[
        list[Path] | None,
        Option(
            "Kernel tables in the format of NVIDIA's aiconfigurator (CSV, Parquet), or a "
            "folder of them, or of kernel rows of your own; may be repeated."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        Option("With --table: tables of vllm|sglang|trtllm alone.", choices=ENGINES),
    ] = None,
    check: Annotated[
        bool, Option("With --table: compare the GPU's bundle with all rows and fit nothing.")
    ] = False,
    out: Annotated[Path | None, Option("Folder for the bundle; default: calibrated/GPU.")] = None,
    factor: Annotated[
        list[str] | None,
        Option("Your own efficiency factor to start from, such as dram_energy=1.2."),
    ] = None,
) -> CommandOutput:
    """Adjust a GPU's forecast to measurements: of whole models (FILE), or of kernels (--table).

    Whole models move launch cost, efficiencies, energy scale and idle offset: as many as the rows
    support. Kernel tables fit corrections of products, attention and experts, with one shape in
    five held out to judge them; sustained rows (`lab kernels`) move energies to what your card
    draws.

    Example: wattcast calibrate --gpu a100-sxm mine.csv; then predict with --bundle
    calibrated/a100-sxm-80gb

    Example: wattcast calibrate --gpu l40s --table tables/l40s

    Example: wattcast calibrate --gpu h100-sxm --table tables/ --engine trtllm
    """
    if file is not None and not table:
        return _calibrate_whole_models(file, gpu, out, parse_factors(factor))
    if file is not None or not table:
        raise BadInput(
            "calibrate takes one of two: FILE with whole models, or --table with kernel tables."
        )
    return _calibrate_with_tables(
        env,
        table,
        gpu,
        out,
        engine,
        check,
    )


def _calibrate_whole_models(
    file: Path,
    gpu: str,
    out: Path | None,
    factors: dict[str, float],
) -> CommandOutput:
    """Adjust a forecast to whole models and save its bundle."""
    from wattcast.calibrate import calibration_rows
    from wattcast.predictor.api import find_gpu

    chip = find_gpu(gpu)
    folder = out or Path("calibrated") / chip.name
    calibrated = calibration_rows.calibrate(file, chip, out=folder, factors=factors)
    saved = f"{calibrated.bundle.gpu} saved in {folder}; use it with --bundle {folder}"
    plain = {**calibrated.to_dict(), "bundle": str(folder)}

    def show_calibration(console: Console) -> None:
        _print_calibration(console, calibrated, chip.name)

    return CommandOutput(plain, show_calibration, notes=[saved])


def _calibrate_with_tables(
    env: Environment,
    tables: list[Path],
    gpu: str,
    out: Path | None,
    engine: str | None,
    only_check: bool,
) -> CommandOutput:
    """Adjust a forecast to kernel tables and save its bundle, or compare them and save nothing."""
    from wattcast.calibrate import table_fit
    from wattcast.predictor.bundle.calibrated import save_bundle

    notes = []
    if only_check:
        calibrated = table_fit.check_tables(tables, gpu, engine)
        plain = calibrated.to_dict()
    else:
        calibrated = table_fit.calibrate_tables(tables, gpu, env.say, engine)
        plain = calibrated.to_dict()
        folder = out or Path("calibrated") / calibrated.bundle.gpu
        saved = save_bundle(calibrated.bundle, folder)
        notes.append(f"{saved} written; use it with --bundle {folder}")
        plain["bundle"] = str(folder)

    def show_errors(console: Console) -> None:
        _print_table_errors(console, calibrated)

    return CommandOutput(plain, show_errors, notes=notes)


def _print_table_errors(console: Console, found: TableCalibration) -> None:
    heading = (
        f"{found.fitted} rows fitted, {found.held_out} held out"
        if found.fitted
        else f"{found.held_out} rows"
    )
    console.print(f"[bold]{escape(found.bundle.gpu)}[/bold], {heading} of latency")
    columns = {
        "what": "mean error",
        "engine": "engine",
        "band": "latency",
        "rows": "rows",
        "forecast": "forecast",
    }
    rows = []
    for error in found.errors:
        row = dict(vars(error))
        row["forecast"] = f"{error.forecast:.1f} %"
        row["calibrated"] = f"{error.calibrated:.1f} %"
        rows.append(row)
    print_rows(console, rows, columns | {"calibrated": str(found.bundle.status)})
    print_notes(console, [*found.bundle.assumptions[:1], *found.notes])


def _print_calibration(
    console: Console,
    found: Calibration,
    gpu: str,
) -> None:
    console.print(f"[bold]{escape(gpu)}[/bold], {found.rows} row{'s' if found.rows > 1 else ''}")
    learned = new_table("learned", "value", "90% interval", "surer than before by")
    for of in found.learned:
        unit = " W" if of.name == "idle_offset" else ""
        ends = f"{of.low:.3g} to {of.high:.3g}{unit}"
        learned.add_row(of.name, f"{of.value:.3g}{unit}", ends, f"{max(of.sure, 0.0):.0%}")
    console.print(learned)
    if found.unsupported:
        console.print(
            f"Left as forecast, for want of rows that tell: {', '.join(found.unsupported)}"
        )
    errors = new_table("mean error", "forecast", "calibrated", "left out one at a time")
    for name, e in (("latency", found.latency), ("power", found.power)):
        errors.add_row(
            name, *("-" if x is None else f"{x:.1f} %" for x in (e.forecast, e.fitted, e.left_out))
        )
    console.print(errors)
    print_notes(console, found.notes, "")


@dataclass(frozen=True)
class CounterTableOptions:
    """How the table is read, and what the fitted model is used for."""

    columns: Annotated[
        Path | None,
        Option("YAML map of the table's columns, or the name of one that ships, such as h200."),
    ] = None
    form: Annotated[
        str,
        Option("table; gpmtool for files like micro_gtxtitanx.csv; dcgm for logs of dcgmi dmon."),
    ] = "table"
    name: Annotated[str | None, Option("Name of the saved model; default: the table's.")] = None
    device: Annotated[str, Option("The device that was measured, for the saved model.")] = ""
    predict: Annotated[
        Path | None,
        Option(
            "Their utilisations (gpmtool form, no watts), with --json or --measured.",
            panel="Programs never trained on",
        ),
    ] = None
    measured: Annotated[
        Path | None,
        Option(
            "With --predict: their watts by clock (names, then rows of MHz, MHz, ms, W).",
            panel="Programs never trained on",
        ),
    ] = None
    out: Annotated[Path | None, Option("Save the model as YAML.")] = None
    json: Annotated[bool, JSON] = False


@command(
    "lab fit counters", FigureOptions, "wattcast.lab.counter_models.counter_fit:CounterFitOptions"
)
def fit_counters_command(
    env: Environment,
    table: Annotated[Path, Option("CSV or Parquet of counters and watts.", positional=True)],
    choices: CounterTableOptions,
    **how: Any,
) -> CommandOutput:
    """Fit counter models to a table, judge them on work they have not seen, and explain them.

    Example: wattcast lab fit counters micro_gtxtitanx.csv --form gpmtool --out titanx.yaml
    Example: wattcast lab fit counters micro.csv --form gpmtool --predict real.csv --measured
    real_time_power.csv"""
    from wattcast.lab.counter_models import (
        counter_figures,
        counter_fit,
        counter_fit_report,
        gpmtool_files,
        rails_apart,
    )
    from wattcast.power.power_model import save_model

    form = resolve_name("form", choices.form, TABLE_FORMS)
    _check_table_options(choices, form)
    tables = counter_fit.read_counter_tables(table, form, choices.columns)
    first = next(iter(tables.values()))
    name = choices.name or table.stem
    if first.rail_w:
        if _TOTAL_FIT_OPTIONS & env.typed_options:
            raise bad_value(
                "--estimator, --model, --folds, --clusters, --offset",
                "none of them, since the map has a rail measured by itself",
                "some",
                "Remove `rails` from the map to fit all kinds of model to the total.",
            )
        return _fit_rails(env, rails_apart.fit_rails(first), choices, name)
    programs = None
    if choices.predict is not None:
        programs = gpmtool_files.read_applications(choices.predict)
    result = counter_fit.fit_counters(tables, counter_fit.CounterFitOptions(**how), env.say)
    if programs is not None and choices.measured is not None:
        watts = gpmtool_files.read_measured_programs(choices.measured)
        result = counter_fit.predict_programs(result, programs, watts)
    if choices.out is not None:
        save_model(counter_fit_report.make_saved_model(result, name, choices.device), choices.out)
        env.say(f"model saved: {choices.out}")

    def make_plain() -> dict[str, Any]:
        plain = counter_fit_report.counter_fit_to_plain(result)
        plain["predictions"] = []
        if programs is not None:
            plain["predictions"] = counter_fit.predict_applications(result, programs)
        return plain

    figures = partial(counter_figures.make_counter_figures, result)
    return CommandOutput(make_plain, partial(_print_fit, result=result), figures=figures)


# options of fits to the total power, which a map with a measured rail does not take
_TOTAL_FIT_OPTIONS = {"estimator", "models", "folds", "clusters", "offset"}


def _check_table_options(choices: CounterTableOptions, form: str) -> None:
    """Raise an error for options that do not go together."""
    if form == "table" and choices.columns is None:
        do = "Or say --form gpmtool."
        raise bad_value("--columns", "a YAML map of the table's columns", "none", do)
    has_output = choices.json or choices.measured
    if choices.predict is not None and not (has_output and form == "gpmtool"):
        expected = "--form gpmtool, and --json or --measured"
        json_word = " --json" if choices.json else ""
        raise bad_value("--predict", expected, f"--form {form}{json_word}")
    if choices.measured is not None and choices.predict is None:
        expected = "--predict FILE as well, with the programs' utilisations"
        raise bad_value("--measured", expected, "none")


def _fit_rails(
    env: Environment,
    rails: RailsFit,
    choices: CounterTableOptions,
    name: str,
) -> CommandOutput:
    """Save, print and draw a fit with rails that were measured by themselves."""
    from wattcast.lab.counter_models import counter_figures, rails_apart
    from wattcast.lab.paper_figures import multimedia_figures
    from wattcast.power.power_model import save_model

    if choices.out is not None:
        save_model(rails_apart.make_saved_rails(rails, name, choices.device), choices.out)
        env.say(f"model saved: {choices.out}")
    plain = rails_apart.rails_fit_to_plain(rails)

    def figures() -> dict[str, FigureMaker]:
        source = counter_figures.describe_source(rails, choices.device)
        makers = counter_figures.make_rails_figures(rails, choices.device)
        return makers | multimedia_figures.make_figures(rails, source)

    return CommandOutput(plain, partial(_print_rails, result=rails, plain=plain), figures=figures)


def _print_fit(console: Console, result: CounterFit) -> None:
    """Print the errors of each kind of model, then the costs and the voltages of the main one."""
    from wattcast.lab.counter_models import counter_fit

    main = counter_fit.main_model_kind(result)
    console.print(_table_fit_errors(result))
    if result.tested:
        console.print(_table_tested_groups(result.tested, main.model))
    values = [f"{cost.value:.4g}" for cost in main.diagnosis.coefficients]
    title = f"Costs of the {main.model} model"
    _print_costs(console, title, main.diagnosis.coefficients, values)
    for rail in result.rails:
        if rail.clock_hz.size > 1:
            console.print(_describe_voltages(rail))
    if result.training_clocks:
        console.print(_describe_training_clocks(result.training_clocks))
    print_notes(console, (*result.warnings, *result.table.notes), "")


def _table_fit_errors(result: CounterFit) -> Table:
    """Return the errors of each kind of model, on rows it was fitted to and on unseen ones."""
    heads = [
        "model",
        "fitted",
        "unseen benchmark",
        "default known",
        "unseen cluster",
        "unseen group",
    ]
    if result.tested:
        heads.append("never trained on")
    table = new_table(*heads, title="Error, %")
    for kind in result.kinds.values():
        by_benchmark = kind.held_out["benchmark"]
        anchored = by_benchmark.anchored
        errors = [
            kind.in_sample.mape,
            by_benchmark.score.mape,
            None if anchored is None else anchored.mape,
        ]
        for grouping in ("cluster", "group"):
            held_out = kind.held_out.get(grouping)
            errors.append(None if held_out is None else held_out.score.mape)
        if result.tested:
            errors.append(result.tested.mape(kind.model))
        table.add_row(str(kind.model), *("-" if e is None else f"{e:.2f}" for e in errors))
    return table


def _table_tested_groups(tested: HeldBackRows, model: CounterModelKind) -> Table:
    """Return power and errors of a model on rows that were never trained on, by group."""
    columns = ("never trained on", "rows", "measured, W", "mean error, %", "bias, %")
    rows = []
    for name, count, *numbers in tested.summarise(model):
        rows.append((name, str(count), *(f"{number:.1f}" for number in numbers)))
    return new_table(*columns, title=str(model), rows=rows)


def _describe_voltages(rail: RailVoltageReport) -> str:
    """Return the relative voltage of a rail at each of its clocks."""
    points = []
    for clock_hz, relative in zip(rail.clock_hz, rail.relative, strict=True):
        points.append(f"{clock_hz / 1e6:.0f}: {relative:.3f}")
    return f"Relative voltage of the {rail.rail} rail by MHz: {', '.join(points)}"


def _describe_training_clocks(subsets: Sequence[ClockSubset]) -> str:
    """Say how many pairs of clocks would have been enough for the fit."""
    from wattcast.lab.counter_models import fit_diagnostics

    best = fit_diagnostics.smallest_sufficient_clocks(list(subsets))
    every = max(subsets, key=lambda subset: subset.points)
    return (
        f"Training clocks: {best.points} of {every.points} pairs are enough "
        f"({best.mape:.2f} % against {every.mape:.2f} %)."
    )


def _print_costs(
    console: Console,
    title: str,
    costs: Sequence[FittedCost],
    shown: Sequence[str],
) -> None:
    table = new_table(
        "cost",
        "value",
        "95 % interval",
        "at largest, W",
        "VIF",
        title=title,
    )
    for c, value in zip(costs, shown, strict=True):
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        table.add_row(
            c.name,
            value,
            interval,
            f"{c.largest_w:.1f}",
            f"{c.vif:.1f}" if c.vif else "-",
        )
    console.print(table)


def _print_rails(
    console: Console,
    result: RailsFit,
    plain: dict[str, Any],
) -> None:
    from wattcast.lab.counter_models.rails_apart import format_event_cost

    shown = [format_event_cost(c.name, c.value) for c in result.coefficients]
    _print_costs(console, "Costs at relative voltage 1", result.coefficients, shown)
    error_of_kind = plain["other_kinds"]
    errors = new_table(
        "rows",
        "n",
        "rails apart",
        *(kind.split("_")[0] for kind in error_of_kind),
        title="Error, %",
    )
    for what, n, error in plain["errors"]:
        cells = (error, *(errors_by_rows.get(what) for errors_by_rows in error_of_kind.values()))
        errors.add_row(what, str(n), *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    console.print(errors)
    tested = new_table(
        "row not trained on",
        "measured, W",
        "predicted, W",
        "%",
        title="Test rows",
    )
    for row in plain["test"]:
        off = 100.0 * (row["predicted_w"] / row["measured_w"] - 1.0)
        tested.add_row(
            row["benchmark"], f"{row['measured_w']:.1f}", f"{row['predicted_w']:.1f}", f"{off:+.1f}"
        )
    console.print(tested)
    trials = ", ".join(f"{lean:g}: {error:.2f} %" for lean, error in result.trials.items())
    chosen = f", by error on held-out {result.table.choose_on} rows ({trials})" if trials else ""
    console.print(f"Leaning {result.leaning:g}{chosen}.")
    print_notes(console, result.warnings, "")
