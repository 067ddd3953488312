"""Build a command line from verbs with the standard library's parser, for a bare GPU node without
typer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from wattcast.core.errors import (
    OUT_OF_MEMORY,
    ExitCode,
    WattcastError,
)
from wattcast.core.option_declaration import DeclaredOption, list_declared
from wattcast.measure.measure_verbs import Verb, VerbResult


def run_command_line(
    program: str,
    about: str,
    verbs_of_all: Sequence[Verb],
    arguments: list[str] | None = None,
) -> int:
    """Parse, call one verb, print; errors are one paragraph on stderr."""
    values = vars(_make_parser(program, about, verbs_of_all).parse_args(arguments))
    verb = values.pop("verb")
    as_json = values["json"]
    if "json" not in inspect.signature(verb).parameters:
        del values["json"]
    try:
        result = verb(**values)
    except WattcastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:  # a disk that fails where nothing is saved, such as under a log
        print(f"{error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return int(ExitCode.FAILED)
    except MemoryError:
        print(OUT_OF_MEMORY, file=sys.stderr)
        return int(ExitCode.FAILED)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    _print_result(result, as_json)
    return int(result.exit_code)


def _make_parser(
    program: str,
    about: str,
    verbs: Sequence[Verb],
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=about)
    subparsers = parser.add_subparsers(required=True, metavar="VERB")
    for verb in verbs:
        text = inspect.getdoc(verb) or ""
        subparser = subparsers.add_parser(
            verb.__name__, help=text.splitlines()[0], description=text
        )
        subparser.set_defaults(verb=verb)
        subparser.add_argument("--json", action="store_true", help="print JSON")
        for declared in list_declared(verb):
            if declared.field != "json":
                _add_option(subparser, declared)
    return parser


def _add_option(parser: argparse.ArgumentParser, declared: DeclaredOption) -> None:
    """Add what one declaration means to the standard library's parser."""
    option = declared.option
    text = argparse.SUPPRESS if option.hidden else option.help.replace("%", "%%")
    kind = declared.element_members[0]
    if declared.is_sequence:
        how_many = argparse.REMAINDER if kind is str else "+"
        parser.add_argument(
            declared.field,
            nargs=how_many,
            type=kind,
            help=text,
        )
        return
    if option.positional:
        settings: dict[str, Any] = {"type": kind, "help": text}
        if not declared.is_required:
            settings |= {"nargs": "?", "default": declared.default}
        parser.add_argument(declared.field, **settings)
        return
    settings = {"dest": declared.field, "help": text}
    if kind is bool:
        settings["action"] = "store_true"
    else:
        settings["type"] = kind
        settings["required"] = declared.is_required
        if not declared.is_required:
            settings["default"] = declared.default
    parser.add_argument(declared.flag, **settings)


def _print_result(result: VerbResult, as_json: bool) -> None:
    if result.note:
        print(result.note, file=sys.stderr)
    if result.plain is not None and (as_json or result.text is None):
        print(json.dumps(result.plain, indent=1))
    elif result.text:
        print(result.text)
