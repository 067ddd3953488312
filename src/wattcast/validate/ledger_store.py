"""Keep ledger rows that take minutes between calls: one JSON file per section, named by what the rows depend on.

A change of the database, of a bundle or of any module that fitting and prediction run through gives another file
name, so a kept result is never stale. The folder is ``WATTCAST_CACHE``, or ``wattcast`` in the user's cache. Studies
(``studies/`` in the repository) leave their rows here; the ledger lists those it finds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from wattcast.core.whole_files import cache_root, write_whole
from wattcast.fit.scoring import LedgerRow

Tell = Callable[[str], None]  # takes a line of progress
_PACKAGE = Path(__file__).parents[1]
# folders that a held-out error follows from
_INGREDIENTS = ("kernels", "power", "predictor", "fit", "hardware", "database", "workload", "validate")


def load_or_make_rows(
    section: str, make: Callable[[], list[LedgerRow]], variables: Mapping[str, str], again: bool = False
) -> list[LedgerRow]:
    """Return the rows of a section: read where they were kept, otherwise made and kept."""
    rows = None if again else load_rows(section, variables)
    if rows is None:
        rows = make()
        path = _section_file(section, variables)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps({"rows": rows}, indent=1).encode())
    return rows


def load_rows(section: str, variables: Mapping[str, str]) -> list[LedgerRow] | None:
    """Return the kept rows of a section, or None where there are none (or half a file)."""
    try:
        return list(json.loads(_section_file(section, variables).read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_study(section: str, make: Callable[[str, Tell], list[LedgerRow]]) -> None:
    """Run a study from the command line: make its rows, keep them for the ledger, and print them."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--gpu", default="h200", help="a GPU whose database ships")
    parser.add_argument("--again", action="store_true", help="even where results were kept")
    asked, _ = parser.parse_known_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    rows = load_or_make_rows(f"{section}-{asked.gpu}", lambda: make(asked.gpu, tell), os.environ, asked.again)
    print(json.dumps({"rows": rows}, indent=1))


def _section_file(section: str, variables: Mapping[str, str]) -> Path:
    return cache_root(variables) / f"{section}-{source_digest()}.json"


@cache
def source_digest() -> str:
    """Return a hash of every file that a result depends on."""
    found = hashlib.sha256()
    for path in (path for part in _INGREDIENTS for path in sorted((_PACKAGE / part).rglob("*"))):
        if path.is_file() and path.suffix in (".py", ".yaml", ".csv", ".npz", ".parquet"):
            found.update(path.relative_to(_PACKAGE).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
