"""The paper has the form its journal asks for, and cites what its bibliography holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from wattcast.lab.validate import doc_figures

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "paper" / "paper.md"
SECTIONS = (
    "Summary",
    "Statement of need",
    "State of the field",
    "Software design",
    "Research impact statement",
    "AI usage disclosure",
    "Acknowledgements",
    "References",
)


def split_paper() -> tuple[dict[str, object], str]:
    _, head, body = PAPER.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_head_has_what_the_journal_reads() -> None:
    head, _ = split_paper()
    assert {"title", "tags", "authors", "affiliations", "date", "bibliography"} <= set(head)
    assert all({"name", "affiliation"} <= set(author) for author in head["authors"])


def test_its_sections_and_length() -> None:
    """The journal asks for 750 to 1,750 words."""
    _, body = split_paper()
    assert [name for name in re.findall(r"^# (.*)$", body, re.M) if name in SECTIONS] == list(
        SECTIONS
    )
    prose = re.sub(r"^\|.*$", " ", re.sub(r"<!--.*?-->", " ", body, flags=re.S), flags=re.M)
    assert 750 <= len(prose.split()) <= 1750


def test_what_it_cites_is_in_its_bibliography_and_the_other_way_round() -> None:
    _, body = split_paper()
    bibliography = (PAPER.parent / "paper.bib").read_text(encoding="utf-8")
    cited = set(re.findall(r"@([A-Z]\w+\d{4})", body))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", bibliography, re.M))
    assert len(cited) >= 10


def test_its_figures_exist_and_its_table_is_filled_by_the_ledger() -> None:
    _, body = split_paper()
    for place in re.findall(r"!\[.*?\]\((.*?)\)", body):
        assert (PAPER.parent / place).is_file()
    assert PAPER in doc_figures.list_pages(ROOT)
    assert len(re.findall(r"<!--fig:[^>]+-->", body)) >= 20


def test_a_prediction_needs_no_module_of_unix() -> None:
    """What Windows lacks may not be imported by what answers everywhere."""
    program = (
        "import io, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in {'fcntl', 'grp', 'pwd', 'resource', 'termios'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios'):\n"
        "    sys.modules.pop(name, None)\n"
        "from wattcast.cli.command_output import Environment\n"
        "from wattcast.cli.main import main\n"
        "for line in ('predict gpt2 --gpu h200 --seq 64', 'train gpt2 --gpu h200 --tokens 1M',\n"
        "             'plan gpt2 --rate 2/s --prompt 100 --output 30 --gpu h200 --tp 1'):\n"
        "    errors = io.StringIO()\n"
        "    assert main(line.split(), Environment(io.StringIO(), errors, {})) == 0, errors.getvalue()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
