"""The pages that read the H200's results say what the data say."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.core.errors import BadInput
from wattcast.core.row_journals import read_lines
from wattcast.lab.counter_models.microbench_lines import OTHER_CARD
from wattcast.lab.microbench import microbench_page as study
from wattcast.lab.microbench.benchmark_suite import list_benchmarks
from wattcast.lab.microbench.microbench_results import (
    RESULTS_FILE,
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
REPEATED = {
    *(
        "fp32_add fp64_add int64_mul fp32_sin convert_int32 convert_fp64 convert_fp16 convert_bf16"
    ).split(),
    *(b.name for b in list_benchmarks() if b.curve == "divergence"),
}


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


def test_faults_are_of_kernels_that_were_mended() -> None:
    """Every fault is of rows that ship, and all but one of an older version of a kernel of the
    suite.

    What was mended has a fault or had failed, or its operands repeated, which takes nothing from
    its rate, or its launch lasted as long as its slowest multiprocessor, or began where the last
    one had."""
    text = (
        files("wattcast.lab.microbench")
        .joinpath("microbench_faults.csv")
        .read_text(encoding="utf-8")
    )
    rows = list(csv.DictReader(text.splitlines()))
    now = {b.name: b.version for b in list_benchmarks()}
    assert [row["name"] for row in rows if int(row["version"]) == now[row["name"]]] == ["l1_write"]
    shipped = {
        (r.name, r.version) for r in (*read_shipped_results(H200), *study.read_other_card(H200))
    }
    assert {(row["name"], int(row["version"])) for row in rows} <= shipped
    assert [
        r.name for r in keep_first_rounds(read_shipped_results(H200)).values() if find_fault(r)
    ] == ["l1_write"]
    assert {row["kind"] for row in rows} == {"wrong", "slow"}
    before = results_folder(H200) / OTHER_CARD / RESULTS_FILE
    failed = {str(row["name"]) for row in read_lines(before) if row.get("error")}
    in_turns = {b.name for b in list_benchmarks() if b.turns > 1 and b.version > 1}
    rings = {b.name for b in list_benchmarks() if b.ring[0]}  # every launch walked the same stretch
    mended = {row["name"] for row in rows} | failed | REPEATED | in_turns | rings
    assert {name for name, version in now.items() if version > 1} == mended
    alike = {
        find_fault(r) for r in study.read_other_card(H200) if r.name in ("mix_int_l2", "l2_read")
    }
    assert len(alike) == 1  # "as l2_read" tells l2_read's reason
    assert None not in alike


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
