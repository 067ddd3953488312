"""The pages that read the H200's results say what the data say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.core.errors import BadInput
from wattcast.lab.microbench import microbench_page as study
from wattcast.lab.microbench.benchmark_suite import list_benchmarks
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    find_fault,
    keep_first_rounds,
    read_results,
    read_shipped_results,
    results_folder,
)

H200 = hardware.load_gpu("h200")
DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "method" / "h200-units.md"


def test_every_table_of_the_page_is_what_the_data_make() -> None:
    """``python -m wattcast.lab.microbench.microbench_page docs/method/h200-units.md`` changes
    nothing.
    """
    page = PAGE.read_text(encoding="utf-8")
    assert set(study.MARK.findall(page)) == set(study.TABLES)
    multimedia = read_results(results_folder(H200) / "multimedia.jsonl")
    assert study.renew_tables(page, (*read_shipped_results(H200), *multimedia), H200) == page
    assert page.count("\n| `") > 100


def test_a_page_is_renewed_and_keeps_its_words(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("Before.\n\n<!-- table: idle -->\nold\n<!-- end -->\n\nAfter.\n")
    study.main([str(path), "--gpu", "h200"])
    text = path.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert "idle_context_on" in text
    assert "old" not in text
    with pytest.raises(BadInput, match="unit"):
        study.renew_tables("<!-- table: unit -->\n<!-- end -->", read_shipped_results(H200), H200)


def test_the_command_does_not_overwrite_a_page_with_marks(tmp_path: Path, call) -> None:
    path = tmp_path / "page.md"
    path.write_text("Before.\n\n<!-- table: idle -->\nold\n<!-- end -->\n")
    done = call("lab", "microbench", "--show", "h200", "--write", str(path))
    assert done.code != 0
    assert "wattcast/lab/microbench/microbench_page.py" in done.err
    assert "old" in path.read_text()


def test_figures_of_the_page_exist() -> None:
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(images) == 11
    assert all((PAGE.parent / image).is_file() for image in images)


def test_a_row_that_is_not_what_its_name_says_is_marked() -> None:
    """L1 writes through, so that the present kernel of ``l1_write`` measures L2."""
    by_name = keep_first_rounds(read_shipped_results(H200))
    assert [name for name, r in by_name.items() if find_fault(r)] == ["l1_write"]
    now = {b.name: b.version for b in list_benchmarks()}
    assert by_name["l1_write"].version == now["l1_write"]
    assert find_fault(replace(by_name["l1_write"], version=1)) is None
    assert "`l1_write` †" in PAGE.read_text(encoding="utf-8")


def test_rates_of_dram_are_a_table_of_their_own() -> None:
    """From the least to the most; of a row of 131 W, idle 130 W, at 0.1 TB/s a byte costs 10 pJ."""
    plain = next(r for r in read_shipped_results(H200) if r.name == "dram_read")
    slow = {
        "name": "dram_rate_04",
        "curve": "dram_rate",
        "byte": 1e8,
        "launch_s": 1e-3,
        "power_w": 131.0,
    }
    made = [replace(plain, **slow, idle_power_w=130.0), replace(plain, curve="dram_rate"), plain]
    rows = study.rate_rows([made[1], made[0]], H200)
    assert [row[0] for row in rows[1:]] == ["`dram_rate_04`", "`dram_read`"]
    assert rows[1][1:4] == ["0.100", "2%", "131"]
    assert rows[1][-1] == "10"


def measured() -> tuple[MicroRow, ...]:
    return (*read_shipped_results(H200), *read_results(results_folder(H200) / "multimedia.jsonl"))


def test_two_cards_differ_in_their_memory() -> None:
    pairs = study.pair_cards(measured(), study.read_other_card(H200), H200)
    assert len(pairs) > 120
    power = {
        kind: np.median([p.power for p in pairs if p.kind == kind and not p.capped])
        for kind in ("arithmetic", "DRAM")
    }
    assert abs(power["arithmetic"]) < 0.02
    assert 0.05 < power["DRAM"] < 0.15
    assert all(p.memory_w > 0 for p in pairs if p.kind == "DRAM" and p.memory_w is not None)


def test_kernels_of_another_version_are_not_compared_between_cards() -> None:
    a = keep_first_rounds(measured())["int32_add"]
    (same,) = study.pair_cards(
        [a], [replace(a, power_w=1.1 * a.power_w, memory_power_w=None)], H200
    )
    assert same.power == pytest.approx(0.1)
    assert same.time == 0.0
    assert same.memory_w is None
    assert study.pair_cards([a], [replace(a, version=a.version + 1)], H200) == []
    assert study.pair_cards([a], [], H200) == []
    assert study.read_other_card(replace(H200, name="none")) == ()
