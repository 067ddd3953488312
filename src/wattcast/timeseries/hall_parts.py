"""The power of one row of racks of a hall: the part of the work that a process computes at once.

A part depends on the hall's work and its own number alone, so results are the same on one process,
on many, and on a cluster.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, read_arrays
from wattcast.timeseries.hall_file import (
    HallPlan,
    IdleKind,
    RackGroup,
    ServingLoad,
    TrainingLoad,
)
from wattcast.timeseries.job_timeline import (
    JobSteps,
    JobTimeline,
    draw_job,
)
from wattcast.timeseries.load_library import (
    LoadLibrary,
    add_replica,
    draw_blocks,
)
from wattcast.timeseries.node_power import NodeCurve

NODE_OVER_CARDS = 2.5  # highest power of a node over that of its cards, which none comes near
HISTOGRAM_BINS = 4096
DAY_S = 86400
_JOB_KEY = 1_000_003  # keeps the draws of jobs apart from those of replicas


@dataclass(frozen=True)
class GroupWork:
    """What the power of a group needs: its load as simulated, and its nodes."""

    group: RackGroup
    node: NodeCurve
    cold_w: float  # of a GPU without a program
    loaded_w: float  # of a GPU with a model in memory
    library: LoadLibrary | None = None
    capped_library: LoadLibrary | None = None
    steps: JobSteps | None = None
    capped_steps: JobSteps | None = None

    @property
    def replicas_per_node(self) -> int:
        """Engines on one node."""
        if self.library is None:
            return 0
        return self.group.system.gpu_count // self.library.gpus


@dataclass(frozen=True)
class PartSeries:
    """Joules of the racks of one row, and what their cards and nodes drew at most."""

    index: int
    rack_j: Array  # (rack, bin) at the plug
    gpu_j: Array  # (bin,) of the GPUs alone, of all racks
    capped_j: Array | None  # (rack, bin) with GPUs under the cap
    card_counts: npt.NDArray[np.int64]  # bins of time by power of a card
    node_counts: npt.NDArray[np.int64]
    card_peaks_w: float  # sum of the peaks of all cards
    node_peaks_w: float

    def pack(self) -> bytes:
        """Return the part as the bytes of an ``.npz`` file."""
        arrays: dict[str, Any] = {
            "rack_j": self.rack_j,
            "gpu_j": self.gpu_j,
            "card_counts": self.card_counts,
            "node_counts": self.node_counts,
            "peaks_w": np.array([self.card_peaks_w, self.node_peaks_w]),
        }
        if self.capped_j is not None:
            arrays["capped_j"] = self.capped_j
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        return stream.getvalue()


def unpack_part(
    data: bytes,
    index: int,
    where: str,
) -> PartSeries:
    """Return a part from the bytes of its file."""
    arrays = read_arrays(data, where)
    card_peaks_w, node_peaks_w = arrays["peaks_w"].tolist()
    return PartSeries(
        index,
        arrays["rack_j"],
        arrays["gpu_j"],
        arrays.get("capped_j"),
        arrays["card_counts"],
        arrays["node_counts"],
        card_peaks_w,
        node_peaks_w,
    )


@dataclass(frozen=True)
class HallWork:
    """Compute rows of a hall. Workers are sent this."""

    plan: HallPlan
    groups: tuple[GroupWork, ...]
    begin_s: int  # whole seconds of the day
    seconds: int
    bin_s: float  # one second, or a whole part of one
    most_card_w: float  # upper end of the histograms
    rows: tuple[tuple[int, int, int], ...] = field(default=())  # group, first rack, racks

    @property
    def bins_per_s(self) -> int:
        """Bins of a second."""
        return round(1.0 / self.bin_s)

    @property
    def bins(self) -> int:
        """Bins of the whole span."""
        return self.seconds * self.bins_per_s

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return len(self.rows)

    @cached_property
    def most_node_w(self) -> float:
        """Upper end of the histogram of nodes."""
        counts = [work.group.system.gpu_count for work in self.groups]
        return NODE_OVER_CARDS * max(counts) * self.most_card_w

    def compute_part(self, index: int) -> PartSeries:
        """Compute row ``index``."""
        place, first_rack, racks = self.rows[index]
        work = self.groups[place]
        counter = _Counter(self)
        rack_j = np.zeros((racks, self.bins))
        gpu_j = np.zeros((racks, self.bins))
        is_capped = self.plan.cap is not None
        capped_j = np.zeros((racks, self.bins)) if is_capped else None
        load = work.group.load
        if isinstance(load, ServingLoad):
            for rack in range(racks):
                into = (rack_j[rack], gpu_j[rack])
                self._add_serving_rack(
                    place,
                    load,
                    first_rack + rack,
                    into,
                    counter,
                )
                if capped_j is not None:
                    ignored = (capped_j[rack], np.zeros(self.bins))
                    self._add_serving_rack(
                        place,
                        load,
                        first_rack + rack,
                        ignored,
                        None,
                    )
        elif isinstance(load, TrainingLoad):
            self._add_training_racks(
                place,
                load,
                first_rack,
                (rack_j, gpu_j),
                counter,
            )
            if capped_j is not None:
                ignored_j = np.zeros_like(capped_j)
                self._add_training_racks(
                    place,
                    load,
                    first_rack,
                    (capped_j, ignored_j),
                    None,
                )
        else:
            for rack in range(racks):
                self._add_idle_rack(work, load, (rack_j[rack], gpu_j[rack]), counter)
            if capped_j is not None:
                capped_j[:] = rack_j
        return PartSeries(
            index,
            rack_j,
            gpu_j.sum(axis=0),
            capped_j,
            counter.card_counts,
            counter.node_counts,
            counter.card_peaks_w,
            counter.node_peaks_w,
        )

    def _add_serving_rack(
        self,
        place: int,
        load: ServingLoad,
        rack: int,
        into: tuple[Array, Array],
        counter: _Counter | None,
    ) -> None:
        """Add the nodes of a rack whose replicas serve; without a counter, under the cap."""
        work = self.groups[place]
        usual = work.library
        library = usual if counter is not None else work.capped_library
        assert library is not None, "a serving group has its library"
        assert usual is not None, "a serving group has its library"
        gpu_count = work.group.system.gpu_count
        per_node = work.replicas_per_node
        spare_w = (gpu_count - per_node * library.gpus) * work.cold_w
        card_j = np.zeros(self.bins)
        for node in range(work.group.nodes_per_rack):
            node_j = np.full(self.bins, spare_w * self.bin_s)
            working = np.zeros(self.seconds)
            first = (rack * work.group.nodes_per_rack + node) * per_node
            for replica in range(first, first + per_node):
                # The same draw with and without a cap: the same requests, served slower.
                draw = draw_blocks(usual, load, (self.plan.seed, place, replica), DAY_S)
                card_j[:] = 0.0
                add_replica(
                    library,
                    draw,
                    self.begin_s,
                    card_j,
                    working,
                )
                node_j += library.gpus * card_j
                if counter is not None:
                    counter.count_card(card_j, library.gpus)
            share = working * (library.gpus / gpu_count)
            self._add_node(
                work,
                node_j,
                share,
                into,
                1,
                counter,
            )

    def _add_training_racks(
        self,
        place: int,
        load: TrainingLoad,
        first_rack: int,
        into: tuple[Array, Array],
        counter: _Counter | None,
    ) -> None:
        """Add the racks of a row whose nodes train; all nodes of a job are alike."""
        work = self.groups[place]
        group = work.group
        racks_per_job = group.racks // load.jobs
        jobs = [(first_rack + rack) // racks_per_job for rack in range(len(into[0]))]
        for job in dict.fromkeys(jobs):
            rows = [rack for rack, number in enumerate(jobs) if number == job]
            timeline = self.draw_timeline(place, load, job)
            card_j = self._job_card_j(work, timeline, is_capped=counter is None)
            whole_s = self.begin_s + np.arange(self.seconds + 1.0)
            share = timeline.working_share(whole_s)
            one = (np.zeros(self.bins), np.zeros(self.bins))
            if counter is not None:
                counter.count_card(card_j, len(rows) * group.gpus_per_rack)
            nodes = len(rows) * group.nodes_per_rack
            node_j = group.system.gpu_count * card_j
            self._add_node(
                work,
                node_j,
                share,
                one,
                nodes,
                counter,
            )
            for target, node in zip(into, one, strict=True):
                target[rows] += group.nodes_per_rack * node

    def draw_timeline(
        self,
        place: int,
        load: TrainingLoad,
        job: int,
    ) -> JobTimeline:
        """Return the day of one job of a group."""
        steps = self.groups[place].steps
        assert steps is not None, "a training group has its steps"
        return draw_job(load, steps, (self.plan.seed, place, _JOB_KEY + job))

    def _job_card_j(
        self,
        work: GroupWork,
        timeline: JobTimeline,
        is_capped: bool,
    ) -> Array:
        steps = work.capped_steps if is_capped else work.steps
        assert steps is not None, "a training group has its steps"
        edges_s = self.begin_s + np.arange(self.bins + 1) / self.bins_per_s
        return np.diff(timeline.energy_until(steps, work.cold_w, edges_s))

    def _add_idle_rack(
        self,
        work: GroupWork,
        kind: IdleKind,
        into: tuple[Array, Array],
        counter: _Counter,
    ) -> None:
        each_w = work.loaded_w if kind is IdleKind.LOADED else work.cold_w
        card_j = np.full(self.bins, each_w * self.bin_s)
        node_j = work.group.system.gpu_count * card_j
        counter.count_card(card_j, work.group.gpus_per_rack)
        for _ in range(work.group.nodes_per_rack):
            self._add_node(
                work,
                node_j,
                np.zeros(self.seconds),
                into,
                1,
                counter,
            )

    def _add_node(
        self,
        work: GroupWork,
        node_j: Array,
        working: Array,
        into: tuple[Array, Array],
        nodes: int,
        counter: _Counter | None,
    ) -> None:
        """Add a node at the plug, and its GPUs.

        What a node draws beyond its GPUs follows their mean over each second, so that bins of a
        second add up to it whatever their length.
        """
        gpu_w = node_j.reshape(self.seconds, self.bins_per_s).sum(axis=-1)
        added_j = work.node.added_w(gpu_w, working) * self.bin_s
        wall_j = node_j + np.repeat(added_j, self.bins_per_s)
        into[0][:] += wall_j
        into[1][:] += node_j
        if counter is not None:
            counter.count_node(wall_j, nodes)


class _Counter:
    """Counts how long cards and nodes draw how much, and adds up their peaks."""

    def __init__(self, work: HallWork) -> None:
        self.bin_s = work.bin_s
        self.most_card_w = work.most_card_w
        self.most_node_w = work.most_node_w
        self.card_counts = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
        self.node_counts = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
        self.card_peaks_w = 0.0
        self.node_peaks_w = 0.0

    def count_card(
        self,
        bin_j: Array,
        cards: int,
    ) -> None:
        """Count one card's power for so many cards alike."""
        self.card_counts += cards * self._count(bin_j, self.most_card_w)
        self.card_peaks_w += cards * float(bin_j.max()) / self.bin_s

    def count_node(
        self,
        bin_j: Array,
        nodes: int,
    ) -> None:
        """Count one node's power for so many nodes alike."""
        self.node_counts += nodes * self._count(bin_j, self.most_node_w)
        self.node_peaks_w += nodes * float(bin_j.max()) / self.bin_s

    def _count(
        self,
        bin_j: Array,
        most_w: float,
    ) -> npt.NDArray[np.int64]:
        places = (bin_j * (HISTOGRAM_BINS / (self.bin_s * most_w))).astype(np.int64)
        np.clip(places, 0, HISTOGRAM_BINS - 1, out=places)
        return np.bincount(places, minlength=HISTOGRAM_BINS)


def list_rows(groups: Sequence[RackGroup]) -> tuple[tuple[int, int, int], ...]:
    """Return the rows of a hall: group, first rack in it, and racks."""
    rows = []
    for place, group in enumerate(groups):
        for row in range(math.ceil(group.racks / group.racks_per_row)):
            first = row * group.racks_per_row
            rows.append((place, first, min(group.racks_per_row, group.racks - first)))
    return tuple(rows)


def percentile_of_counts(
    counts: npt.NDArray[np.int64],
    most_w: float,
    percent: float,
) -> float:
    """Return a percentile of a histogram, at the middle of its bin."""
    so_far = np.cumsum(counts)
    place = int(np.searchsorted(so_far, percent / 100.0 * so_far[-1], side="left"))
    return (min(place, HISTOGRAM_BINS - 1) + 0.5) * most_w / HISTOGRAM_BINS
