"""Numbers in tables of three method pages are those that the commands beside them print, to the
digits shown.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(page: str, head: str) -> dict[str, list[str]]:
    """Return the rows of the table whose head begins with ``head``: first cell -> the others."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip().strip("*") for cell in line.strip("|").split("|"))
        rows[first] = others
    return rows


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def same(shown: str, value: float) -> bool:
    """Tell whether a number as it is shown is the value, rounded to as many digits; a tie may go
    either way.
    """
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5001 * 10.0**-digits


ENERGIES = "method/component-energies.md"


def test_energies_of_the_h200_beside_fitted_ones() -> None:
    from wattcast.lab.gpuwattch.bottom_up.event_energies import fitted_ratios

    found = {row.name: row for row in fitted_ratios("h200")}
    shown = table(ENERGIES, "| event | ours pJ |")
    assert shown.keys() == found.keys()
    for name, cells in shown.items():
        values = (1e12 * found[name].ours, 1e12 * found[name].theirs, found[name].ratio)
        assert all(map(same, cells, values)), (name, cells, values)


def test_energies_beside_dumped_ones(reference: Path) -> None:
    from wattcast.lab.validate.public_checks.dumped_energies import dumped_ratios

    rows = dumped_ratios(reference)
    chips = list(dict.fromkeys(row.where for row in rows))
    assert len(chips) == 4
    for name, cells in table(ENERGIES, "| class | GTX480").items():
        group = name.partition(" (")[0]
        for chip, cell in zip(chips, cells, strict=False):
            ours = [row.ratio for row in rows if row.where == chip and row.group == group]
            if ours:
                assert all(map(same, numbers(cell), ours)), (name, chip, cell, ours)


def test_leakage_and_area(reference: Path) -> None:
    from wattcast.lab.validate.public_checks.dumped_energies import leakage_area_ratios

    groups = {"SMs": "sm", "L2": "l2", "network": "noc", "memory controllers": "memory controller"}
    found = {(row.group, row.name): row for row in leakage_area_ratios(reference)}
    for name, cells in table(ENERGIES, "| | leakage W |").items():
        pair = [found[groups.get(name, name), what] for what in ("leakage", "area")]
        values = [value for row in pair for value in (row.ours, row.theirs, row.ratio)]
        assert all(map(same, cells, values)), (name, cells, values)


def test_doubled_and_halved_sizes(call) -> None:
    parts = {
        "registers of an SM": "registers",
        "L1 data cache": "l1",
        "shared memory": "shared",
        "L2 slices": "l2",
    }
    for name, cells in table(ENERGIES, "| H200 | doubled |").items():
        words = re.findall(r"([A-Za-z_]\w*) [\d.]+", cells[0])
        for factor, cell in ((2, cells[0]), (0.5, cells[1])):
            asked = f"{parts.get(name, 'sms')}={factor}"
            plain = json.loads(
                call("gpus", "show", "h200", "--energies", "--change", asked, "--json").out
            )
            ratios = {row["name"]: row["ratio"] for row in plain["changes"]}
            values = [ratios[word] for word in words]
            shown = re.findall(r"\d\.\d+", cell)
            assert all(map(same, shown, values)), (name, factor, cell, values)


def test_energies_fitted_to_the_h200() -> None:
    """docs/method/component.md has the energies that --config h200 uses."""
    from wattcast.lab.gpuwattch.measured_energies import measured_chip

    fitted = measured_chip("h200").values
    of_a_group = {"DC_*": "DC_RH", "L2_*": "L2_RH"}
    for name, cells in table("method/component.md", "| counter | energy pJ |").items():
        counters = re.findall(r"[A-Z][A-Z0-9]*_(?:[A-Z]+|\*)(?:_ACC)?", name)
        energies = [fitted[of_a_group.get(counter, counter)] for counter in counters]
        assert energies, name
        shown = numbers(cells[0]) + numbers(cells[1])
        values = [energy.value for energy in energies]
        values += [end for energy in energies for end in (energy.low, energy.high)]
        assert len(shown) == len(values), name
        for text, value in zip(shown, values, strict=True):
            assert f"{1e12 * value:.3g}" == f"{float(text):.3g}", (name, text, value)


