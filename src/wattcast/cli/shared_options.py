"""The environment of a command, and the options that several commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, get_origin

import typer

from wattcast.core.errors import bad_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from wattcast.measure.measure_verbs import Verb, VerbResult
    from wattcast.report.figure_style import FigureMaker

Found = TypeVar("Found")


@dataclass
class Environment:
    """Streams and variables of one call of the command line, given by tests where they need others."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    traceback: bool = False
    help_all: bool = False

    def console(self) -> Console:
        """Return a console for results; away from a terminal it is wide enough that nothing is cut."""
        from rich.console import Console

        width = None if self.stdout.isatty() else 160
        return Console(file=self.stdout, width=width, soft_wrap=False)

    def json(self, out: object) -> None:
        """Write results as JSON to stdout."""
        from wattcast.predictor.prediction_json import encode_json

        self.stdout.write(encode_json(out).decode() + "\n")

    def show(
        self,
        found: Found,
        as_json: bool,
        plain: Callable[[Found], object],
        text: Callable[[Console, Found], None],
        plot: Path | None = None,
        figure: Callable[[Found], Figure] | None = None,
    ) -> None:
        """Save the figure of what was found where ``plot`` names a file, then print it as JSON or as text."""
        if plot is not None and figure is not None:
            save_plot(self, figure(found), plot)
        if as_json:
            self.json(plain(found))
        else:
            text(self.console(), found)

    def say(self, text: str) -> None:
        """Write progress and warnings to stderr."""
        self.stderr.write(text + "\n")


def option(text: str, *names: str, **more: Any) -> Any:
    """Return an option with its help, and with names where they differ from the parameter's."""
    return typer.Option(*names, help=text, **more)


def argument(text: str, **more: Any) -> Any:
    """Return a positional argument with its help."""
    return typer.Argument(help=text, **more)


Source = Annotated[
    str, argument("Model name, workload JSON, EnergAIzer list, Hugging Face config.json, profiler trace or ONNX.")
]
Json = Annotated[bool, option("Print JSON.", "--json")]
GpuName = Annotated[str, option("GPU name or YAML file.")]
GpuNames = Annotated[str, option("GPU names or YAML files, commas between.")]
Model = Annotated[str, argument("Model name or Hugging Face config.json.")]
Lengths = Annotated[str, option("Tokens: 512, lognormal:median=512,sigma=0.8, a file.")]
Arrivals = Annotated[str, option("poisson|fixed|gamma:cv=2| diurnal:peak=1.5,period=24h")]
Force = Annotated[bool, option("Answer for what cannot run, too.", "--force")]


def shared_option(kind: Any, text: str, default: Any = None, *names: str, **more: Any) -> tuple[Any, Any]:
    """Return the type and the default of an option, for a table that ``takes_options`` reads."""
    return Annotated[kind, option(text, *names, **more)], default


def folded(panel: str) -> Callable[..., Any]:
    """Return what makes options of a panel: plain ``--help`` names them in a line, ``--help-all`` tells all."""
    return partial(option, rich_help_panel=panel)


