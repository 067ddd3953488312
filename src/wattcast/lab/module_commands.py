"""Run a module of the lab as a command, ``python -m wattcast.lab...``.

What a reader lacks, such as the measurements of others, which do not ship, is said in one sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.strict_files import reference_folder


def run_module(main: Callable[[], None]) -> None:
    """Run a module's ``main``; print an error of ours without a traceback and exit with its
    code."""
    try:
        main()
    except WattcastError as error:
        print(f"wattcast: {error}", file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from error


def require_page(page: Path) -> Path:
    """Return a page of the documentation; refuse where the repository is not around."""
    if not page.is_file():
        raise BadInput(
            f"{page}: no such file: run this in the repository, whose pages it writes anew."
        )
    return page


def require_reference(environment: Mapping[str, str]) -> Path:
    """Return the folder of measurements that others made; refuse where none is named."""
    reference = reference_folder(environment)
    if reference is None:
        raise BadInput(
            "the measurements of others do not ship: set WATTCAST_REFERENCE to their folder."
        )
    return reference


def require_measurements(path: Path) -> Path:
    """Return a file or folder of measurements that others made; refuse where it is not here."""
    if not path.exists():
        raise BadInput(
            f"{path}: no such file or folder among the measurements of others, which do not ship "
            "and lie where WATTCAST_REFERENCE or --reference says."
        )
    return path
