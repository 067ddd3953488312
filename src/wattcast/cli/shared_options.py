"""How a command is declared: a function whose parameters are its options, and ``options.csv``,
which describes them.

``command("manage status")`` makes a function a command: it takes the environment and its options,
and returns what it found as a ``CommandOutput``, which is printed as text or, with ``--json``, as
JSON. Types and defaults stand in its signature, or in that of the library function it calls or of
the dataclass it fills: there quantities are numbers, which an option writes with their unit, and
enums, which it writes by name. Help, panels and ranges stand in ``options.csv``: in a row of the
command, or in one that holds for all commands (``*``). A name in capitals there is a positional
argument. Plain ``--help`` names options of a panel in a line, ``--help-all`` tells all."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, get_args, get_origin

import typer

from wattcast.core.errors import bad_value, resolve_name
from wattcast.core.strict_files import read_shipped_table
from wattcast.core.units import parse

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.measure.measure_verbs import VerbResult
    from wattcast.report.figure_style import Figure, FigureMaker

Found = TypeVar("Found")


@dataclass
class Environment:
    """Streams and variables of one call of the command line, given by tests where they need others."""

    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    traceback: bool = False
    help_all: bool = False
    given: frozenset[str] = frozenset()  # options that stand on the command line

    def console(self) -> Console:
        """Return a console for results; away from a terminal it is wide enough that nothing is cut."""
        from rich.console import Console

        width = None if self.stdout.isatty() else 160
        return Console(file=self.stdout, width=width, soft_wrap=False, highlight=False)

    def json(self, out: object) -> None:
        """Write results as JSON to stdout."""
        from wattcast.predictor.prediction_json import encode_json

        self.stdout.write(encode_json(out).decode() + "\n")

    def say(self, text: str) -> None:
        """Write progress and warnings to stderr."""
        self.stderr.write(text + "\n")

    def tell_progress(self, text: str) -> None:
        """Write a line of progress to stderr; on a terminal it replaces the one before."""
        if self.stderr.isatty():
            self.stderr.write(f"\r\x1b[2K{text}\r")
            self.stderr.flush()
        else:
            self.say(text)

    def save_plot(self, figure: Figure, path: Path) -> None:
        """Write a figure and say so."""
        from wattcast.report import figure_style

        figure_style.save_figure(figure, path)
        self.say(f"figure saved: {path}")


@dataclass(frozen=True)
class CommandOutput:
    """What a command found: data for ``--json``, text for readers, and figures where the command
    draws.
    """

    plain: Any  # or a function that makes it
    text: str | Callable[[Console], object] | None  # None: always JSON
    figures: Callable[[], Mapping[str, FigureMaker]] = dict  # of --plot, --figure and --figures
    notes: Sequence[str] = ()  # for stderr, after the result
    exit_code: int = 0
    fault: Exception | None = None  # raised at the end

    def show(self, env: Environment, as_json: bool) -> None:
        """Print the result as text or JSON, and end with its exit code."""
        if self.plain is not None and (as_json or self.text is None):
            env.json(self.plain() if callable(self.plain) else self.plain)
        elif callable(self.text):
            self.text(env.console())
        elif self.text:
            env.stdout.write(self.text.rstrip("\n") + "\n")
        for note in filter(None, self.notes):
            env.say(note)
        if self.fault is not None:
            raise self.fault
        if self.exit_code:
            raise typer.Exit(self.exit_code)

    @classmethod
    def of(
        cls,
        found: Found,
        plain: Callable[[Found], object],
        text: Callable[[Console, Found], None],
        figure: Callable[[Found], Figure] | None = None,
        notes: Sequence[str] = (),
    ) -> CommandOutput:
        """Return what was found, with the functions that make data, text and a figure of it."""
        figures = {} if figure is None else {"figure": partial(figure, found)}
        return cls(
            partial(plain, found), lambda console: text(console, found), lambda: figures, notes
        )

    @classmethod
    def from_verb(cls, result: VerbResult) -> CommandOutput:
        """Return what a verb of ``measure`` found."""
        return cls(result.plain, result.text, notes=[result.note], exit_code=result.exit_code)


Options = Mapping[str, tuple[Any, Any]]  # name -> type and default
MODEL_OPTIONS: Options = {  # the fields of ModelOptions
    **dict.fromkeys(("batch", "tp", "pp", "dp", "ep", "cp"), (int, 1)),
    **dict.fromkeys(("seq", "tokens", "image"), (int | None, None)),
    **dict.fromkeys(
        ("phase", "quantization", "stack", "weights", "kv_dtype", "head", "sampling"),
        (str | None, None),
    ),
    **{
        "dtype": (str, "bf16"),
        "attention": (str, "flash"),
        "recompute": (bool, False),
        "skew": (float, 0.0),
    },
}
SETTINGS: Options = {  # of one run; predict, compare and report take them all
    **dict.fromkeys(
        ("clock", "power_limit", "host_launch", "temperature", "duration"), (str | None, None)
    ),
    "data": (str, "random"),
}
PRICES: Options = {  # the names of PriceKeywords
    **{
        "price": (list[str], []),
        "electricity": (str | None, None),
        "carbon": (str | None, None),
        "pue": (float, 1.0),
    }
}
PLOT: Options = {"plot": (Path | None, None)}
FIGURES: Options = {  # of a command that draws several; FigureOptions takes them
    **PLOT,
    **{"figure": (str | None, None), "figures": (Path | None, None), "format": (str, "png")},
}
SHARED = {**MODEL_OPTIONS, **SETTINGS, **PRICES, **FIGURES}
Function = TypeVar("Function", bound=Callable[..., Any])
Convert = Callable[[Any], Any]
_make_parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CommandDeclaration:
    """A command whose options are made when it is asked for, since a library function may have to
    be imported.
    """

    words: str
    function: Callable[..., Any]
    shared: Options
    takes_from: (
        Callable[..., Any] | str | None
    )  # what has further options: a function, or its "module:name"
    settings: dict[str, Any]  # of typer's context

    def build(self) -> Callable[..., None]:
        """Return what typer runs: a function with a parameter for every option."""
        known = inspect.signature(self.function, eval_str=True).parameters
        fixed = {
            n: p
            for n, p in known.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD and n != "env"
        }
        own = {name: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in fixed.items()}
        shared = {
            name: _make_parameter(
                name, annotation=self.shared[name][0], default=self.shared[name][1]
            )
            for name in sorted(self.shared, key=list(read_help()["*"]).index)
        }
        filled = self._list_library_options(own)
        taken = {name: parameter for name, (parameter, _) in filled.items()}
        prints = self.function.__annotations__["return"] != "None" and "json" not in own
        printed = [_make_parameter("json", annotation=bool, default=False)] if prints else []
        described = [self._describe(p) for p in [*(shared | taken | own).values(), *printed]]
        described.sort(key=lambda p: p.default is not p.empty)  # required ones first
        silent = {"json", *FIGURES} - own.keys() - taken.keys()

        def run(ctx: typer.Context, **options: Any) -> None:
            env: Environment = ctx.obj
            sources = {name: ctx.get_parameter_source(name) for name in options}
            env.given = frozenset(
                n for n, source in sources.items() if source and source.name == "COMMANDLINE"
            )
            drawn = FigureOptions(
                **{name: options[name] for name in shared if name in FIGURES and name in silent}
            )
            kept = {name: value for name, value in options.items() if name not in silent}
            for name, convert in (
                (name, convert) for name, (_, convert) in filled.items() if convert is not None
            ):
                value = kept.pop(name)
                kept |= (
                    {name: convert(value)} if value else {}
                )  # what is not given stays with the library
            found = self.function(env, **kept) if "env" in known else self.function(**kept)
            if found is not None:
                drawn.save(env, found)
                found.show(env, options["json"])

        context = inspect.Parameter(
            "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        vars(run)["__signature__"] = inspect.Signature([context, *described])
        run.__doc__ = join_paragraphs(self.function.__doc__ or "")
        return run

    def _list_library_options(
        self, own: Mapping[str, Any]
    ) -> dict[str, tuple[inspect.Parameter, Convert | None]]:
        """Return parameters of the library that ``options.csv`` describes, or that describe
        themselves.

        With each comes what makes the value that the library takes of the one on the command line.
        """
        library = self.takes_from
        if library is None:
            return {}
        if isinstance(library, str):
            module, _, name = library.partition(":")
            library = getattr(importlib.import_module(module), name)
        known = inspect.signature(library, eval_str=True).parameters
        told = read_help()[self.words] if isinstance(self.takes_from, str) else known
        found = {}
        for name in (name for name in told if name in known and name not in own):
            kind = known[name].annotation
            default = known[name].default
            convert = None
            if get_origin(kind) is not Annotated:
                kind, convert = _choose_type(name, kind)
                if default is not inspect.Parameter.empty:
                    kept = not (convert and not isinstance(default, str)) and default is not None
                    default = (str(default) if kind is str else default) if kept else None
                    kind = kind | None if default is None else kind
            found[name] = _make_parameter(name, annotation=kind, default=default), convert
        return found

    def _describe(self, parameter: inspect.Parameter) -> inspect.Parameter:
        """Return a parameter with its help, names and limits, for typer."""
        name = parameter.name
        kind = parameter.annotation
        if get_origin(kind) is Annotated:
            kind, told = get_args(kind)
            if isinstance(told, typer.models.ParameterInfo):
                return parameter
            if told.positional or get_origin(kind) is list:
                return parameter.replace(annotation=Annotated[kind, typer.Argument(help=told.help)])
            option = typer.Option(
                *[f"--{told.name}"] * bool(told.name), help=told.help, hidden=told.hidden
            )
            return parameter.replace(annotation=Annotated[kind, option])
        row = read_help()[self.words].get(name, {"help": ""})
        callback = None if row["help"] else CHECKS.get(name)
        row = row if row["help"] else read_help()["*"][name]
        if row["name"].isupper():
            metavar = None if row["name"] == name.upper() else row["name"]
            return parameter.replace(
                annotation=Annotated[kind, typer.Argument(help=row["help"], metavar=metavar)]
            )
        names = (
            [row["name"] or f"--{name.replace('_', '-')}"]
            if row["name"] or parameter.default is False
            else []
        )
        number = int if kind in (int, int | None) else float
        more: dict[str, Any] = {"callback": callback, "hidden": row["panel"] == "hidden"}
        more |= {
            key: number(row[column])
            for key, column in (("min", "least"), ("max", "most"))
            if row[column]
        }
        panel = None if more["hidden"] else row["panel"] or None
        told = typer.Option(*names, help=row["help"], rich_help_panel=panel, **more)
        return parameter.replace(annotation=Annotated[kind, told])


def _choose_type(name: str, kind: Any) -> tuple[Any, Convert | None]:
    """Return the type of the option that fills a field, and what makes the field's value of the
    option's.
    """
    if get_origin(kind) is tuple:
        member, convert = _choose_type(name, get_args(kind)[0])
        return GenericAlias(list, member), lambda values: tuple(
            map(convert, values) if convert else values
        )
    kinds = get_args(kind) or (kind,)
    quantity, _, ending = name.rpartition("_")
    unit = {"hz": "Hz", "s": "s"}.get(ending)
    if float in kinds and str not in kinds and unit is not None:
        return str, lambda text: parse(text, unit, f"--{quantity}")
    choice = next(
        (one for one in kinds if isinstance(one, type) and issubclass(one, StrEnum)), None
    )
    if choice is not None:
        words = re.sub(
            r"(?<!^)(?=[A-Z])", " ", choice.__name__
        ).lower()  # SimulatorDialect: simulator dialect
        return str, lambda text: choice(resolve_name(words, text, list(choice)))
    return next((one for one in (bool, str, int, float, Path) if one in kinds), str), None


DECLARED: dict[str, CommandDeclaration] = {}  # by their words, as modules of commands are imported


def command(
    words: str,
    *shared: str | Options,
    library: Callable[..., Any] | str | None = None,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Make a function the command of these words; ``shared`` options, groups or single, come as
    ``**options``.
    """
    chosen = {
        n: o for w in shared for n, o in ({w: SHARED[w]} if isinstance(w, str) else w).items()
    }

    def declare(function: Function) -> Function:
        DECLARED[words] = CommandDeclaration(words, function, chosen, library, settings)
        return function

    return declare


