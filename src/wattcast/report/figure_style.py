"""Give all figures the same colours, marks, captions and files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import (
    TYPE_CHECKING,
    Any,
    Protocol,
)

from wattcast.core.errors import (
    MissingTool,
    bad_value,
    check_names,
)
from wattcast.core.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

    from wattcast.core.strict_files import Provenance
else:
    Axes = Figure = Any  # matplotlib is loaded with the first figure

MODULE_COLOURS = {
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
SERIES_COLOURS = (
    *("#332288", "#CC6677", "#117733", "#88CCEE"),
    *("#DDCC77", "#AA4499", "#44AA99", "#999933"),
)
MEASURED = "#000000"
PREDICTED = "#332288"
ENDINGS = ("png", "svg", "pdf")
NO_MATPLOTLIB = "figures need matplotlib. Install it: pip install 'wattcast[plot]'."

FigureMaker = Callable[[], Figure]  # draws when called


class HasOrigin(Protocol):
    """What rests on coefficients: a prediction or a bundle."""

    @property
    def provenance(self) -> Provenance: ...

    @property
    def status(self) -> str: ...


def describe_origin(result: HasOrigin) -> str:
    """Say where coefficients come from, for captions."""
    origin = result.provenance
    origins = [origin.source, origin.device, origin.date]
    return f"{result.status} coefficients: {', '.join(text for text in origins if text)}"


def encode_figure(figure: Figure, ending: str) -> bytes:
    """Encode a figure as PNG, SVG or PDF; the same figure always gives the same bytes."""
    check_figure_format(ending)
    from matplotlib import rc_context
    from matplotlib.text import Text

    undated = {
        "png": {},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    # names may hold dollar signs, which are no mathematics; the labels of logarithmic axes are
    logarithmic = _list_logarithmic_labels(figure)
    for text in figure.findobj(Text):
        if text not in logarithmic:
            text.set_parse_math(False)
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "wattcast"}):
        figure.savefig(
            buffer,
            format=ending,
            dpi=150,
            metadata=undated[ending],
        )
    return buffer.getvalue()


def _list_logarithmic_labels(figure: Figure) -> set[Any]:
    """Return the labels at the ticks of logarithmic axes."""
    labels = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() != "log":
                continue
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                labels |= {tick.label1, tick.label2}
    return labels


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the ending of ``path``; never half a file."""
    write_whole(path, encode_figure(figure, check_figure_path(path)))


def save_figures(
    makers: Mapping[str, FigureMaker],
    folder: Path,
    ending: str,
) -> list[Path]:
    """Draw several figures into a folder, one after the other, and return their files."""
    check_figure_format(ending)
    paths = []
    for name, make in makers.items():
        safe = re.sub(r"[^\w-]", "_", name)  # names may hold what users wrote
        path = folder / f"{safe}.{ending}"
        save_figure(make(), path)
        paths.append(path)
    return paths


def draw_named(makers: Mapping[str, FigureMaker], name: str | None = None) -> Figure:
    """Draw one of several figures by name, or the first where no name is given."""
    if not makers:
        raise bad_value("figure", "something to draw", "none")
    first = next(iter(makers))
    chosen = first if name is None else name
    check_names("figure", chosen, list(makers))
    return makers[chosen]()


def check_figure_path(path: Path) -> str:
    """Return the ending of a figure's file, or raise; commands check it before they compute."""
    ending = path.suffix.lower().lstrip(".")
    if ending not in ENDINGS:
        raise bad_value(str(path), "a name that ends in .png, .svg or .pdf", path.name or str(path))
    if path.is_dir():
        raise bad_value(str(path), "a file", "a folder")
    return ending


def check_figure_format(ending: str) -> str:
    """Return a format of figures, or raise."""
    if ending not in ENDINGS:
        raise bad_value("format of figures", f"one of {', '.join(ENDINGS)}", ending)
    return ending


def require_matplotlib() -> None:
    """Raise an error that says how to get matplotlib where it is not installed.

    This does not import it.
    """
    if find_spec("matplotlib") is None:
        raise MissingTool(NO_MATPLOTLIB)


def add_caption(figure: Figure, text: str) -> Figure:
    """Write where the numbers came from below a figure, and return the figure."""
    letters = int(12.0 * figure.get_figwidth())  # that fit its width
    lines = "\n".join(wrap(text, letters))
    figure.supxlabel(
        lines,
        x=0.01,
        ha="left",
        fontsize=10,
        color="#595959",
    )
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches.

    Its axes have no top and right side, and their lines take ``SERIES_COLOURS`` in turn. Text keeps
    matplotlib's 10 points and more, which stays legible where a page shows the figure at half its
    size. Where matplotlib is not installed, the error says how to get it.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise MissingTool(NO_MATPLOTLIB) from None

    class House(Figure):
        def add_subplot(
            self,
            *args: Any,
            **kwargs: Any,
        ) -> Axes:
            axes: Axes = super().add_subplot(*args, **kwargs)
            axes.set_prop_cycle(color=SERIES_COLOURS)
            axes.spines[["top", "right"]].set_visible(False)
            return axes

        def draw(self, renderer: Any) -> None:
            """Only arrange where ``savefig`` asks for a first pass, whose strokes nobody sees."""
            engine = self.get_layout_engine()
            is_saved = bool(self.axes) and self.canvas.is_saving()
            if isinstance(engine, ConstrainedLayoutEngine) and is_saved:
                engine.execute(self)
            else:
                super().draw(renderer)

    return House(figsize=(width, height), layout="constrained")


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of that size in inches, and its only axes."""
    figure = new_figure(width, height)
    return figure, figure.subplots()
