"""Build a command line from verbs with the standard library's parser, for a bare GPU node without
typer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from wattcast.core.errors import ExitCode, WattcastError
from wattcast.measure.measure_verbs import Verb, list_options


def run_command_line(
    program: str, about: str, verbs_of_all: Sequence[Verb], arguments: list[str] | None = None
) -> int:
    """Parse, call one verb, print; errors are one paragraph on stderr."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb in verbs_of_all:
        told = inspect.getdoc(verb) or ""
        added = verbs.add_parser(verb.__name__, help=told.splitlines()[0], description=told)
        added.set_defaults(verb=verb)
        added.add_argument("--json", action="store_true", help="print JSON")
        for parameter, kind, option in list_options(verb):
            name = parameter.name
            required = parameter.default is parameter.empty
            said = argparse.SUPPRESS if option.hidden else option.help.replace("%", "%%")
            if kind == list[str]:
                added.add_argument(name, nargs=argparse.REMAINDER, help=said)
            elif kind == list[Path]:
                added.add_argument(name, nargs="+", type=Path, help=said)
            elif option.positional:
                added.add_argument(name, nargs="?", type=kind, default=parameter.default, help=said)
            elif name != "json":
                flag = f"--{option.name or name.replace('_', '-')}"
                how = (
                    {"action": "store_true"}
                    if kind is bool
                    else {"type": (get_args(kind) or (kind,))[0]}
                )
                default = {} if kind is bool or required else {"default": parameter.default}
                added.add_argument(flag, dest=name, required=required, help=said, **default, **how)
    given = vars(parser.parse_args(arguments))
    called = given.pop("verb")
    as_json = given["json"]
    if "json" not in inspect.signature(called).parameters:
        del given["json"]
    try:
        result = called(**given)
    except WattcastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:  # a disk that fails where nothing is saved, such as under a log
        print(f"{error.filename or 'a file'}: {error.strerror or error}.", file=sys.stderr)
        return int(ExitCode.FAILED)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    if result.note:
        print(result.note, file=sys.stderr)
    if result.plain is not None and (as_json or result.text is None):
        print(json.dumps(result.plain, indent=1))
    elif result.text:
        print(result.text)
    return int(result.exit_code)
