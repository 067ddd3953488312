"""Run ``python -m wattcast.measure`` on a bare GPU node, with the standard library's argument
parser.

No command changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

import sys

from wattcast.measure.bare_command_line import run_command_line
from wattcast.measure.measure_verbs import VERBS


def main(arguments: list[str] | None = None) -> int:
    """Parse, call one verb, print; errors are one paragraph on stderr."""
    return run_command_line("python -m wattcast.measure", __doc__ or "", VERBS, arguments)


if __name__ == "__main__":
    sys.exit(main())
