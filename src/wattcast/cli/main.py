"""The command line: parse, call one library function, print.

Each verb is a module that is imported only when it is used, so that a cold ``predict`` pays for
nothing else. ``main(argv, env)`` is what tests call.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from wattcast import __version__
from wattcast.cli.command_builder import DECLARED
from wattcast.cli.command_output import Environment
from wattcast.core.errors import (
    OUT_OF_MEMORY,
    ExitCode,
    WattcastError,
    clip_text,
    is_interrupt,
    unknown_name,
)

# verb -> the modules below ``wattcast.cli`` that declare it
COMMANDS = {
    "predict": "prediction_commands",
    "simulate": "service_commands",
    "plan": "service_commands",
    "check": "service_commands",
    "train": "service_commands",
    "hall": "hall_commands",
    "compare": "prediction_commands",
    "explore": "explore_commands",
    "report": "prediction_commands",
    "serve": "server_commands",
    "export": "server_commands",
    "measure": "measure_commands",
    "manage": "manage_commands knob_commands",
    "calibrate": "fit_commands",
    "gpus": "catalogue_commands",
    "models": "catalogue_commands",
    "doctor": "check_commands",
    "lab": "main",
}
LAB = {
    "fit": "fit_commands",
    "validate": "check_commands",
    "power-trace": "component_commands",
    "power-meter": "component_commands",
    "side-by-side": "component_commands",
    "accelwattch": "component_commands",
    "check-energies": "component_commands",
    "bench": "microbench_commands",
    "tune": "microbench_commands",
    "microbench": "microbench_commands",
    "multimedia": "microbench_commands",
    "kernel": "kernel_commands",
    "carry-over": "kernel_commands",
    "kernels": "campaign_commands",
    "counters": "campaign_commands",
    "apply": "campaign_commands",
    "estimate": "campaign_commands",
    "pack": "campaign_commands",
    "kit": "campaign_commands",
    "pack-engine": "campaign_commands",
    "summary": "campaign_commands",
    "sensitivity": "fit_commands",
}
_GROUP_HELP = {
    "explore": "Sweep GPUs, options, clocks and limits; search chip designs; assign a fleet.",
    "export": "Give metrics to operators: Prometheus, Grafana, OpenTelemetry, Dynamo.",
    "measure": "Measure time, power and energy; build a kernel database.",
    "manage": "Steer clocks to spend less power for the same speed.",
    "gpus": "List and show the GPUs Wattcast knows, with a source for every number.",
    "models": "List and show the models Wattcast knows, and what they compute.",
    "lab": (
        "For researchers and maintainers: fit and judge models, campaigns, microbenchmarks, "
        "simulator traces."
    ),
    "lab fit": "Fit models to measurements.",
}


class _CatalogueGroup(TyperGroup):
    """A group whose argument may be a name of the catalogue: ``gpus h200`` is ``gpus show h200``,
    ``gpus`` lists.
    """

    def parse_args(
        self,
        ctx: Any,
        args: list[str],
    ) -> Any:
        first = args[0] if args else "--json"
        if first not in {*self.commands, "--help"}:
            if len(args) > 1 and not first.startswith("-") and not args[1].startswith("-"):
                raise unknown_name(f"command of {ctx.command_path}", first, self.commands)
            args = ["list" if first.startswith("-") else "show", *args]
        return super().parse_args(ctx, args)


def build_command(words: str) -> Any:
    """Import what these words name; return their command, or the group of all commands that begin
    with them.
    """
    table = LAB if words.startswith("lab ") else COMMANDS
    for module in table[words.removeprefix("lab ").split()[0]].split():
        importlib.import_module(f"wattcast.cli.{module}")
    if words in DECLARED:
        return DECLARED[words].build()
    if words == "lab":
        return _LabGroup(
            name="lab",
            help=_GROUP_HELP[words],
            no_args_is_help=True,
        )
    commands: dict[str, Any] = {}
    for path, declared in DECLARED.items():
        if path.startswith(f"{words} "):
            commands[path.rpartition(" ")[2]] = declared.build()
    is_catalogue = "show" in commands
    kind = _CatalogueGroup if is_catalogue else TyperGroup
    return kind(
        name=words.rpartition(" ")[2],
        commands=commands,
        help=_GROUP_HELP[words],
        no_args_is_help=True,
    )


class _LazyGroup(TyperGroup):
    """A group that imports the module of a verb when it is asked for."""

    table = COMMANDS
    words = ""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(
        self,
        ctx: Any,
        cmd_name: str,
    ) -> Any:
        if cmd_name not in self.table:
            return None
        command = build_command(f"{self.words}{cmd_name}")
        command.name = cmd_name
        return command

    def resolve_command(
        self,
        ctx: Any,
        args: list[str],
    ) -> Any:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            hint = f"Known: {', '.join(self.table)}."
            raise typer.TyperException(
                str(unknown_name(f"command of {ctx.command_path}", args[0], self.table, hint))
            )
        name, command, remaining_args = super().resolve_command(ctx, args)
        if "--help" in remaining_args and command is not None:
            leaves = (
                [c for _, c in walk_commands(command)]
                if isinstance(command, TyperGroup)
                else [command]
            )
            for leaf in leaves:
                shorten_help(leaf, ctx.ensure_object(Environment).help_all)
        return name, command, remaining_args


class _LabGroup(_LazyGroup):
    table = LAB
    words = "lab "


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Predict how fast a GPU workload runs and how many watts and joules it takes.",
    epilog="Start with: wattcast predict llama3-8b --gpu h100-sxm --batch 8 --seq 1024",
)


def walk_commands(group: Any = None, words: str = "") -> Iterator[tuple[str, Any]]:
    """Return every command that can be run with its words, such as ``("lab fit kernels",
    command)``.
    """
    group = typer.main.get_command(app) if group is None else group
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        path = f"{words} {name}".strip()
        if isinstance(command, TyperGroup):
            yield from walk_commands(command, path)
        elif not command.hidden:
            yield path, command


def shorten_help(command: Any, tell_all: bool) -> None:
    """Leave words to help, not ``<float range> [0.0<=x<=1.0]``; unless all is told, name rare
    options in a line each.

    Rare are those of a panel of their own.
    """
    rare: dict[str, list[str]] = {}
    for option in command.params:
        if hasattr(option.type, "_describe_range"):
            option.metavar, option.type._describe_range = "<number>", str
        panel = getattr(option, "rich_help_panel", None)
        if panel and not tell_all and not option.hidden:
            rare.setdefault(panel, []).append(option.opts[0])
            option.hidden = True
    if rare:
        lines = [f"{panel}: {' '.join(names)}" for panel, names in rare.items()]
        command.epilog = "\n\n".join(["More options, which --help-all describes.", *lines])


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"wattcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
    ),
    show_traceback: bool = typer.Option(
        False, "--traceback", help="Show where an error came from."
    ),
) -> None:
    ctx.ensure_object(Environment).traceback = show_traceback or ctx.obj.traceback


def main(argv: Sequence[str] | None = None, env: Environment | None = None) -> int:
    """Run one command line and return its exit code; nothing escapes but what the code says."""
    env = env or Environment()
    args = list(sys.argv[1:] if argv is None else argv)
    end = (
        args.index("--") if "--" in args else len(args)
    )  # what follows belongs to the program that is run
    env.traceback |= "--traceback" in args[:end]  # welcome anywhere before
    env.help_all |= "--help-all" in args[:end]
    wattcast_args = [
        "--help" if arg == "--help-all" else arg for arg in args[:end] if arg != "--traceback"
    ]
    with contextlib.redirect_stdout(env.stdout), contextlib.redirect_stderr(env.stderr):
        try:
            command = typer.main.get_command(app)
            all_args = [*wattcast_args, *args[end:]] or ["--help"]
            code = command.main(
                all_args,
                prog_name="wattcast",
                standalone_mode=False,
                obj=env,
            )
            return code if isinstance(code, int) else ExitCode.OK
        except typer.TyperException as error:
            if not error.format_message():  # a group without a command: its help was printed
                return ExitCode.BAD_INPUT
            context = getattr(error, "ctx", None)
            where = f"See `{context.command_path if context else 'wattcast'} --help`."
            text = error.format_message().rstrip(".")
            stop = "" if text.endswith("?") else "."
            return _complain(env, f"{text}{stop} {where}", ExitCode.BAD_INPUT)
        except WattcastError as error:
            return _complain(env, str(error), error.exit_code)
        except BrokenPipeError:  # `wattcast ... | head` is no failure
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter flushes it at exit)
            return ExitCode.OK
        except (Exception, KeyboardInterrupt) as error:
            return _complain(env, *_explain_error(error))


_NAME_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ)
_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EACCES,
)


def _explain_error(error: BaseException) -> tuple[str, ExitCode]:
    if isinstance(error, typer.Abort) or is_interrupt(error):
        return "interrupted.", ExitCode.INTERRUPTED
    if isinstance(error, OSError) and error.errno in _NAME_ERRORS:
        return (
            f"{clip_text(error.filename, 100)}: no name of a file ({error.strerror}).",
            ExitCode.BAD_INPUT,
        )
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a name holds a zero byte, which no name of a file does.", ExitCode.BAD_INPUT
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}the disk answers: {error.strerror}.", ExitCode.FAILED
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY, ExitCode.FAILED
    if isinstance(error, csv.Error | UnicodeDecodeError):
        return f"a given file is no table of text ({error}). Check it.", ExitCode.BAD_INPUT
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("wattcast"):
        return (
            f"this needs {error.name}, which is not installed. See `wattcast doctor`.",
            ExitCode.FAILED,
        )
    sentence = (
        f"internal error ({type(error).__name__}: {error}). Run again with --traceback "
        "and report it."
    )
    return sentence, ExitCode.FAILED


def _complain(
    env: Environment,
    text: str,
    code: ExitCode,
) -> int:
    if env.traceback and sys.exc_info()[0] is not None:
        env.stderr.write(traceback.format_exc())
    env.stderr.write(f"wattcast: {text}\n")
    return code


# New objects after which Python looks for cycles among them. At its usual 700 a command that starts
# spends a twentieth of its time on looking through modules that stay anyway.
OBJECTS_BETWEEN_COLLECTIONS = 50_000


def entry() -> None:
    """Run the ``wattcast`` script.

    Its objects are frozen at the end: Python would look for cycles among all of them and take
    modules and classes apart one by one, which is a sixth of a cold prediction, before the process
    gives its memory back anyway. Exit handlers run and streams are flushed as ever.
    """
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    code = main()
    gc.freeze()
    raise SystemExit(code)