_DETAIL, _SEVERAL, _CONDITIONS, _MONEY = (
    {"rich_help_panel": panel} for panel in ("The model", "Several GPUs", "Conditions", "Cost and carbon")
)
MODEL_OPTIONS: dict[str, tuple[Any, Any]] = {  # name -> type and help, default; the fields of ModelOptions
    "batch": shared_option(int, "Sequences or images at once.", 1),
    "seq": shared_option(int | None, "Prompt length; in decode the cache's."),
    "tokens": shared_option(int | None, "New tokens of phase generate."),
    "phase": shared_option(str | None, "prefill|decode|generate|train|forward"),
    "dtype": shared_option(str, "fp32|tf32|bf16|fp16|fp8|int8", "bf16"),
    "quantization": shared_option(str | None, "Engine: fp8|fp8-block|w8a8|awq|gptq|mxfp4|nvfp4|none."),
    "stack": shared_option(str | None, "eager|compiled|engine; serving: engine"),
    "tp": shared_option(int, "Tensor-parallel GPUs.", 1),
    "image": shared_option(int | None, "Side of a picture in (latent) pixels."),
    "weights": shared_option(str | None, "Weights alone: int4|fp8|fp4 (engine).", None, **_DETAIL),
    "kv_dtype": shared_option(str | None, "Cache of an engine: bf16|fp16|fp8.", None, **_DETAIL),
    "attention": shared_option(str, "eager|flash", "flash", **_DETAIL),
    "head": shared_option(str | None, "Logits of none|last|all tokens.", None, **_DETAIL),
    "recompute": shared_option(bool, "Training: recompute activations.", False, "--recompute", **_DETAIL),
    "pp": shared_option(int, "Pipeline stages.", 1, **_SEVERAL),
    "dp": shared_option(int, "Data-parallel replicas.", 1, **_SEVERAL),
    "ep": shared_option(int, "GPUs that share the experts.", 1, **_SEVERAL),
    "cp": shared_option(int, "GPUs that share a sequence.", 1, **_SEVERAL),
    "skew": shared_option(float, "0: even experts, 1: the same.", 0.0, **_SEVERAL),
}
SETTINGS: dict[str, tuple[Any, Any]] = {  # of one run; predict, compare and report take them all
    "clock": shared_option(str | None, "Lock the clock, such as 1830MHz."),
    "power_limit": shared_option(str | None, "Board power limit, such as 500W."),
    "host_launch": shared_option(str | None, "Host time per operator, such as 12us.", None, **_CONDITIONS),
    "temperature": shared_option(str | None, "Die temperature, such as 60C.", None, **_CONDITIONS),
    "duration": shared_option(str | None, "Burst of so long, as 5ms, not sustained.", None, **_CONDITIONS),
    "data": shared_option(str, "Operands hold random|zeros|ones|relu.", "random", **_CONDITIONS),
}
PRICES: dict[str, tuple[Any, Any]] = {  # the names of PriceKeywords
    "price": shared_option(list[str], "Rent of a GPU: 2.50/h, or h200=3.50USD/h.", [], **_MONEY),
    "electricity": shared_option(str | None, "Price of energy, such as 0.12/kWh.", None, **_MONEY),
    "carbon": shared_option(str | None, "Intensity, such as 400g/kWh, or a region: us.", None, **_MONEY),
    "pue": shared_option(float, "Energy at the meter per energy of the GPU.", 1.0, **_MONEY),
}
OPTIONS = MODEL_OPTIONS | SETTINGS | PRICES
Command = TypeVar("Command", bound=Callable[..., Any])


def takes_options(*wanted: str | Mapping[str, tuple[Any, Any]], **defaults: Any) -> Callable[[Command], Command]:
    """Give a command options that others have too, whole groups or by name; it receives them as ``**options``.

    ``defaults`` replace the usual ones.
    """
    chosen = {n: o for w in wanted for n, o in ({w: OPTIONS[w]} if isinstance(w, str) else w).items()}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, usual), annotation=kind)
        for name, (kind, usual) in chosen.items()
    ]
    return lambda command: add_options(command, shared)


def add_options(command: Command, shared: Sequence[inspect.Parameter]) -> Command:
    """Give a command further options, between its required and its other ones; it gets them as ``**options``."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    required = [p for p in [*own, *shared] if p.default is p.empty]
    parameters = [*required, *(p for p in [*shared, *own] if p.default is not p.empty)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def options_besides(ctx: typer.Context, *own: str) -> dict[str, Any]:
    """Return the values of all options but those that a command uses itself, for the function it calls."""
    return {name: value for name, value in ctx.params.items() if name not in own}


def was_given(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def parse_factors(given: Sequence[str]) -> dict[str, float]:
    """Parse ``["compute=0.9"]`` into ``{"compute": 0.9}``; names and ranges are checked where they are applied."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            number = float(value.removesuffix("W").strip())
        except ValueError:
            equals = ""
            number = 0.0
        if not equals or not name.strip():
            raise bad_value("--factor", "NAME=VALUE, such as compute=0.9", text)
        if name.strip() in found:
            raise bad_value("--factor", f"one value of {name.strip()}", "two")
        found[name.strip()] = number
    return found


