"""The command line: parse, call one library function, print.

Each verb is a module that is imported only when it is used, so that a cold ``predict`` pays for
nothing else. ``main(argv, env)`` is what tests call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from wattcast import __version__
from wattcast.cli.environment import Environment
from wattcast.errors import ExitCode, WattcastError, unknown_name

# verb -> module below wattcast.cli; each exports `app`, a typer.Typer
COMMANDS = {
    "predict": "predict",
    "explain": "explain",
    "gpus": "gpus",
    "models": "models",
    "workload": "workload",
    "measure": "measure",
    "power-trace": "power_trace",
    "fit": "fit",
    "calibrate": "calibrate",
    "validate": "validate",
    "explore": "explore",
    "plan": "plan",
    "report": "report",
    "serve": "serve",
    "export": "export",
    "manage": "manage",
    "tune": "tune",
    "doctor": "doctor",
}


class _LazyGroup(TyperGroup):
    """Imports the module of a verb when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"wattcast.cli.{COMMANDS[cmd_name]}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise typer.TyperException(
                str(unknown_name("command", args[0], COMMANDS, f"Known: {', '.join(COMMANDS)}."))
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Predict how fast a GPU workload runs and how many watts and joules it takes.",
    epilog="Start with: wattcast predict llama3-8b --gpu h100-sxm --batch 8 --seq 1024",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"wattcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    show_traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> None:
    ctx.ensure_object(Environment).traceback = show_traceback or ctx.obj.traceback


def main(argv: Sequence[str] | None = None, env: Environment | None = None) -> int:
    """Run one command line and return its exit code; nothing escapes but what the code says."""
    env = env or Environment()
    args = list(sys.argv[1:] if argv is None else argv)
    if "--traceback" in args:  # welcome anywhere on the line
        env.traceback = True
        args = [arg for arg in args if arg != "--traceback"]
    with contextlib.redirect_stdout(env.stdout), contextlib.redirect_stderr(env.stderr):
        try:
            return _run(args, env)
        except WattcastError as error:
            return _complain(env, str(error), error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return _complain(env, "interrupted.", ExitCode.INTERRUPTED)
        except BrokenPipeError:  # `wattcast ... | head` is no failure
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter flushes it at exit)
            return ExitCode.OK
        except Exception as error:
            text = f"internal error ({type(error).__name__}: {error}). Run again with --traceback and report it."
            return _complain(env, text, ExitCode.FAILED)


def _run(args: list[str], env: Environment) -> int:
    command = typer.main.get_command(app)
    try:
        code = command.main(args or ["--help"], prog_name="wattcast", standalone_mode=False, obj=env)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        where = f" See `{context.command_path} --help`." if context else " See `wattcast --help`."
        if not error.format_message():  # a group without a command: its help was printed
            return ExitCode.USAGE
        return _complain(env, f"{error.format_message().rstrip('.')}.{where}", ExitCode.USAGE)
    return code if isinstance(code, int) else ExitCode.OK


def _complain(env: Environment, text: str, code: ExitCode) -> int:
    if env.traceback and sys.exc_info()[0] is not None:
        env.stderr.write(traceback.format_exc())
    env.stderr.write(f"wattcast: {text}\n")
    return code


def entry() -> None:
    """What the ``wattcast`` script runs."""
    raise SystemExit(main())
