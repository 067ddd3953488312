"""Three power models on the same kernels, and the page that quotes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wattcast.lab.validate.power_checks import (
    MODELS,
    compare_power_models,
    format_views,
    summarise_views,
)

PAGE = Path(__file__).parents[3] / "docs" / "method" / "side-by-side.md"
MARK = "<!-- wattcast lab side-by-side h200 -->"
NUMBER = r"[+-]?\d+\.?\d*"


def test_the_page_is_what_the_command_prints() -> None:
    views = compare_power_models("h200")
    assert len(views) == 40
    for view in views:
        for model in MODELS:
            assert sum(view.place_w[model].values()) == pytest.approx(view.model_w[model])
    summary = summarise_views(views)
    assert sum(of["nearest"] for of in summary["models"].values()) == 40
    printed, quoted = (
        _settled(format_views(views)),
        _settled(PAGE.read_text(encoding="utf-8").partition(MARK)[2]),
    )
    assert len(printed) == len(quoted)
    for ours, theirs in zip(printed, quoted, strict=True):
        assert re.sub(NUMBER, "#", ours) == re.sub(NUMBER, "#", theirs)
        found, wanted = (list(map(float, re.findall(NUMBER, line))) for line in (ours, theirs))
        assert found == pytest.approx(wanted, rel=0.02, abs=1.0), ours


def _settled(text: str) -> list[str]:
    """Lines without what each place draws, which follows every change of the predictor (made anew
    with --page).
    """
    lines = [
        line
        for line in text.strip().splitlines()
        if not re.fullmatch(r"\| [^|]+ \| \d+ \| \d+ \|", line)
    ]
    return [line.rpartition(" | ")[0] if line.count("|") == 8 else line for line in lines]


def test_few_kernels_are_refused(call) -> None:
    done = call("lab", "side-by-side", "h200", "--kernels", "1")
    assert done.code == 2
    assert "three or more" in done.err
