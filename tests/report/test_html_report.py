"""The report: one file, nothing fetched, no script, hostile names harmless, the numbers those of
predict.
"""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from wattcast.core.errors import MissingTool
from wattcast.core.units import show
from wattcast.predictor.api import find_gpu
from wattcast.report.configuration_view import view_configuration
from wattcast.report.html_report import (
    BROWSERS,
    _write_memory,
    build_report,
    conclude_view,
    print_report,
)
from wattcast.workload.model_options import ModelOptions

HOSTILE = "<img src=x onerror=alert(1)>\"'&</title><script>alert(2)</script>$\\frac{$"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag, f"{tag} is not nested well"

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_a_report_holds_everything_fetches_nothing_and_keeps_hostile_names_text(
    call, tmp_path: Path
) -> None:
    """Names, labels and notes of a workload file come from strangers; each stands in the page as it
    was written.
    """
    ops = [
        {"op": "linear", "m": 512, "n": 512, "k": 512, "label": HOSTILE},
        {"op": "add", "n": 4096},
    ]
    work = tmp_path / "work.json"
    work.write_text(json.dumps({"name": HOSTILE, "ops": ops, "assumptions": [HOSTILE]}))
    path = tmp_path / "report.html"
    done = call("report", str(work), "--gpu", "h200,h100-sxm", "--out", str(path), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["gpus"] == ["h200", "h100-sxm"]
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not {"script", "img", "iframe", "object", "form", "a0"} & set(page.tags)
    assert not [
        v
        for k, v in page.attributes
        if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
    ]
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    names = [v for k, v in page.attributes if k == "id"]
    assert len(names) == len(set(names)), "ids are unique, or a drawing borrows from another"
    assert page.tags.count("svg") >= 6
    assert len(text) < 3_000_000
    words = " ".join(page.words)
    assert HOSTILE in words
    sections = [
        "Where the power goes",
        "Over the clock",
        "Beside others",
        "Appendix",
        "Does it fit?",
        "Over time",
    ]
    places = [words.index(section) for section in (*sections, "Assumed", "Where it comes from")]
    assert places == sorted(places), "the answer comes first, details in the appendix"
    assert "--gpu h200,h100-sxm" in words
    p = json.loads(call("predict", str(work), "--gpu", "h200", "--json").out)["predictions"][0]
    assert show(p["latency_s"], "s") in words
    assert show(p["energy_j"], "J") in words
    assert all(note in words for note in p["assumptions"])


def test_a_report_opens_with_a_conclusion_in_three_sentences() -> None:
    options = ModelOptions(batch=8, seq=512)
    free = conclude_view(view_configuration("llama3-8b", find_gpu("h200"), options))
    assert free.count(". ") == 2
    assert "prompt tokens/s" in free
    assert "it fits" in free
    slow = conclude_view(
        view_configuration("gpt2", find_gpu("h200"), ModelOptions(batch=1, stack="eager"))
    )
    assert "waits for the host" in slow


def test_memory_by_purpose_and_the_largest_batch() -> None:
    fits, much = (
        Page(
            _write_memory(
                view_configuration(name, find_gpu(gpu), ModelOptions(batch=4, seq=256), force=force)
            )
        )
        for name, gpu, force in (("gpt2", "h200", False), ("llama3-70b", "a10", True))
    )
    assert "Yes" in fits.words
    assert any("largest batch" in words for words in fits.words)
    assert {"weight", "activation", "total"} <= set(fits.words)
    assert "No" in much.words


def test_a_bad_name_of_the_file_is_said_before_the_work(call, tmp_path: Path) -> None:
    done = call("report", "gpt2", "--gpu", "h200", "--out", str(tmp_path / "report.docx"))
    assert done.code == 2
    assert ".html or .pdf" in done.err


def test_a_report_prints_on_two_pages_before_its_appendix(
    call, tmp_path: Path, monkeypatch
) -> None:
    """The page itself; ``tests/web/test_web_page.py`` prints on paper of both sizes."""
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no Chromium: apt-get install chromium")
    chips = [find_gpu("h200"), find_gpu("h100-sxm")]
    page = build_report("llama3-8b", chips, ModelOptions(batch=8))
    body = page[: page.index('<article class="appendix"')] + "</body></html>"
    monkeypatch.setattr("wattcast.report.html_report.build_report", lambda *given, **settings: page)
    out = tmp_path / "report.pdf"
    done = call("report", "gpt2", "--gpu", "h200", "--out", str(out), "--paper", "Letter")
    assert done.code == 0, done.err
    before, whole = print_report(body, "A4"), out.read_bytes()
    for data, width in ((before, 594), (whole, 612)):
        assert {int(float(size)) for size in re.findall(rb"/MediaBox \[0 0 ([\d.]+) ", data)} <= {
            width,
            width + 1,
        }
    assert 1 <= len(re.findall(rb"/Type /Page\b", before)) <= 2
    assert len(re.findall(rb"/Type /Page\b", whole)) > 2, "the appendix follows"


def test_without_a_browser_a_report_says_what_a_pdf_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingTool, match=r"Chromium or Chrome.*\.html"):
        print_report("<html></html>")
