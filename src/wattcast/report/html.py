"""Pieces of HTML from text that a stranger may have written: everything is escaped unless it is already a piece."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from wattcast.report.figure import encoded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Html:
    """Markup that may stand in a page as it is."""

    text: str


def text(value: object) -> Html:
    """Anything as text of a page, or of an attribute's value."""
    return value if isinstance(value, Html) else Html(escape(str(value), quote=True))


def tag(name: str, *inside: object, **attributes: str) -> Html:
    """One element; ``class_`` and ``aria_label`` write ``class`` and ``aria-label``."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(v).text}"' for key, v in attributes.items())
    return Html(f"<{name}{said}>{''.join(text(piece).text for piece in inside)}</{name}>")


def join(pieces: Iterable[object]) -> Html:
    """Pieces one after another."""
    return Html("".join(text(piece).text for piece in pieces))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """A table whose first column names the row and whose others are right-aligned numbers."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    said = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *said, tag("thead", top), tag("tbody", *body)), class_="wide", tabindex="0")


def drawing(figure: Figure, label: str) -> Html:
    """A figure as inline SVG with a label for those who cannot see it."""
    svg = encoded(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    attributes = f' role="img" aria-label="{escape(label, quote=True)}"'
    return tag("figure", Html(_own_names(svg.replace("<svg", f"<svg{attributes}", 1), label)))


def _own_names(svg: str, label: str) -> str:
    """Ids made different from those of the page's other drawings, which name theirs alike."""
    prefix = re.sub(r"[^a-z0-9]", "", label.lower())[:24] + "-"
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