LEDGER = {  # first cell of a row of counters.md -> the rows of the ledger it quotes, in order
    "hybrid, benchmark unseen, voltage inferred": (
        "Titan X clock plane: power, leave one benchmark out, V inferred",
    ),
    "hybrid, power at the default clocks known": (
        "Titan X clock plane: the same, power at the default clocks known",
    ),
    "switched capacitance; rate-based, benchmark unseen": (
        "Titan X clock plane: the same, alpha-C power",
        "Titan X clock plane: the same, rate-based power",
    ),
    "kernel unseen": ("V100 counters: power, leave one kernel out",),
    "application unseen": ("V100 counters: power, leave one application out",),
    "multimedia, never trained on, form chosen without it": (
        "H200 multimedia, trained on microbenchmarks only: power",
    ),
    "microbenchmarks, one held out": ("H200 microbenchmarks: power, leave one benchmark out",),
    "DCT at a fixed frame rate: saving by fp32, cached / past L1": (
        "H200 DCT at a fixed frame rate: saving, fp64 to fp32, cached",
        "H200 DCT at a fixed frame rate: saving, fp64 to fp32, past L1",
    ),
    "saving by L1, fp32 / fp64; both together": (
        "H200 DCT at a fixed frame rate: saving, caching in L1, fp32",
        "H200 DCT at a fixed frame rate: saving, caching in L1, fp64",
        "H200 DCT at a fixed frame rate: saving, both",
    ),
    "a kernel's joules with moving frames: DCT fp32, DCT fp64, rotation": (
        "H200 kernel beside moving frames: energy of dct_fp32_cached",
        "H200 kernel beside moving frames: energy of dct_fp64_uncached",
        "H200 kernel beside moving frames: energy of rotate",
    ),
    "counted operators of the kernel database, other cards": (
        "H200 counted operators, other cards, trained on microbenchmarks only: power",
    ),
    "those with operands larger than L2": (
        "H200 counted operators, other cards, trained on microbenchmarks only: power, operands larger than L2",
    ),
}
HEADS = ("| GTX Titan X, 6,528", "| Quadro GV100", "| error of the total")


def test_counter_models_are_quoted_as_the_ledger_has_them() -> None:
    """docs/accuracy.md is what ``lab validate --write`` writes."""
    ledger: dict[str, tuple[str, float]] = {}
    section = ""
    for line in (DOCS / "accuracy.md").read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) > 3 and re.fullmatch(r"[\d.]+", cells[2]):
            ledger[f"{section}: {cells[0]}"] = cells[1], float(cells[2])
    quoted = {
        name: cells for head in HEADS for name, cells in table("method/counters.md", head).items()
    }
    for name, rows in LEDGER.items():
        cells = quoted[name]
        for shown, row in zip(numbers(cells[-1]), rows, strict=False):
            rounded = round(float(shown), 1)
            assert abs(rounded - ledger[row][1]) < 0.051, (name, shown, ledger[row])
        if len(cells) == 4 and cells[0]:
            assert cells[0] == ledger[rows[0]][0], name


def test_the_overview_quotes_the_result_of_each_page() -> None:
    """A figure in the overview of the method is one that the page behind its link opens with."""
    text = (DOCS / "method" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\|.*) \| \[[^]]+\]\(([\w-]+\.md)\) \|$", text, re.MULTILINE)
    assert len(rows) > 8
    for row, page in rows:
        result = (
            (DOCS / "method" / page)
            .read_text(encoding="utf-8")
            .partition("**Result.**")[2]
            .partition("\n\n")[0]
        )
        known = {float(number) for number in numbers(result)}
        assert {float(number) for number in re.findall(r"(\d+(?:\.\d+)?) %", row)} <= known, (
            row,
            page,
        )
