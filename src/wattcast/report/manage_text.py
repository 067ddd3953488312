"""Comparisons of policies as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wattcast.manage.outcome import Comparison, geometric_mean_gain
from wattcast.manage.policies import Name

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    ("ED² gain", "ed2_gain_over_default"),
    ("with probing", "ed2_gain_over_default_with_probing"),
    ("over oracle", "ed2_over_oracle"),
    ("with probing", "ed2_over_oracle_with_probing"),
    ("slowdown", "slowdown"),
    ("power saved", "power_saving"),
    ("energy saved", "energy_saving"),
)


def print_comparison(
    console: Console,
    comparison: Comparison,
    title: str,
    without: Sequence[str] = (),
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """The controller by application, then all policies in the mean, then what else was found."""
    from rich.table import Table

    by_application = Table(title=f"{title}: {Name.HARMONIA}", title_justify="left")
    by_application.add_column("application")
    means = Table(title="mean of applications", title_justify="left")
    means.add_column("policy")
    for heading, _ in COLUMNS:
        by_application.add_column(heading, justify="right")
        means.add_column(heading, justify="right")
    means.add_column("geometric mean of ED² gain, with probing", justify="right")
    for o in comparison.of(Name.HARMONIA):
        by_application.add_row(o.application, *(f"{getattr(o, name):.2%}" for _, name in COLUMNS))
    for name in Name:
        rows = comparison.of(name)
        if rows:
            mean = comparison.mean(name)
            both = [geometric_mean_gain(rows)] + ([geometric_mean_gain(rows, without)] if without else [])
            means.add_row(name, *(f"{mean[f]:.2%}" for _, f in COLUMNS), " / ".join(f"{g:.2%}" for g in both))
    console.print(by_application)
    console.print(means)
    for what, found in (more or {}).items():
        for key, value in found.items():
            console.print(f"{what}: {key}: {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"median {value['median']:.2%} of {value['plants']} plants"
    return f"{value:.6g}"
