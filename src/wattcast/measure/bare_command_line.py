"""Run verbs from a command line with the standard library's parser alone.

A bare GPU node, which may lack typer and msgspec, measures this way. A verb is a function whose
signature declares its options (``measure_verbs``, ``lab``).
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
    verbs: Sequence[Verb],
    arguments: list[str] | None = None,
) -> int:
    """Run the verb that the arguments name, print its result, and return the exit code.

    Without ``arguments``, those of the process are read. An error is one paragraph on stderr; one
    of the arguments themselves ends the process with exit code 2, as argparse does.
    """
    values = vars(_make_parser(program, about, verbs).parse_args(arguments))
    verb = values.pop("verb")
    as_json = values["json"]
    # All verbs print JSON; some must know it, because a command that they run prints as well
    if "json" not in inspect.signature(verb).parameters:
        del values["json"]
    try:
        result = verb(**values)
    except WattcastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:  # of a file that a verb reads, such as a log on a disk that fails
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
    """Add an option to the parser.

    Several values are positional: words take all that follows, such as a command with options of
    its own, and other types at least one value. Yes and no is a flag without a value, off by
    default. Of several types that a value may have, the first is parsed.
    """
    option = declared.option
    # argparse fills %-fields into help texts
    text = argparse.SUPPRESS if option.hidden else option.help.replace("%", "%%")
    kind = declared.element_members[0]
    if declared.is_sequence:
        nargs = argparse.REMAINDER if kind is str else "+"
        parser.add_argument(
            declared.field,
            nargs=nargs,
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
    """Print the text of a result, or its plain values as JSON, and its note on stderr.

    A text of None means that there is only JSON; an empty one, that nothing is printed.
    """
    if result.note:
        print(result.note, file=sys.stderr)
    if result.plain is not None and (as_json or result.text is None):
        print(json.dumps(result.plain, indent=1))
    elif result.text:
        print(result.text)
