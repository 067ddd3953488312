"""``wattcast fit counters TABLE``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Drawn, Figures, Format, Plot, Which

if TYPE_CHECKING:
    from wattcast.fit.counters import CounterFit

FORMS = ("table", "gpmtool")


def command(
    ctx: typer.Context,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet of counters and watts.")],
    columns: Annotated[
        Path | None,
        typer.Option(help="YAML map of the table's columns, or the name of one that ships, such as h200."),
    ] = None,
    form: Annotated[str, typer.Option(help="table, or gpmtool for files like micro_gtxtitanx.csv.")] = "table",
    estimator: Annotated[
        str, typer.Option(help="nnls (non-negative), ols (ordinary) or huber (non-negative, robust).")
    ] = "nnls",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Kinds to fit: rate, linear_with_clocks, switched_capacitance, hybrid_rail."),
    ] = None,
    folds: Annotated[
        int, typer.Option(min=0, help="Parts of benchmarks to hold out; 0 leaves one out at a time.")
    ] = 0,
    clusters: Annotated[int, typer.Option(min=0, help="Clusters of similar work; 0: as many as predictors.")] = 0,
    offset: Annotated[
        list[str] | None,
        typer.Option(help="Memory clock at which power is off the line, such as 204MHz; repeatable."),
    ] = None,
    advice: Annotated[bool, typer.Option(help="Say how many clocks are needed and what to measure next.")] = True,
    name: Annotated[str | None, typer.Option(help="Name of the saved model; default: the table's.")] = None,
    device: Annotated[str, typer.Option(help="The device that was measured, for the saved model.")] = "",
    predict: Annotated[
        Path | None,
        typer.Option(help="Utilisations of applications (gpmtool form, no watts) to predict, with --json."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the model as YAML.")] = None,
    plot: Plot = None,
    figure: Which = None,
    figures: Figures = None,
    format: Format = "png",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit counter models to a table, judge them on work they have not seen, and explain them.

    Example: wattcast fit counters micro_gtxtitanx.csv --form gpmtool --out titanx.yaml
    """
    from wattcast.errors import bad_value, unknown_name
    from wattcast.fit.choose import Estimator
    from wattcast.fit.counters import Options, fit_counters, read
    from wattcast.fit.gpmtool import read_applications
    from wattcast.fit.summary import application_power, saved_model, summary
    from wattcast.fit.terms import Model
    from wattcast.power.saved import save
    from wattcast.units import parse

    env: Environment = ctx.obj
    drawn = Drawn(plot, figure, figures, format)
    if form not in FORMS:
        raise unknown_name("form", form, FORMS, f"Known: {', '.join(FORMS)}.")
    if form == "table" and columns is None:
        raise bad_value("--columns", "a YAML map of the table's columns", "none", "Or say --form gpmtool.")
    if predict is not None and not (json and form == "gpmtool"):
        raise bad_value("--predict", "--form gpmtool and --json", f"--form {form}" + (" --json" if json else ""))
    if estimator not in tuple(Estimator):
        raise unknown_name("estimator", estimator, Estimator, f"Known: {', '.join(Estimator)}.")
    kinds = tuple(model) if model else tuple(Model)
    for kind in kinds:
        if kind not in tuple(Model):
            raise unknown_name("model", kind, Model, f"Known: {', '.join(Model)}.")
    offset_hz = tuple(parse(text, "Hz", "--offset") for text in offset or ())
    options = Options(
        Estimator(estimator), tuple(Model(kind) for kind in kinds), folds, clusters, advice, offset_hz=offset_hz
    )
    tables = read(table, form, columns)
    if next(iter(tables.values())).rail_w:
        from wattcast.cli.fit_rails import fit_two_rails

        if estimator != "nnls" or model or folds or clusters or offset:
            raise bad_value(
                "--estimator, --model, --folds, --clusters, --offset",
                "none of them, since the map has a rail measured by itself",
                "some",
                "Remove `rails` from the map to fit all kinds of model to the total.",
            )
        fit_two_rails(env, next(iter(tables.values())), name or table.stem, device, out, figures, json)
        return
    result = fit_counters(tables, options, env.say)
    if out is not None:
        save(saved_model(result, name or table.stem, device), out)
        env.say(f"model saved: {out}")
    if drawn.any:
        from wattcast.report.counters import all_figures

        drawn.save(env, all_figures(result))
    if json:
        predictions = application_power(result, read_applications(predict)) if predict is not None else []
        env.json(summary(result) | {"predictions": predictions})
        return
    _print(env, result)


def _print(env: Environment, result: CounterFit) -> None:
    from wattcast.fit.advise import enough
    from wattcast.fit.summary import main_kind
    from wattcast.report.text import table

    console, main = env.console(), main_kind(result)
    errors = table(
        "model", "fitted", "unseen benchmark", "default known", "unseen cluster", "unseen group", title="Error, %"
    )
    for kind in result.kinds.values():
        held = kind.held_out
        known = held["benchmark"].anchored
        cells = [held[by].score.mape if by in held else None for by in ("cluster", "group")]
        values = [kind.in_sample.mape, held["benchmark"].score.mape, known.mape if known else None, *cells]
        errors.add_row(str(kind.model), *("-" if v is None else f"{v:.2f}" for v in values))
    console.print(errors)
    costs = table("cost", "value", "95 % interval", "at largest, W", "VIF", title=f"Costs of the {main.model} model")
    for c in main.diagnosis.coefficients:
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        costs.add_row(c.name, f"{c.value:.4g}", interval, f"{c.largest_w:.1f}", f"{c.vif:.1f}" if c.vif else "-")
    console.print(costs)
    for rail in (rail for rail in result.rails if rail.clock_hz.size > 1):
        curve = ", ".join(f"{f / 1e6:.0f}: {v:.3f}" for f, v in zip(rail.clock_hz, rail.relative, strict=True))
        console.print(f"Relative voltage of the {rail.rail} rail by MHz: {curve}", highlight=False)
    if result.training_clocks:
        best = enough(list(result.training_clocks))
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
