"""Sections of the ledger: what takes long is kept, what is missing says so, and figures show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wattcast.fit.scoring import LedgerRow, make_ledger_row
from wattcast.report.prediction_figures import KERNEL_KINDS, profiled_shares
from wattcast.validate import build_ledger, ledger, ledger_figures, ledger_store, published_checks
from wattcast.validate.kernel_checks import layer_rows
from wattcast.validate.ledger import STUDIES, load_held_out
from wattcast.validate.ledger_figures import NEAR_LATENCY, find_equal_latency_pairs

QUICK_SETS = (
    "kernel_rows interval_rows counter_rows choice_rows engine_kernel_rows serving_rows layer_rows model_rows"
)


@pytest.fixture
def _no_quick_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the sets that every ledger computes, which ``test_kernel_checks.py`` looks at."""
    for name in (*QUICK_SETS.split(), "make_counter_model_rows", "card_rows", "public_rows", "make_energy_rows"):
        monkeypatch.setattr(ledger, name, lambda *given: [])


@pytest.mark.usefixtures("_no_quick_sets")
def test_long_sections_are_named_until_they_are_made(elsewhere: dict[str, str]) -> None:
    rows = {r["set"]: r for r in build_ledger(variables=elsewhere)}
    assert "studies/ablations.py" in rows["h200 ablations"]["missing"]
    assert sum("studies/" in str(r.get("missing")) for r in rows.values()) == len(STUDIES)
    assert "--ablations" in rows["Titan X clock plane"]["missing"]
    assert "WATTCAST_REFERENCE" in rows["simulator power traces"]["missing"]


def counted() -> tuple[list[int], Callable[[], list[LedgerRow]]]:
    made: list[int] = []

    def make() -> list[LedgerRow]:
        made.append(1)
        return [make_ledger_row("a set", "a quantity", len(made), 1.25)]

    return made, make


def test_a_long_section_is_made_once_and_kept(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    assert ledger_store.load_rows("x", elsewhere) is None
    first = ledger_store.load_or_make_rows("x", make, elsewhere)
    assert ledger_store.load_rows("x", elsewhere) == first
    assert ledger_store.load_or_make_rows("x", make, elsewhere) == first
    assert len(made) == 1
    assert ledger_store.load_or_make_rows("x", make, elsewhere, again=True) != first
    assert len(made) == 2


@pytest.mark.usefixtures("_no_quick_sets")
def test_rows_that_a_study_left_are_listed(elsewhere: dict[str, str]) -> None:
    for section in STUDIES:
        one = make_ledger_row(f"h200 {section}, a set", "a quantity", 1, 2.0)
        ledger_store.load_or_make_rows(f"{section}-h200", lambda one=one: [one], elsewhere)
    rows = build_ledger(variables=elsewhere)
    assert {f"h200 {section}, a set" for section in STUDIES} <= {r["set"] for r in rows}
    assert not any("studies/" in str(r.get("missing")) for r in rows)


@pytest.mark.usefixtures("_no_quick_sets")
def test_asking_for_published_sets_runs_them(elsewhere: dict[str, str]) -> None:
    said: list[str] = []
    build_ledger(tell=said.append, long=True, variables=elsewhere)
    sections = ["titanx", "v100", "training", "coverage"]
    assert [text for text in said if "working" in text] == [f"{section}: working" for section in sections]
    for section in sections:
        assert ledger_store.load_rows(section, elsewhere)


def test_half_a_file_is_made_again(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    ledger_store.load_or_make_rows("x", make, elsewhere)
    (path,) = Path(elsewhere["WATTCAST_CACHE"]).glob("x-*.json")
    path.write_text('{"rows": [')
    assert ledger_store.load_or_make_rows("x", make, elsewhere)[0]["n"] == 2
    assert len(made) == 2


def test_pairs_of_equal_latency_differ_in_power_as_the_rule_says() -> None:
    found = find_equal_latency_pairs("h200", load_held_out("h200"))
    assert found.imbalance
    assert found.reuse
    for a, b in (*found.imbalance, *found.reuse):
        assert abs(b.latency_s / a.latency_s - 1) < NEAR_LATENCY
        assert b.power_w > a.power_w
    few, many = found.imbalance[0]
    assert few.tiles < many.tiles <= 132
    assert many.power_w - few.power_w > 96.0  # the paper's own pair differs by 96 W
    assert many.predicted_w - few.predicted_w > 0.5 * (many.power_w - few.power_w)
    assert all(b.memory_w > a.memory_w + 20 for a, b in found.reuse)


def test_held_out_rows_of_another_database_are_refused() -> None:
    held = load_held_out("h200")
    with pytest.raises(Exception, match="Fit again"):
        find_equal_latency_pairs("h200", replace(held, work=held.work[:-1]))


def test_kinds_of_a_profile() -> None:
    names = ["nvjet_sm90_tst", "void softmax_warp_forward", "void elementwise_kernel", "void reduce_kernel<512>"]
    profile = {"names": names, "order": [0, 1, 2, 3, 0], "kernel_s": [2.0, 1.0, 3.0, 1.0, 3.0]}
    assert profiled_shares("x", profile).share == pytest.approx(
        {"GEMM-like": 0.5, "reduction": 0.2, "elementwise": 0.3}
    )


def test_shares_add_up() -> None:
    for entry in ledger_figures.collect_kind_shares("h200"):
        assert sum(entry.share.values()) == pytest.approx(1.0)
        assert entry.share["GEMM-like"] > 0.2
        assert set(entry.share) == set(KERNEL_KINDS)


def test_a_figure_shows_each_pair() -> None:
    found = find_equal_latency_pairs("h200", load_held_out("h200"))
    figure = ledger_figures.draw_equal_latency(found, "h200")
    left, right = figure.axes
    assert len(left.patches) == 2 * len(found.imbalance)
    assert len(right.patches) == 2 * len(found.reuse)
    assert left.get_xlabel() == "Power (W)"


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path) -> None:
    made = ledger_figures.save_ledger_figures(tmp_path)
    assert {path.stem for path in made} >= {
        "validation-latency",
        "validation-power",
        "validation-size",
        "validation-kinds",
        "validation-equal-latency",
    }
    assert all(path.stat().st_size > 20_000 for path in made)


def test_component_sets_meet_their_goals(reference: Path) -> None:
    traces = published_checks.component_rows(reference, lambda _: None)
    assert traces[0]["worst_w"] <= traces[0]["must"]
    refined = next(r for r in traces if "AccelWattch" in r["set"] and r["floor"])
    assert refined["mape"] < refined["floor"]


@pytest.mark.slow
def test_counter_models_meet_their_goals(reference: Path) -> None:
    titanx, v100 = (
        make(reference, lambda _: None) for make in (published_checks.titanx_rows, published_checks.v100_rows)
    )
    for found in (*titanx[:2], v100[0]):
        assert found["mape"] <= found["must"]


def test_layers_are_in_the_ledger_and_the_law_beats_the_sum_of_operators() -> None:
    (found,) = layer_rows("h200")
    assert found["n"] >= 36
    assert found["mape"] < 0.5 * found["floor"]