def declare_verb(words: str, verb: Callable[..., VerbResult]) -> None:
    """Make a verb of ``measure`` the command of these words."""

    def run(**options: Any) -> CommandOutput:
        return CommandOutput.from_verb(verb(**options))

    run.__doc__ = join_paragraphs(verb.__doc__ or "")
    command(words, library=verb)(run)


@cache
def read_help() -> dict[str, dict[str, dict[str, str]]]:
    """Return the rows of ``options.csv`` by command and option; one without an option is of a verb
    or group.
    """
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for row in read_shipped_table("wattcast.cli", "options.csv"):
        found[row["command"]][row["option"]] = row
    return found


def join_paragraphs(docstring: str) -> str:
    """Return a docstring whose paragraphs and examples are one line each.

    The command line breaks lines where the terminal ends, and keeps the breaks that it is handed.
    """
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        continues = bool(lines and lines[-1] and line)
        if continues and not line.startswith(("Example", "- ")):
            lines[-1] = f"{lines[-1]} {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def parse_pairs(
    given: Sequence[str] | None, option: str, wanted: str, read: Callable[[str], Found]
) -> dict[str, Found]:
    """Parse ``["compute=0.9"]`` into ``{"compute": 0.9}``; names and ranges are checked where they
    are applied.
    """
    found: dict[str, Found] = {}
    for text in given or ():
        name, _, value = (part.strip() for part in text.rpartition("="))
        if name in found:
            raise bad_value(option, f"one value of {name}", "two")
        try:
            found[name] = read(value if name else "")
        except ValueError:
            raise bad_value(option, wanted, text) from None
    return found


