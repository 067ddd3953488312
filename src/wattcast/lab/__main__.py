"""Run ``python -m wattcast.lab`` on a bare GPU node: campaigns and microbenchmarks, with the
standard library's parser.

No command changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

import sys

from wattcast.lab.campaigns.campaign_verbs import VERBS
from wattcast.lab.microbench.microbench_sessions import microbench, multimedia
from wattcast.measure.bare_command_line import run_command_line
from wattcast.measure.measure_verbs import Verb


def main(arguments: list[str] | None = None) -> int:
    """Parse, call one verb, print; errors are one paragraph on stderr."""
    verbs: tuple[Verb, ...] = (*VERBS, microbench, multimedia)
    return run_command_line("python -m wattcast.lab", __doc__ or "", verbs, arguments)


if __name__ == "__main__":
    sys.exit(main())
