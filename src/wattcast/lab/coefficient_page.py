"""Write docs/coefficients.md: every number that was fitted or chosen, with its evidence.

Run in the repository: ``python -m wattcast.lab.coefficient_page docs/coefficients.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from wattcast.coefficients import list_subjects
from wattcast.coefficients.coefficient_entries import Coefficient, read_subject
from wattcast.lab.module_commands import require_page, run_module

HEAD = """# Coefficients

Every number of a prediction that is neither physics nor published by a vendor, and that does not
come from a card's own bundle: its value, where it comes from and what speaks for it. *Fitted* means
by least squares or the like to the rows that are named, *chosen* by a person who looked at the
evidence, *library* read from the source or the kernels of the library that is named (another
version may differ), *convention* an agreement that no measurement could prove wrong. The last
column names a test of what the coefficient means: it fails when the number changes by a third.
`python -m wattcast.lab.validate.coefficient_trials --summary` says how many were tried, and which
of them no test notices.

`python -m wattcast.lab.coefficient_page docs/coefficients.md` writes this page from
`src/wattcast/coefficients/`.
"""


def make_page() -> str:
    """Return the page as Markdown."""
    sections = [HEAD]
    for subject in list_subjects():
        rows = [format_entry(name, entry) for name, entry in read_subject(subject).items()]
        header = "| name | value | origin | evidence | used by | noticed by |\n" + "|---" * 6 + "|"
        sections.append("\n".join([f"## {subject}\n", header, *rows, ""]))
    return "\n".join(sections)


def format_entry(name: str, entry: Coefficient) -> str:
    """Return one coefficient as a row of a Markdown table."""
    evidence = entry.evidence.strip().replace("|", "\\|")
    test_name = entry.noticed_by.rpartition("::")[2].replace("_", " ")
    cells = [f"`{name}`", entry.value, entry.origin, evidence, f"`{entry.used_by}`", test_name]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    """Write the page anew that the command line names."""
    require_page(Path(sys.argv[1])).write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    run_module(main)
