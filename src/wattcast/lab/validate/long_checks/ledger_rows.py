"""Run a study from the command line and keep its rows for the ledger; the scripts beside this one
call it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

from wattcast.calibrate.scoring import LedgerRow, Tell
from wattcast.lab.validate.ledger import load_or_make_rows


def run_study(section: str, make: Callable[[str, Tell], list[LedgerRow]]) -> None:
    """Run a study from the command line: make its rows, keep them for the ledger, and print
    them.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--gpu", default="h200", help="a GPU whose database ships")
    parser.add_argument("--again", action="store_true", help="even where results were kept")
    options, _ = parser.parse_known_args()

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    rows = load_or_make_rows(
        f"{section}-{options.gpu}", lambda: make(options.gpu, tell), os.environ, options.again
    )
    print(json.dumps({"rows": rows}, indent=1))
