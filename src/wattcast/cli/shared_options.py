"""The environment of a command, and the options that several commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, get_origin

import typer

from wattcast.core.errors import bad_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from wattcast.measure.measure_verbs import Verb, VerbResult
    from wattcast.report.figure_style import FigureMaker


@dataclass
class Environment:
    """Streams and variables of one call of the command line, given by tests where they need others."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    traceback: bool = False

    def console(self) -> Console:
        """Return a console for results; away from a terminal it is wide enough that nothing is cut."""
        from rich.console import Console

        width = None if self.stdout.isatty() else 160
        return Console(file=self.stdout, width=width, soft_wrap=False)

    def json(self, out: object) -> None:
        """Write results as JSON to stdout."""
        from wattcast.predictor.prediction_json import encode_json

        self.stdout.write(encode_json(out).decode() + "\n")

    def say(self, text: str) -> None:
        """Write progress and warnings to stderr."""
        self.stderr.write(text + "\n")


Source = Annotated[
    str,
    typer.Argument(
        help="Model name, workload JSON, EnergAIzer list, Hugging Face config.json, profiler trace or ONNX."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Clock = Annotated[str | None, typer.Option(help="Lock the clock, such as 1830MHz.")]
PowerLimit = Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")]
HostLaunch = Annotated[str | None, typer.Option(help="Host time per operator, such as 12us.")]
Temperature = Annotated[str | None, typer.Option(help="Die temperature, such as 60C.")]
Duration = Annotated[str | None, typer.Option(help="Burst of so long, as 5ms, not sustained.")]
OperandData = Annotated[str, typer.Option(help="random|zeros|ones|relu")]
MODEL_OPTIONS: dict[str, tuple[Any, Any]] = {  # name -> type and help, default; the fields of ModelOptions
    "batch": (Annotated[int, typer.Option(help="Sequences or images at once.")], 1),
    "seq": (Annotated[int | None, typer.Option(help="Prompt length; in decode the cache's.")], None),
    "tokens": (Annotated[int | None, typer.Option(help="New tokens of phase generate.")], None),
    "phase": (Annotated[str | None, typer.Option(help="prefill|decode|generate|train|forward")], None),
    "dtype": (Annotated[str, typer.Option(help="fp32|tf32|bf16|fp16|fp8|int8")], "bf16"),
    "quantization": (
        Annotated[str | None, typer.Option(help="Recipe of an engine: fp8|fp8-block|w8a8|awq|gptq|mxfp4|nvfp4.")],
        None,
    ),
    "weights": (
        Annotated[str | None, typer.Option(help="Weights alone: int4|fp8|fp4 (engine).")],
        None,
    ),
    "kv_dtype": (Annotated[str | None, typer.Option(help="Cache of an engine: bf16|fp16|fp8.")], None),
    "attention": (Annotated[str, typer.Option(help="eager|flash")], "flash"),
    "head": (Annotated[str | None, typer.Option(help="Logits of none|last|all tokens.")], None),
    "stack": (Annotated[str | None, typer.Option(help="eager|compiled|engine; serving: engine")], None),
    "tp": (Annotated[int, typer.Option(help="Tensor-parallel GPUs.")], 1),
    "pp": (Annotated[int, typer.Option(help="Pipeline stages.")], 1),
    "dp": (Annotated[int, typer.Option(help="Data-parallel replicas.")], 1),
    "ep": (Annotated[int, typer.Option(help="GPUs that share the experts.")], 1),
    "cp": (Annotated[int, typer.Option(help="GPUs that share a sequence.")], 1),
    "skew": (Annotated[float, typer.Option(help="0: even experts, 1: the same.")], 0.0),
    "recompute": (Annotated[bool, typer.Option("--recompute", help="Training: recompute activations.")], False),
    "image": (Annotated[int | None, typer.Option(help="Side of a picture in (latent) pixels.")], None),
}
Electricity = Annotated[str | None, typer.Option(help="Price of energy, such as 0.12USD/kWh.")]
Carbon = Annotated[str | None, typer.Option(help="Carbon intensity, such as 400g/kWh, or a region: france.")]
Rent = Annotated[list[str], typer.Option("--price", help="Rent of a GPU: 2.50USD/h, or h200=3.50USD/h for one kind.")]
Pue = Annotated[float, typer.Option(help="Energy at the meter per energy of the GPU.")]
Command = TypeVar("Command", bound=Callable[..., Any])


def takes_model_options(*names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command the options that say what a workload is; it receives them as ``**options``.

    Without ``names`` it gets all of them. ``defaults`` replace the usual ones.
    """

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, usual), annotation=kind)
        for name, (kind, usual) in MODEL_OPTIONS.items()
        if not names or name in names
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
    """Return the values of all options but those that a command uses itself, for the function it calls.

    The options that say what energy and GPUs cost become ``prices``.
    """
    found = {name: value for name, value in ctx.params.items() if name not in own}
    if "pue" in found:
        from wattcast.predictor.prices import parse_prices

        money = [found.pop(name) for name in ("electricity", "carbon", "price", "pue")]
        found["prices"] = parse_prices(*money)
    return found


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
        from wattcast.core.errors import bad_value
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


Plot = Annotated[
    Path | None, typer.Option("--plot", help="Save a figure (.png, .svg, .pdf).", callback=check_plot_option)
]
Figures = Annotated[
    Path | None, typer.Option("--figures", help="Save all figures into this folder.", callback=check_figures_option)
]
Format = Annotated[
    str, typer.Option("--format", help="Files of --figures: png|svg|pdf.", callback=check_format_option)
]
Which = Annotated[str | None, typer.Option("--figure", help="What --plot draws, by name; default: the first.")]


def save_plot(env: Environment, figure: Figure, path: Path) -> None:
    """Write a figure and say so."""
    from wattcast.report.figure_style import save_figure

    save_figure(figure, path)
    env.say(f"figure saved: {path}")


@dataclass(frozen=True)
class FigureOptions:
    """Figures asked for from a command that draws several: one in a file, all in a folder, or both."""

    plot: Path | None
    which: str | None  # of --plot; None: the first
    folder: Path | None
    ending: str

    def __post_init__(self) -> None:
        if self.which is not None and self.plot is None:
            from wattcast.core.errors import bad_value

            raise bad_value("--figure", "--plot FILE beside it", "none", "All figures: --figures FOLDER.")

    @property
    def any(self) -> bool:
        return self.plot is not None or self.folder is not None

    def save(self, env: Environment, made: Mapping[str, FigureMaker]) -> None:
        """Draw and write the figures, and say where."""
        from wattcast.report.figure_style import draw_named, save_figures

        if self.plot is not None:
            save_plot(env, draw_named(made, self.which), self.plot)
        if self.folder is not None:
            for path in save_figures(made, self.folder, self.ending):
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
