"""The ledger: complete, finite, better than its floors."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from wattcast.calibrate.scoring import LedgerRow
from wattcast.lab.validate import model_checks
from wattcast.lab.validate.ledger import build_ledger, format_ledger, ledger_to_markdown

KEYS = {"set", "quantity", "n", "mape", "floor", "published", "must", "aim"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[LedgerRow]:
    """Of one measured engine, with nothing kept from an earlier call and no reference data, which
    takes minutes.
    """
    nothing = str(tmp_path_factory.mktemp("nothing"))
    one = partial(model_checks.compare_serving, models=("llama-3.1-8b",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_checks, "compare_serving", one)
        return build_ledger(
            variables={
                **os.environ,
                "WATTCAST_CACHE": nothing,
                "WATTCAST_REFERENCE": f"{nothing}/none",
            }
        )


@pytest.mark.slow
def test_sets_of_reference_data_have_every_column(rows: list[LedgerRow], reference: Path) -> None:
    found = build_ledger(variables={**os.environ, "WATTCAST_REFERENCE": str(reference)})
    assert len(found) > len(rows)
    assert all(set(row) >= KEYS for row in found)


def test_every_row_has_every_column(rows: list[LedgerRow]) -> None:
    assert rows
    assert all(set(row) >= KEYS for row in rows)


def test_held_out_errors_beat_their_floors(rows: list[LedgerRow]) -> None:
    compared = [
        row for row in rows if row["floor"] is not None and "kernels, held-out" in row["set"]
    ]
    assert len(compared) >= 20
    for row in compared:
        assert row["mape"] < row["floor"], row


def test_the_clock_is_as_good_as_promised(rows: list[LedgerRow]) -> None:
    clock = next(row for row in rows if row["quantity"] == "clock as NVML reports it")
    assert clock["mape"] <= clock["must"]


def test_intervals_cover_about_what_they_say(rows: list[LedgerRow]) -> None:
    covered = [row for row in rows if "intervals of 90%" in row["set"] and row["n"] >= 40]
    assert len(covered) >= 8
    for row in covered:
        slack = 100.0 / row["n"]  # one row more or less
        assert 85.0 - slack <= row["coverage"] <= 95.0 + slack, row


def test_json_is_json_and_text_is_text(
    call, rows: list[LedgerRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattcast.lab.validate.ledger.build_ledger", lambda *given, **options: rows)
    done = call("lab", "validate", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["rows"]) == len(rows)
    assert "clock, capped" in format_ledger(rows)


def test_the_page_has_every_number(rows: list[LedgerRow]) -> None:
    page = ledger_to_markdown(rows)
    for row in rows:
        assert row["quantity"] in page
