"""Figures of the simulated HD 7970 have labelled axes and something on them, and repeat what the paper shows."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
from studies.hd7970_figures import draw_balance_curves, list_figures

from wattcast.manage import hd7970

MAKERS = list_figures(hd7970.load_tables())


@pytest.mark.parametrize("name", MAKERS)
def test_every_figure_is_labelled_and_not_empty(name: str) -> None:
    figure = MAKERS[name]()
    assert figure.get_supxlabel()
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert axes.lines or axes.patches


def test_balance_curves_reach_the_papers_27() -> None:
    figure = draw_balance_curves(hd7970.load_tables(), ("MaxFlops.MulMAdd",))
    assert max(max(line.get_ydata()) for line in figure.axes[0].lines) == pytest.approx(27, abs=0.5)