def check_plot_option(value: Path | None) -> Path | None:
    """Return the file of ``--plot``, or raise: a wrong ending, a folder, one that is not there, no matplotlib."""
    if value is not None:
        from wattcast.report.figure_style import check_figure_path, require_matplotlib

        check_figure_path(value)
        if not value.absolute().parent.is_dir():
            raise bad_value("--plot", "a file in a folder that exists", str(value), "Create the folder first.")
        require_matplotlib()
    return value


def check_figures_option(value: Path | None) -> Path | None:
    """Return the folder of ``--figures``, or raise where a file has that name or matplotlib is missing."""
    if value is not None:
        from wattcast.report.figure_style import require_matplotlib

        if value.exists() and not value.is_dir():
            raise bad_value(
                "--figures", "a folder, which may be new", f"the file {value}", "One figure: --plot FILE."
            )
        require_matplotlib()
    return value


def check_format_option(value: str) -> str:
    """Return the ending of ``--format``, or raise."""
    from wattcast.report.figure_style import check_figure_format

    return check_figure_format(value)


Plot = Annotated[Path | None, option("Save a figure (.png, .svg, .pdf).", "--plot", callback=check_plot_option)]
FIGURES: dict[str, tuple[Any, Any]] = {  # of a command that draws several; FigureOptions takes them
    "plot": (Plot, None),
    "figure": shared_option(str | None, "What --plot draws, by name; default: the first."),
    "figures": shared_option(Path | None, "Save all figures into this folder.", None, callback=check_figures_option),
    "format": shared_option(str, "Files of --figures: png|svg|pdf.", "png", callback=check_format_option),
}


def save_plot(env: Environment, figure: Figure, path: Path) -> None:
    """Write a figure and say so."""
    from wattcast.report.figure_style import save_figure

    save_figure(figure, path)
    env.say(f"figure saved: {path}")


@dataclass(frozen=True)
class FigureOptions:
    """Figures asked for from a command that draws several: one in a file, all in a folder, or both."""

    plot: Path | None
    figure: str | None  # of --plot; None: the first
    figures: Path | None
    format: str

    def __post_init__(self) -> None:
        if self.figure is not None and self.plot is None:
            raise bad_value("--figure", "--plot FILE beside it", "none", "All figures: --figures FOLDER.")

    @property
    def any(self) -> bool:
        return self.plot is not None or self.figures is not None

    def save(self, env: Environment, made: Mapping[str, FigureMaker]) -> None:
        """Draw and write the figures, and say where."""
        from wattcast.report.figure_style import draw_named, save_figures

        if self.plot is not None:
            save_plot(env, draw_named(made, self.figure), self.plot)
        if self.figures is not None:
            for path in save_figures(made, self.figures, self.format):
                env.say(f"figure saved: {path}")


def takes_verb_options(verb: Verb) -> Callable[[Command], Command]:
    """Give a command the options of a verb; it receives them as ``**options``."""
    from wattcast.measure.measure_verbs import list_options

    shared = []
    for parameter, kind, option in list_options(verb):
        if option.positional or get_origin(kind) is list:
            how = typer.Argument(help=option.help)
        else:
            how = typer.Option(*([f"--{option.name}"] if option.name else []), help=option.help, hidden=option.hidden)
        shared.append(parameter.replace(annotation=Annotated[kind, how], kind=inspect.Parameter.KEYWORD_ONLY))
    return lambda command: add_options(command, shared)


def make_command(verb: Verb) -> Callable[..., None]:
    """Return a typer command that calls ``verb`` and prints its result."""

    def command(ctx: typer.Context, json: Json = False, **options: Any) -> None:
        print_result(ctx.obj, verb(**options), json)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    return takes_verb_options(verb)(command)


def print_result(env: Environment, result: VerbResult, as_json: bool) -> None:
    """Print what a verb found as text or JSON, and end with its exit code."""
    if result.note:
        env.say(result.note)
    if result.plain is not None and (as_json or result.text is None):
        env.json(result.plain)
    elif result.text:
        env.stdout.write(result.text + "\n")
    if result.exit_code:
        raise typer.Exit(result.exit_code)
