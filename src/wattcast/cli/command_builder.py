"""Build the commands of ``wattcast`` from declared options.

``@command("simulate", SIMULATE, FIGURE)`` makes a function a command. Its options are those of the
groups after its words, and those of its parameters:

- ``env``: the environment of the call, no option;
- a parameter annotated with an ``Option``: one option;
- a parameter whose type is a dataclass of options: all of them;
- ``**options``: what stands on the command line of the groups, as keywords for a library function.
  A group that is named by its module, ``"wattcast.lab.x:Group"``, is imported when the command is
  asked for; ``**options`` then has its fields.

Only what stands on the command line is handed on: defaults stay where they are declared."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Any,
    TypeVar,
    cast,
)

import typer
from typer.core import (
    TyperArgument,
    TyperCommand,
    TyperOption,
)
from typer.main import get_click_type, get_param_completion
from typer.models import OptionInfo

from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.figure_options import FigureOptions
from wattcast.core.errors import (
    UnknownName,
    bad_value,
    clip_text,
    nearest_names,
)
from wattcast.core.option_declaration import (
    DeclaredOption,
    Option,
    find_option,
    parse_group,
    parse_option_value,
)
from wattcast.core.units import show
from wattcast.options.verb_options import (
    GroupPart,
    VerbOptions,
    part_of,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Source = VerbOptions | GroupPart | type | Callable[..., Any] | str
PLOT = part_of(FigureOptions, "plot")
_PRINT_JSON = DeclaredOption("json", bool, False, Option("Print JSON."))
_SIMPLE_TYPES = (bool, str, int, float, Path)


@dataclass(frozen=True)
class CommandDeclaration:
    """A command; its options are listed when it is asked for, since a library may have to be
    imported.
    """

    words: str
    function: Callable[..., Any]
    sources: tuple[Source, ...]
    settings: dict[str, Any]  # of typer's context

    def build(self) -> DeclaredCommand:
        """Return the command that typer runs."""
        return DeclaredCommand(self)

    def list_parts(self) -> list[GroupPart]:
        """Return the groups whose options go to ``**options``, or to ``FigureOptions``."""
        parts: list[GroupPart] = []
        for source in self.sources:
            if isinstance(source, VerbOptions):
                parts += source.parts
            elif isinstance(source, GroupPart):
                parts.append(source)
            elif not isinstance(source, str):
                parts.append(part_of(cast(type, source)))
        return parts

    def list_fields(self) -> dict[str, DeclaredOption]:
        """Return the options of dataclasses that are named by ``module:name``, by keyword."""
        parts = [part_of(_import_name(name)) for name in self.sources if isinstance(name, str)]
        return _list_options(parts)


def _import_name(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)


class DeclaredCommand(TyperCommand):
    """A command whose options are made from declarations."""

    def __init__(self, declaration: CommandDeclaration) -> None:
        self.declaration = declaration
        function = declaration.function
        self.parameters = _read_parameters(function)
        self.own = _list_own_options(self.parameters)
        self.groups = _list_group_parameters(self.parameters)
        parts = declaration.list_parts()
        self.fields = declaration.list_fields()
        self.keywords = _list_options([p for p in parts if p.group is not FigureOptions])
        self.figures = _list_options([p for p in parts if p.group is FigureOptions])
        for name in self.own:
            self.keywords.pop(name, None)
            self.fields.pop(name, None)
        options = {
            **self.fields,
            **self.keywords,
            **self.figures,
        }
        for group in self.groups.values():
            options |= _list_options([part_of(group)])
        options |= self.own
        if _returns_output(function) and "json" not in options:
            options["json"] = _PRINT_JSON
        ordered = sorted(options.values(), key=lambda option: not option.is_required)
        super().__init__(
            name=declaration.words.rpartition(" ")[2],
            params=[make_parameter(option) for option in ordered],
            help=join_paragraphs(function.__doc__ or ""),
            context_settings=declaration.settings,
        )
        self.options = options

    def parse_args(
        self,
        ctx: Any,
        args: list[str],
    ) -> Any:
        """Take options in American spelling, with underscores or in capitals, as they are meant."""
        option_names = [
            name for option in self.params for name in (*option.opts, *option.secondary_opts)
        ]
        try:
            return super().parse_args(ctx, respell_options(args, option_names))
        except typer.TyperException as error:
            raise clarify_error(error, args, option_names) from None

    def invoke(self, ctx: Any) -> None:
        """Call the function with what stands on the command line, and print its result."""
        env: Environment = ctx.obj
        env.typed_options = frozenset(self._list_given(ctx))
        values = {name: ctx.params[name] for name in env.typed_options}
        values = {name: _convert_value(self.options[name], v) for name, v in values.items()}
        figures = parse_group(FigureOptions, _pick(values, self.figures))
        arguments: dict[str, Any] = _pick(values, self.keywords)
        for name, option in self.fields.items():
            if name in values:
                arguments[option.field] = parse_option_value(option, values[name])
        for name, group in self.groups.items():
            arguments[name] = parse_group(group, _pick(values, _list_options([part_of(group)])))
        for name, option in self.own.items():
            if option.keyword in values:
                arguments[name] = parse_option_value(option, values[option.keyword])
        if "env" in self.parameters:
            arguments["env"] = env
        output = self.declaration.function(**arguments)
        if output is not None:
            figures.save(env, output)
            output.show(env, ctx.params.get("json", False))

    def _list_given(self, ctx: Any) -> Iterator[str]:
        """Yield the options that stand on the command line."""
        for name in self.options:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                yield name


# What other tools call an option, without its dashes -> what it is called here
OTHER_NAMES = {
    "qps": "--rate",
    "rps": "--rate",
    "request-rate": "--rate",
    "precision": "--dtype",
    "data-type": "--dtype",
    "gpus": "--gpu",
    "device": "--gpu",
    "hardware": "--gpu",
    "num-gpus": "--gpus",
    "tensor-parallel-size": "--tp",
    "tensor-parallel": "--tp",
    "pipeline-parallel-size": "--pp",
    "batch-size": "--batch",
    "sequence-length": "--seq",
    "seq-len": "--seq",
    "context": "--seq",
    "input-len": "--prompt",
    "output-len": "--output",
    "max-tokens": "--tokens",
    "max-num-seqs": "--max-seqs",
    "max-num-batched-tokens": "--max-batched-tokens",
    "gpu-memory-utilization": "--memory-utilisation",
    "power-cap": "--power-limit",
    "frequency": "--clock",
    "cost": "--price",
    "slo": "--ttft",
    "region": "--carbon",
    "output-file": "--out",
    "verbose": "--details",
}
_INVALID = re.compile(
    r"Invalid value for '(--[\w-]+)': (.+?) is not a valid (?:int|float)( range)?"
)
_RANGE = re.compile(r"Invalid value for '(--[\w-]+)': (.+?) is not in the range (.+?)\.?$")


def clarify_error(
    error: typer.TyperException,
    args: Sequence[str],
    known: Sequence[str],
) -> Exception:
    """Return typer's error in words of ours: what was wanted, what was written, what is meant."""
    typed_name = getattr(error, "option_name", None)
    if typed_name is not None:
        one_dash = next((arg for arg in args if re.match(r"-\w{2,}", arg)), None)
        if not typed_name.startswith("--") and one_dash is not None:
            typed_name = f"-{one_dash.partition('=')[0]}"
        meant = OTHER_NAMES.get(typed_name.strip("-").replace("_", "-").lower())
        nearest = nearest_names(typed_name, known)
        if meant is not None and meant in known:
            nearest = [meant]
        if typed_name in known:
            nearest = [typed_name]
        hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        return UnknownName(f"no such option: {clip_text(typed_name)}.{hint}{_point_to_help(error)}")
    text = getattr(error, "format_message", lambda: "")()
    invalid = _INVALID.search(text)
    if invalid is not None:
        expected = "a whole number" if "int" in invalid[0] else "a number"
        example = {"--seq": ", such as 4096", "--tokens": ", such as 256"}.get(invalid[1], "")
        return bad_value(invalid[1], f"{expected}{example}", invalid[2].strip("'"))
    outside = _RANGE.search(text)
    if outside is not None:
        return bad_value(outside[1], f"a number in {outside[3]}", outside[2].strip("'"))
    return error


