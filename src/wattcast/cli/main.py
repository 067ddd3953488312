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
from wattcast.cli.shared_options import Environment
from wattcast.core.errors import ExitCode, WattcastError, unknown_name

# verb -> module below wattcast.cli, and the typer.Typer in it
COMMANDS = {
    "predict": ("prediction_commands", "predict_app"),
    "explain": ("prediction_commands", "explain_app"),
    "gpus": ("catalogue_commands", "gpus_app"),
    "models": ("catalogue_commands", "models_app"),
    "workload": ("catalogue_commands", "workload_app"),
    "measure": ("measure_commands", "measure_app"),
    "power-trace": ("component_commands", "power_trace_app"),
    "fit": ("fit_commands", "fit_app"),
    "calibrate": ("fit_commands", "calibrate_app"),
    "validate": ("check_commands", "validate_app"),
    "explore": ("explore_commands", "explore_app"),
    "simulate": ("simulate_commands", "simulate_app"),
    "plan": ("explore_commands", "plan_app"),
    "report": ("prediction_commands", "report_app"),
    "serve": ("server_commands", "serve_app"),
    "export": ("server_commands", "export_app"),
    "manage": ("manage_commands", "manage_app"),
    "tune": ("microbench_commands", "tune_app"),
    "doctor": ("check_commands", "doctor_app"),
}


def load_command(verb: str) -> Any:
    """Import the module of a verb and return its command."""
    module, app_name = COMMANDS[verb]
    command = typer.main.get_command(getattr(importlib.import_module(f"wattcast.cli.{module}"), app_name))
    command.name = verb
    return command


class _LazyGroup(TyperGroup):
    """A group that imports the module of a verb when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

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
    """Run the ``wattcast`` script."""
    raise SystemExit(main())
