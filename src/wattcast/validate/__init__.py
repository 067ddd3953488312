"""The accuracy ledger: held-out errors beside trivial floors, published numbers and goals."""

from wattcast.validate.counters import counter_rows
from wattcast.validate.kernels import coverage, kernel_rows
from wattcast.validate.ledger import Row, ledger, show, to_markdown

__all__ = ["Row", "counter_rows", "coverage", "kernel_rows", "ledger", "show", "to_markdown"]
