"""``wattcast lab fit counters``: power models from hardware counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import FIGURES, Environment, FigureOptions, Json, folded, takes_options
from wattcast.core.errors import bad_value, unknown_name
from wattcast.core.units import parse
from wattcast.counter_models.counter_table import CounterTable
from wattcast.counter_models.two_rails import (
    RailsFit,
    fit_rails,
    format_event_cost,
    make_saved_rails,
    rails_fit_to_plain,
)

if TYPE_CHECKING:
    from wattcast.counter_models.counter_fit import CounterFit

TABLE_FORMS = ("table", "gpmtool", "dcgm")


_method = folded("How it is fitted")
_programs = folded("Programs never trained on")


@takes_options(FIGURES)
def fit_counters_command(
    ctx: typer.Context,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet of counters and watts.")],
    columns: Annotated[
        Path | None,
        typer.Option(help="YAML map of the table's columns, or the name of one that ships, such as h200."),
    ] = None,
    form: Annotated[
        str, typer.Option(help="table; gpmtool for files like micro_gtxtitanx.csv; dcgm for logs of dcgmi dmon.")
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
    advice: Annotated[bool, typer.Option(help="Say how many clocks are needed and what to measure next.")] = True,
    name: Annotated[str | None, typer.Option(help="Name of the saved model; default: the table's.")] = None,
    device: Annotated[str, typer.Option(help="The device that was measured, for the saved model.")] = "",
    predict: Annotated[
        Path | None, _programs("Their utilisations (gpmtool form, no watts), with --json or --measured.")
    ] = None,
    measured: Annotated[
        Path | None, _programs("With --predict: their watts by clock (names, then rows of MHz, MHz, ms, W).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the model as YAML.")] = None,
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
    from wattcast.power.saved_models import save_model

    env: Environment = ctx.obj
    drawn = FigureOptions(*(options[name] for name in FIGURES))
    if form not in TABLE_FORMS:
        raise unknown_name("form", form, TABLE_FORMS, f"Known: {', '.join(TABLE_FORMS)}.")
    if form == "table" and columns is None:
        raise bad_value("--columns", "a YAML map of the table's columns", "none", "Or say --form gpmtool.")
    if predict is not None and not ((json or measured) and form == "gpmtool"):
        wanted = "--form gpmtool, and --json or --measured"
        raise bad_value("--predict", wanted, f"--form {form}" + (" --json" if json else ""))
    if measured is not None and predict is None:
        raise bad_value("--measured", "--predict FILE beside it, with the programs' utilisations", "none")
    if estimator not in tuple(CostEstimator):
        raise unknown_name("estimator", estimator, CostEstimator, f"Known: {', '.join(CostEstimator)}.")
    kinds = tuple(model) if model else tuple(CounterModelKind)
    for kind in kinds:
        if kind not in tuple(CounterModelKind):
            raise unknown_name("model", kind, CounterModelKind, f"Known: {', '.join(CounterModelKind)}.")
    offset_hz = tuple(parse(text, "Hz", "--offset") for text in offset or ())
    asked = CounterFitOptions(
        CostEstimator(estimator),
        tuple(CounterModelKind(kind) for kind in kinds),
        folds,
        clusters,
        advice,
        offset_hz=offset_hz,
    )
    tables = read_counter_tables(table, form, columns)
    if next(iter(tables.values())).rail_w:
        if estimator != "nnls" or model or folds or clusters or offset:
            raise bad_value(
                "--estimator, --model, --folds, --clusters, --offset",
                "none of them, since the map has a rail measured by itself",
                "some",
                "Remove `rails` from the map to fit all kinds of model to the total.",
            )
        fit_two_rails(env, next(iter(tables.values())), name or table.stem, device, out, drawn.figures, json)
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
    costs = new_table(
        "cost", "value", "95 % interval", "at largest, W", "VIF", title=f"Costs of the {main.model} model"
    )
    for c in main.diagnosis.coefficients:
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        costs.add_row(c.name, f"{c.value:.4g}", interval, f"{c.largest_w:.1f}", f"{c.vif:.1f}" if c.vif else "-")
    console.print(costs)
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


def fit_two_rails(
    env: Environment, table: CounterTable, name: str, device: str, out: Path | None, figures: Path | None, json: bool
) -> None:
    """Fit a model of two rails; save, draw and print it."""
    from wattcast.power.saved_models import save_model

    result = fit_rails(table)
    if out is not None:
        save_model(make_saved_rails(result, name, device), out)
        env.say(f"model saved: {out}")
    if figures is not None:
        from wattcast.counter_models.counter_figures import make_rails_figures
        from wattcast.report.figure_style import save_figure

        for title, figure in make_rails_figures(result, device).items():
            save_figure(figure, figures / f"{title}.png")
            env.say(f"figure saved: {figures / f'{title}.png'}")
    if json:
        env.json(rails_fit_to_plain(result))
        return
    _print_rails(env, result)


def _print_rails(env: Environment, result: RailsFit) -> None:
    from wattcast.report.text_tables import new_table

    console, plain = env.console(), rails_fit_to_plain(result)
    costs = new_table("cost", "value", "95 % interval", "at largest, W", "VIF", title="Costs at relative voltage 1")
    for c in result.coefficients:
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        costs.add_row(
            c.name,
            format_event_cost(c.name, c.value),
            interval,
            f"{c.largest_w:.1f}",
            f"{c.vif:.1f}" if c.vif else "-",
        )
    console.print(costs)
    errors = new_table("rows", "n", "error, %", title="Error of the total")
    for what, n, error in plain["errors"]:
        errors.add_row(what, str(n), f"{error:.2f}")
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
