"""``wattcast fit counters`` of a table with a rail that was measured by itself."""

from __future__ import annotations

from pathlib import Path

from wattcast.cli.environment import Environment
from wattcast.fit.counters_two_rails import RailsFit, fit_rails, saved_rails, summary, unit_cost
from wattcast.fit.table import CounterTable


def fit_two_rails(
    env: Environment,
    table: CounterTable,
    name: str,
    device: str,
    out: Path | None,
    figures: Path | None,
    json: bool,
) -> None:
    """Fit, save, draw and print."""
    from wattcast.power.saved import save

    result = fit_rails(table)
    if out is not None:
        save(saved_rails(result, name, device), out)
        env.say(f"model saved: {out}")
    if figures is not None:
        from wattcast.report.counters_rails import all_figures
        from wattcast.report.figure import save as save_figure

        for title, figure in all_figures(result, device).items():
            save_figure(figure, figures / f"{title}.png")
            env.say(f"figure saved: {figures / f'{title}.png'}")
    if json:
        env.json(summary(result))
        return
    _print(env, result)


def _print(env: Environment, result: RailsFit) -> None:
    from wattcast.report.text import table

    console, plain = env.console(), summary(result)
    costs = table("cost", "value", "95 % interval", "at largest, W", "VIF", title="Costs at relative voltage 1")
    for c in result.coefficients:
        interval = "held at zero" if c.standard_error is None else f"{c.low:.3g} to {c.high:.3g}"
        costs.add_row(
            c.name, unit_cost(c.name, c.value), interval, f"{c.largest_w:.1f}", f"{c.vif:.1f}" if c.vif else "-"
        )
    console.print(costs)
    errors = table("rows", "n", "error, %", title="Error of the total")
    for what, n, error in plain["errors"]:
        errors.add_row(what, str(n), f"{error:.2f}")
    console.print(errors)
    tested = table("row not trained on", "measured, W", "predicted, W", "%", title="Test rows")
    for row in plain["test"]:
        off = 100.0 * (row["predicted_w"] / row["measured_w"] - 1.0)
        tested.add_row(row["benchmark"], f"{row['measured_w']:.1f}", f"{row['predicted_w']:.1f}", f"{off:+.1f}")
    console.print(tested)
    trials = ", ".join(f"{lean:g}: {error:.2f} %" for lean, error in result.trials.items())
    console.print(f"Leaning {result.leaning:g}, by error on held-out {result.table.choose_on} rows ({trials}).")
    for words in result.warnings:
        console.print(f"  - {words}", style="dim", highlight=False, markup=False)
