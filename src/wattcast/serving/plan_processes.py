"""Search kinds of GPU in processes of their own.

A kind is searched as if it were the only one, so that nothing passes between the processes but
lines about the progress and the wish to stop. They are started anew rather than forked, since the
caller may have threads."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.serving.plan_options import SearchRange
from wattcast.serving.plan_search import (
    KindPlans,
    KindSearch,
    Tell,
)
from wattcast.serving.service_demand import ServiceDemand

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Event

LISTEN_S = 0.2  # between two looks at what the processes tell


@dataclass(frozen=True)
class ParentLink:
    """What ties the search of a process to its parent."""

    lines: SimpleQueue[str]
    stopped: Event

    def tell(self, line: str) -> None:
        """Tell the parent a line about the search; raise KeyboardInterrupt if it wants no more."""
        if self.stopped.is_set():
            raise KeyboardInterrupt
        self.lines.put(line)


_links: list[ParentLink] = []  # of this process


def search_in_processes(
    demand: ServiceDemand,
    chips: Sequence[Gpu],
    tried: SearchRange,
    tell: Tell | None,
    workers: int,
) -> Iterator[KindPlans]:
    """Yield the plans of each kind as they are found, and pass on what the processes tell.

    An interrupt yields what was found by then, and is raised again."""
    context = multiprocessing.get_context("spawn")
    link = ParentLink(context.SimpleQueue(), context.Event())
    count = min(workers, len(chips))
    with ProcessPoolExecutor(count, context, _begin_worker, (link,)) as pool:
        running = {pool.submit(_search_kind, demand, chip, tried) for chip in chips}
        try:
            while running:
                done, running = wait(running, LISTEN_S, FIRST_COMPLETED)
                while not link.lines.empty():
                    line = link.lines.get()
                    if tell is not None:
                        tell(line)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            do = "Run the command again, or with --workers 1."
            raise WattcastError(f"a process that searched was ended from outside. {do}") from None
        except KeyboardInterrupt:
            link.stopped.set()
            for future in running:
                if not future.cancel():
                    yield future.result()
            raise
        finally:
            link.stopped.set()


def _begin_worker(link: ParentLink) -> None:
    """Leave an interrupt to the parent, and keep the link to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _links.append(link)


def _search_kind(
    demand: ServiceDemand,
    chip: Gpu,
    tried: SearchRange,
) -> KindPlans:
    """Search one kind of GPU, as far as the parent wants."""
    (link,) = _links
    search = KindSearch(demand, chip, link.tell)
    try:
        if not link.stopped.is_set():
            search.search(tried)
    except KeyboardInterrupt:
        pass  # what was found by now is wanted
    kind = search.summarise()
    if kind.is_complete:
        for plan in kind.plans:
            plan.ceiling, plan.risk  # noqa: B018 - simulated here rather than in the parent
    return kind
