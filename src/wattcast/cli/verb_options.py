"""Turn the verbs of ``measure`` (``measure/measure_verbs.py``) into typer options and commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin

import typer

from wattcast.cli.shared_options import Command, Environment, Json, add_options
from wattcast.measure.measure_verbs import Verb, VerbResult, list_options


def takes_verb_options(verb: Verb) -> Callable[[Command], Command]:
    """Give a command the options of a verb; it receives them as ``**options``."""
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
