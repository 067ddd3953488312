"""One campaign: where rows go, when to stop, which operators; each row is saved as soon as it is measured.

A row that fails is recorded with its error and the campaign goes on; a row already on file is
skipped, so a stopped campaign continues.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from wattcast.errors import Refused
from wattcast.measure.kernels import rows
from wattcast.measure.kernels.plan import plan, subset
from wattcast.measure.kernels.rows import Bench
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.run_info import say
from wattcast.records import ChainRow, Journal, KernelRow, RowKind

Row = TypeVar("Row", KernelRow, ChainRow)


@dataclass
class Campaign:
    """One call of ``measure kernels``: where rows go and when to stop."""

    bench: Bench
    out: Path
    deadline_s: float
    few: int = 0  # a smoke test takes this many per family
    after: int = 0  # operators at the head of a step's list that another machine has measured
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    journals: dict[str, Journal] = field(default_factory=dict)
    fresh: dict[str, list[Spec]] = field(default_factory=dict)  # operators measured by this process, by kind
    latency_s: dict[str, float] = field(default_factory=dict)  # of the rows measured by this process, by id
    listed: list[Spec] | None = None  # in place of the plan
    round_: int = 1  # of the plan

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - time.monotonic()

    def journal(self, kind: str) -> Journal:
        """The file of one kind of row."""
        return self.journals.setdefault(kind, Journal(self.out / f"{kind}.jsonl"))

    def measure(self, row_id: str, kind: str, spec: Spec, make: Callable[[], Row], blank: Callable[[], Row]) -> None:
        """Measure one row unless it is on file; record it or the reason it failed."""
        journal = self.journal(kind)
        if row_id in journal.ids:
            self.counts[f"{kind} skipped"] += 1
            return
        try:
            row = make()
            self.fresh.setdefault(str(kind), []).append(spec)
            self.latency_s |= {row_id: row.latency_s} if row.latency_s else {}
        except Exception as error:
            row = replace(blank(), error=f"{type(error).__name__}: {error}"[:400])
            self.counts[f"{kind} errors"] += 1
            self.errors[f"{spec.family} {kind}: {row.error}"[:160]] += 1
            self._mend(error)
        journal.append(row)
        self.counts[str(kind)] += 1

    def _mend(self, error: Exception) -> None:
        """Bring device and sampler back to a clean state; a dead context ends the campaign."""
        if isinstance(error, Refused) and self.bench.sampler.lost:
            raise error
        self.bench.gpu.recover()
        if not self.bench.sampler.healthy:
            self.bench.sampler.restart()

    def specs(
        self, wanted: dict[str, int] | None = None, keep: Callable[[Spec], bool] = lambda s: True
    ) -> list[Spec]:
        """Operators of a step, or the first few of each family in a smoke test."""
        everything = plan(self.round_) if self.listed is None else self.listed
        if self.listed is not None and not self.few:
            return [spec for spec in everything if keep(spec)]
        if self.few:
            return subset(everything, dict.fromkeys((spec.family for spec in everything), self.few), keep)
        return subset(everything, wanted, keep) if wanted else everything

    def within(self, specs: list[Spec], each_s: float, label: str) -> Iterator[Spec]:
        """Operators while there is time for another, with progress."""
        for place, spec in enumerate(specs):
            if self.left_s < each_s + 2.0:
                say(f"{label}: budget spent after {place} of {len(specs)}")
                return
            if place % 200 == 0:
                say(f"{label}: {place} of {len(specs)}, {self.left_s:.0f} s left")
            yield spec


def measure_burst(campaign: Campaign, spec: Spec, repeat: int = 0) -> None:
    """One burst row, unless it is on file."""
    bench = campaign.bench
    campaign.measure(
        rows.row_id(RowKind.BURST, spec, bench.gpu.operands.pattern, repeat=repeat),
        RowKind.BURST,
        spec,
        lambda: rows.burst(bench, spec, repeat),
        lambda: rows.blank(bench, RowKind.BURST, spec, repeat),
    )