def parse_factors(given: Sequence[str] | None) -> dict[str, float]:
    """Parse the corrections of ``--factor``, of which the idle power is in watts."""
    wanted = "NAME=VALUE, such as compute=0.9"
    return parse_pairs(
        given, "--factor", wanted, lambda value: float(value.removesuffix("W").strip())
    )


def check_plot_option(value: Path | None) -> Path | None:
    """Return the file of ``--plot``, or raise: a wrong ending, a folder, one that is not there, no
    matplotlib.
    """
    if value is not None:
        from wattcast.report import figure_style

        figure_style.check_figure_path(value)
        if not value.absolute().parent.is_dir():
            raise bad_value(
                "--plot", "a file in a folder that exists", str(value), "Create the folder first."
            )
        figure_style.require_matplotlib()
    return value


def check_figures_option(value: Path | None) -> Path | None:
    """Return the folder of ``--figures``, or raise where a file has that name or matplotlib is
    missing.
    """
    if value is not None:
        from wattcast.report import figure_style

        if value.exists() and not value.is_dir():
            raise bad_value(
                "--figures",
                "a folder, which may be new",
                f"the file {value}",
                "One figure: --plot FILE.",
            )
        figure_style.require_matplotlib()
    return value


def check_format_option(value: str) -> str:
    """Return the format of ``--format``, or raise an error that names the known ones."""
    from wattcast.report import figure_style

    return figure_style.check_figure_format(value)


CHECKS = {
    "plot": check_plot_option,
    "figures": check_figures_option,
    "format": check_format_option,
}


@dataclass(frozen=True)
class FigureOptions:
    """Figures asked for from a command: one in a file, all in a folder, or both."""

    plot: Path | None = None
    figure: str | None = None  # of --plot; None: the first
    figures: Path | None = None
    format: str = "png"

    def __post_init__(self) -> None:
        if self.figure is not None and self.plot is None:
            raise bad_value(
                "--figure", "--plot FILE beside it", "none", "All figures: --figures FOLDER."
            )

    def save(self, env: Environment, found: CommandOutput) -> None:
        """Draw and write the figures, and say where."""
        if self.plot is None and self.figures is None:
            return
        from wattcast.report import figure_style

        makers = found.figures()
        if self.plot is not None and makers:
            env.save_plot(figure_style.draw_named(makers, self.figure), self.plot)
        if self.figures is not None:
            for path in figure_style.save_figures(makers, self.figures, self.format):
                env.say(f"figure saved: {path}")
