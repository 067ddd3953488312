"""The accuracy ledger: held-out errors beside trivial floors, published numbers and goals."""

from wattcast.validate.counters import counter_rows
from wattcast.validate.kernels import coverage, kernel_rows
from wattcast.validate.ledger import ledger, show, to_markdown
from wattcast.validate.rows import Row

__all__ = ["Row", "counter_rows", "coverage", "kernel_rows", "ledger", "show", "to_markdown"]
