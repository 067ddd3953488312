"""The report: one file, nothing fetched, no script, hostile names harmless, the numbers those of predict."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from wattcast.units import show

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


def test_a_report_holds_everything_and_fetches_nothing(call, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    sizes = ["--batch", "4", "--seq", "256"]
    done = call("report", "gpt2", "--gpu", "h200,h100-sxm,gtx-480", *sizes, "--out", str(path), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["gpus"] == ["h200", "h100-sxm", "gtx-480"]
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    words = " ".join(page.words)
    for section in ("Summary", "Does it fit?", "Where the power goes", "Over time", "Over the clock", "Other GPUs"):
        assert section in words
    for section in ("How sure this is", "Assumed", "Where it comes from", "wattcast report gpt2 --gpu h200"):
        assert section in words
    assert "script" not in page.tags
    assert not [v for k, v in page.attributes if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")]
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    names = [v for k, v in page.attributes if k == "id"]
    assert len(names) == len(set(names)), "ids are unique, or a drawing borrows from another"
    assert page.tags.count("svg") >= 6
    assert len(text) < 3_000_000
    p = json.loads(call("predict", "gpt2", "--gpu", "h200", *sizes, "--json").out)["predictions"][0]
    assert show(p["latency_s"], "s") in words
    assert show(p["energy_j"], "J") in words
    assert all(note in words for note in p["assumptions"])


def test_hostile_names_stay_text(call, tmp_path: Path) -> None:
    work = {"name": HOSTILE, "ops": [{"op": "linear", "m": 64, "n": 64, "k": 64, "label": HOSTILE}]}
    work["assumptions"] = [HOSTILE]
    (tmp_path / "w.json").write_text(json.dumps(work))
    done = call("report", str(tmp_path / "w.json"), "--gpu", "h200", "--out", str(tmp_path / "r.html"))
    assert done.code == 0, done.err
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert not {"script", "img"} & set(page.tags)
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    assert any(HOSTILE in words for words in page.words)


def test_a_bad_name_of_the_file_is_said_before_the_work(call, tmp_path: Path) -> None:
    done = call("report", "gpt2", "--gpu", "h200", "--out", str(tmp_path / "report.pdf"))
    assert done.code == 3
    assert ".html" in done.err
