"""The accuracy ledger: held-out errors beside trivial floors, published numbers and goals."""

from wattcast.fit.scoring import LedgerRow
from wattcast.validate.kernel_checks import counter_rows, interval_rows, kernel_rows
from wattcast.validate.ledger import build_ledger, format_ledger, ledger_to_markdown

__all__ = [
    "LedgerRow",
    "build_ledger",
    "counter_rows",
    "format_ledger",
    "interval_rows",
    "kernel_rows",
    "ledger_to_markdown",
]
