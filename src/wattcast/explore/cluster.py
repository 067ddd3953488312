"""The same sweep on a Dask cluster: workers compute parts, this process writes them.

Parts are pure functions of their number, so one lost with its worker is computed again elsewhere, and
nothing is written twice. Dask's messages are pickles: use clusters you trust, and nobody else's.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from wattcast.errors import MissingTool, WattcastError, bad_value
from wattcast.explore.sweep import Part, Runner, Work

RETRIES = 5  # of a part whose worker died
CONNECT_S = 10.0
WORKERS_S = 60.0


def on(address: str, workers: int | None = None) -> Runner:
    """A runner on the scheduler at ``address`` (``tcp://host:8786``), or on a cluster of its own: ``local``."""
    if address != "local" and "://" not in address:
        raise bad_value("cluster", "a scheduler's address, such as tcp://host:8786, or local", address)

    def runner(work: Work, indices: Iterable[int]) -> Iterator[Part]:
        left = deque(indices)
        if not left:
            return
        with ExitStack() as stack:
            client = _client(stack, address, workers)
            yield from _parts(client, work, left)

    return runner


def _client(stack: ExitStack, address: str, workers: int | None) -> Any:
    dask = _dask()
    if address == "local":
        cluster = dask.LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
        stack.enter_context(cluster)
        return stack.enter_context(dask.Client(cluster))
    try:
        return stack.enter_context(dask.Client(address, timeout=CONNECT_S))
    except (OSError, ValueError) as error:
        do = "Is the scheduler running, and reachable from here?"
        raise WattcastError(f"cluster: {address} cannot be reached ({error}). {do}") from None


def _dask() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError:
        raise MissingTool("clusters need Dask. Install it: pip install 'dask[distributed]'.") from None


def _parts(client: Any, work: Work, left: deque[int]) -> Iterator[Part]:
    """Few parts under way at a time, so that neither the cluster nor this process fills up."""
    dask = _dask()

    def submit() -> Any:
        return client.submit(work.part, left.popleft(), pure=False, retries=RETRIES)

    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except (TimeoutError, dask.TimeoutError):
        raise WattcastError(f"cluster: no worker within {WORKERS_S} s. Start one beside the scheduler.") from None
    most = 2 * max(len(client.nthreads()), 1)
    running = dask.as_completed([submit() for _ in range(min(most, len(left)))])
    for future in running:
        try:
            part = future.result()
        except dask.KilledWorker:
            do = "What is finished is kept; run the same command again."
            raise WattcastError(f"cluster: a part lost its worker again and again. {do}") from None
        future.release()
        if left:
            running.add(submit())
        yield part
