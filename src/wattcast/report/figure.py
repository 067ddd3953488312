"""Figures: one function each; takes results, returns a matplotlib Figure, never shows or saves.

One colour a module everywhere, from the colour-blind-safe set of Okabe and Ito (2008).
"""

from __future__ import annotations

import io
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from wattcast.errors import MissingTool, bad_value
from wattcast.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from wattcast.prediction import Prediction

COLOUR = {
    "static": "#999999",
    "clock": "#666666",
    "tensor": "#D55E00",
    "cuda": "#E69F00",
    "sfu": "#F0E442",
    "shared": "#009E73",
    "l2": "#56B4E9",
    "dram": "#0072B2",
    "link": "#CC79A7",
    "sm": "#882255",
}
MOST_OPS = 10


def breakdown(p: Prediction) -> Figure:
    """Where the power goes: watts by module of the whole, and of the operators that take longest."""
    figure = new_figure(9.0, 5.0)
    axes = figure.subplots()
    ranked = sorted(p.ops, key=lambda o: -float(o.energy_j))[:MOST_OPS]
    shares = (f"{o.op}  {float(o.energy_j) / float(p.energy_j):.0%} of energy" for o in ranked)
    names = ["whole workload", *shares]
    stacks = [p.modules, *(o.modules for o in ranked)]
    left = [0.0] * len(stacks)
    for i, module in enumerate(p.modules):
        widths = [float(stack[i].power_w) for stack in stacks]
        if max(widths) > 0:
            axes.barh(range(len(stacks)), widths, left=left, color=COLOUR.get(module.name), label=module.name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(stacks)), names)
    axes.invert_yaxis()
    axes.set_xlabel("Power (W)")
    axes.set_title(f"{p.name} on {p.gpu}: {float(p.latency_s) * 1e3:.3g} ms, {float(p.power_w):.4g} W")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    known = [p.provenance.source, p.provenance.device, p.provenance.date]
    caption(figure, f"{p.status} coefficients: {', '.join(text for text in known if text)}")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the ending of ``path``; whole or not at all."""
    ending = path.suffix.lower().lstrip(".")
    if ending not in ("png", "svg", "pdf"):
        raise bad_value(str(path), "a name that ends in .png, .svg or .pdf", path.name)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, dpi=150)
    write_whole(path, buffer.getvalue())


def caption(figure: Figure, text: str) -> Figure:
    """Where the numbers came from, small, below everything; the figure itself comes back."""
    figure.supxlabel("\n".join(wrap(text, 150)), x=0.01, ha="left", fontsize=6, color="#666666")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, or an error that says how to get matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingTool("figures need matplotlib. Install it: pip install 'wattcast[plot]'.") from None
    return Figure(figsize=(width, height), layout="constrained")