def _point_to_help(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f" See `{context.command_path} --help`." if context is not None else ""


def respell_options(args: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return arguments with the known spelling of each option that is spelled another way.

    >>> words = ["--minimize", "cost", "--power_limit=500W"]
    >>> respell_options(words, ["--minimise", "--power-limit"])
    ['--minimise', 'cost', '--power-limit=500W']
    """
    by_fold: dict[str, str] = {}
    for name in known:
        by_fold.setdefault(_fold_spelling(name), name)
    end = args.index("--") if "--" in args else len(args)
    respelled = []
    for arg in args[:end]:
        name, equals, value = arg.partition("=")
        if arg.startswith("--") and name not in known:
            name = by_fold.get(_fold_spelling(name), name)
        respelled.append(f"{name}{equals}{value}")
    return [*respelled, *args[end:]]


def _fold_spelling(name: str) -> str:
    """Return an option in lower case, with dashes, and with s where spellings differ in s and z."""
    return name.lower().replace("_", "-").replace("iz", "is").replace("lyz", "lys")


def _pick(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _list_options(parts: list[GroupPart]) -> dict[str, DeclaredOption]:
    return {option.keyword: option for part in parts for option in part.declared}


def _list_own_options(
    parameters: Mapping[str, inspect.Parameter],
) -> dict[str, DeclaredOption]:
    """Return the parameters that are one option each."""
    options = {}
    for name, parameter in parameters.items():
        option = find_option(parameter.annotation)
        if option is not None:
            kind = parameter.annotation.__origin__
            options[name] = DeclaredOption(name, kind, parameter.default, option)
    return options


def _list_group_parameters(parameters: Mapping[str, inspect.Parameter]) -> dict[str, type]:
    """Return the parameters that are a dataclass of options."""
    groups: dict[str, type] = {}
    for name, parameter in parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind) and kind is not Environment:
            groups[name] = kind
    return groups


def _returns_output(function: Callable[..., Any]) -> bool:
    return function.__annotations__["return"] not in ("None", None)


def make_parameter(declared: DeclaredOption) -> TyperArgument | TyperOption:
    """Return what typer knows of an option."""
    option = declared.option
    kind = _choose_type(declared)
    takes_several = _takes_several(declared)
    is_flag = kind is bool
    completion = COMPLETIONS.get(declared.keyword)
    settings: dict[str, Any] = {
        "help": option.help,
        "hidden": option.hidden,
        "required": declared.is_required,
        "autocompletion": None if completion is None else _read_completion(completion),
    }
    if not is_flag:
        settings["type"] = _limit_type(declared, kind)
    settings |= _describe_default(declared)
    if option.positional:
        metavar = option.name if option.name != declared.keyword.upper() else ""
        return TyperArgument(
            param_decls=[declared.keyword],
            nargs=-1 if takes_several else None,
            metavar=metavar or None,
            **settings,
        )
    flag = declared.flag
    if is_flag and declared.default is True and "/" not in flag:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return TyperOption(
        param_decls=[declared.keyword, flag],
        is_flag=True if is_flag else None,
        multiple=takes_several,
        show_default=settings.pop("show_default", True),
        rich_help_panel=option.panel or None,
        **settings,
    )


@cache
def _read_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a command's function with annotations that are objects."""
    return inspect.signature(function, eval_str=True).parameters


@cache
def _read_completion(completion: Callable[..., Any]) -> Any:
    return get_param_completion(completion)


def _takes_several(declared: DeclaredOption) -> bool:
    """Say whether an option may stand several times on the command line."""
    is_mapping = any(getattr(k, "__origin__", None) is Mapping for k in declared.members)
    return is_mapping or (declared.is_sequence and not declared.option.commas)


def _choose_type(declared: DeclaredOption) -> type:
    """Return the type that typer reads; what has a unit, or is an enum, is read as text."""
    option = declared.option
    is_text = option.unit is not None or option.parse is not None or option.commas
    if is_text or declared.enum is not None:
        return str
    members = declared.element_members
    return next((kind for kind in _SIMPLE_TYPES if kind in members), str)


def _limit_type(declared: DeclaredOption, kind: type) -> Any:
    option = declared.option
    limits = OptionInfo() if kind is str else OptionInfo(min=option.least, max=option.most)
    return get_click_type(annotation=kind, parameter_info=limits)


def _describe_default(declared: DeclaredOption) -> dict[str, Any]:
    """Return the default that help shows."""
    default = declared.default
    if declared.is_required or default is None or default == () or _takes_several(declared):
        return {}
    if declared.option.unit is not None and isinstance(default, float):
        return {"show_default": _show_quantity(default, declared.option.unit)}
    if declared.is_sequence:
        return {"show_default": ",".join(map(str, default))}
    if declared.option.parse is not None and not isinstance(default, str):
        return {"show_default": f"{default:g}"}
    return {"default": str(default) if declared.enum is not None else default}


def _show_quantity(value: float, unit: str) -> str:
    return show(value, unit).replace(" ", "") if unit else f"{value:.0%}"


def _convert_value(declared: DeclaredOption, value: Any) -> Any:
    """Return a value of typer's as the function takes it."""
    if any(getattr(kind, "__origin__", None) is Mapping for kind in declared.members):
        return parse_factors(list(value))
    is_path = Path in declared.element_members and str not in declared.element_members
    if _takes_several(declared):
        return [Path(item) if is_path else item for item in value]
    return Path(value) if is_path else value


DECLARED: dict[str, CommandDeclaration] = {}  # by their words, as modules of commands are imported
COMPLETIONS: dict[str, Callable[..., Any]] = {}  # what a shell completes an option to


def command(
    words: str,
    *sources: Source,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Make a function the command of these words, with the options of these groups."""

    def declare(function: Function) -> Function:
        DECLARED[words] = CommandDeclaration(words, function, sources, settings)
        return function

    return declare


def declare_verb(words: str, verb: Callable[..., Any]) -> None:
    """Make a verb of ``measure`` the command of these words."""

    def run(**options: Any) -> CommandOutput:
        return CommandOutput.from_verb(verb(**options))

    run.__doc__ = verb.__doc__
    command(words, verb)(run)


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
    texts: list[str] | None,
    option: str,
    wanted: str,
    read: Callable[[str], Any],
) -> dict[str, Any]:
    """Parse ``["compute=0.9"]`` into ``{"compute": 0.9}``; names and ranges are checked where they
    are applied.
    """
    pairs: dict[str, Any] = {}
    for text in texts or ():
        name, _, value = (part.strip() for part in text.rpartition("="))
        if name in pairs:
            raise bad_value(option, f"one value of {name}", "two")
        try:
            pairs[name] = read(value if name else "")
        except ValueError:
            raise bad_value(option, wanted, text) from None
    return pairs


def parse_factors(texts: list[str] | None) -> dict[str, float]:
    """Parse the corrections of ``--factor``, of which the idle power is in watts."""

    def read(value: str) -> float:
        return float(value.removesuffix("W").strip())

    return parse_pairs(texts, "--factor", "NAME=VALUE, such as compute=0.9", read)
