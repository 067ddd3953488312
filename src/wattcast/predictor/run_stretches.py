"""Divide a run into the stretches over which the power governor averages.

The governor averages over a window. Kernels that follow one another faster than that share a clock.
A stretch of the run that is longer than the window settles at a clock of its own: a prefill of six
seconds is held under the limit, even if the decode steps after it draw less.

The issue order is cut where time passes, not where a model changes its name:

- Segments of one step that repeats, such as embedding, layers and head of a decode step, belong
  together as long as a step is shorter than the window.
- A segment that repeats (a layer) belongs together as long as one repetition is shorter than the
  window.
- All others are single operators with their calls in a row.

Each of these that is longer than the window is a stretch. Shorter ones are joined, in order, until
they are as long as the window; what remains between two long ones joins the one before it, or the
one whose step it opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask
from wattcast.kernels.kernel_table import IssueSegment, RowIndex
from wattcast.predictor.timeline import Timeline
from wattcast.workload.operator_base import select_operators
from wattcast.workload.picture_pipeline import DENOISER, part_of_label

# Of one run. Where there would be more, they are made longer than the window, so that a run of a
# day costs what a run of a minute does.
MOST_STRETCHES = 64
DECODE = "decode"  # how the labels of blocks of a decode step begin, followed by a dot
_Groups = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """A part of the issue order that runs at one clock: its kernels as a timeline, and their rows
    in the whole.
    """

    name: str
    rows: RowIndex
    timeline: Timeline


@dataclass(frozen=True)
class Division:
    """How the runs of some points of a sweep are divided; one stretch is the whole run."""

    points: Mask | None  # (*sweep,) those that are divided so; None: all of them
    stretches: tuple[Stretch, ...]


def divide_run(
    timeline: Timeline,
    kernel_s: Array,
    latency_s: Array,
    window_s: float,
) -> tuple[Division, ...]:
    """Divide a run whose kernels take ``kernel_s`` ``(*sweep, kernel)`` into stretches.

    Each point of a sweep is divided by itself; points that are divided alike are returned together.
    """
    segments = timeline.kernels.segments
    whole = Division(None, (Stretch("run", np.arange(len(timeline.calls)), timeline),))
    if not segments or not np.any(latency_s > window_s):
        return (whole,)
    groups = _group_positions(segments, kernel_s, window_s)
    while int(groups.max()) >= MOST_STRETCHES:
        window_s *= 2.0
        groups = _group_positions(segments, kernel_s, window_s)
    if not groups.any():
        return (whole,)
    if groups.ndim == 1:
        return (Division(None, _build_stretches(timeline, groups, kernel_s)),)

    patterns, pattern_of_point = np.unique(
        groups.reshape(-1, groups.shape[-1]), axis=0, return_inverse=True
    )
    pattern_of_point = pattern_of_point.reshape(groups.shape[:-1])
    divisions = []
    for number, pattern in enumerate(patterns):
        stretches = whole.stretches
        if pattern.any():
            stretches = _build_stretches(timeline, pattern, kernel_s)
        points = pattern_of_point == number if len(patterns) > 1 else None
        divisions.append(Division(points, stretches))
    return tuple(divisions)


def list_turns(segments: Sequence[IssueSegment]) -> Iterator[tuple[int, ...]]:
    """Yield the places of segments that run in turn, over and over: those of one kind of decode
    step, or of the denoising steps of a picture, else one.

    Blocks of decode steps have labels such as ``decode.layers``, those of denoising steps such as
    ``denoiser: layers``. Where a label comes again, other steps begin.

    >>> rows, counts = np.arange(1), np.ones(1)
    >>> labels = ("layers", "decode.layers", "decode.head", "decode.layers", "decode.head")
    >>> list(list_turns([IssueSegment(rows, counts, 2, label) for label in labels]))
    [(0,), (1, 2), (3, 4)]
    """
    turn: list[int] = []
    labels: set[str] = set()
    for place, segment in enumerate(segments):
        is_of_step = _is_of_step(segment.label)
        repeats = segment.label in labels or not is_of_step
        if turn and (repeats or not labels):
            yield tuple(turn)
            turn = []
            labels = set()
        turn.append(place)
        if is_of_step:
            labels.add(segment.label)
    if turn:
        yield tuple(turn)


def _is_of_step(label: str) -> bool:
    """Tell whether a block is part of a step that repeats as a whole."""
    return label.startswith(f"{DECODE}.") or part_of_label(label) == DENOISER


def _group_positions(
    segments: Sequence[IssueSegment],
    kernel_s: Array,
    window_s: float,
) -> _Groups:
    """Return the number of the stretch that each position of the issue order belongs to, ``(*sweep,
    position)``.

    A long piece is a stretch. Short ones are counted together until they are as long as the window.
    What is shorter joins the stretch before it, or the one after it where it opens a step or the
    run.
    """
    begins, piece_s = _list_pieces(segments, kernel_s, window_s)
    leads = _find_leads(segments)
    if begins.ndim == 1:
        return _number_stretches(begins.tolist(), piece_s.tolist(), leads.tolist(), window_s)

    # where no point of the sweep begins a piece, all goes on as before
    places = np.flatnonzero(begins.any(axis=tuple(range(begins.ndim - 1))))
    of_place = np.searchsorted(places, np.arange(begins.shape[-1]), side="right") - 1
    begins, piece_s, leads = begins[..., places], piece_s[..., places], leads[places]
    numbers, lengths_s = _count_along_order(begins, piece_s, leads, window_s)
    for place in range(begins.shape[-1] - 2, -1, -1):
        # each position gets the whole length of its stretch
        is_same = numbers[..., place] == numbers[..., place + 1]
        next_s = lengths_s[..., place + 1]
        lengths_s[..., place] = np.where(is_same, next_s, lengths_s[..., place])

    # number the long stretches; a short one takes the number before it, or opens the next
    is_first = np.diff(numbers, axis=-1, prepend=-1) > 0
    is_long = lengths_s >= window_s
    long_so_far = np.cumsum(is_first & is_long, axis=-1)
    opens = _carry_first(is_first, leads & ~is_long)
    last = np.maximum(long_so_far[..., -1:] - 1, 0)
    stretches = np.clip(long_so_far - 1 + opens, 0, last)
    if not stretches.any():  # one stretch for all points
        return np.zeros(len(of_place), np.int64)
    return np.asarray(stretches[..., of_place])


def _count_along_order(
    begins: Mask,
    piece_s: Array,
    leads: Mask,
    window_s: float,
) -> tuple[_Groups, Array]:
    """Return the number of each position's stretch, short ones counted too, and the length that the
    stretch has up to there, both ``(*sweep, position)``.
    """
    numbers = np.empty(begins.shape, np.int64)
    lengths_s = np.empty(begins.shape)
    number: _Groups = np.zeros(begins.shape[:-1], np.int64)
    length_s: Array = np.zeros(begins.shape[:-1])
    for place in range(begins.shape[-1]):
        begins_here = begins[..., place]
        here_s = np.where(begins_here, piece_s[..., place], 0.0)
        is_long = (length_s >= window_s) | (here_s >= window_s)
        closes = begins_here & (length_s > 0.0) & (is_long | leads[place])
        number = number + closes
        length_s = np.where(closes, 0.0, length_s) + here_s
        numbers[..., place] = number
        lengths_s[..., place] = length_s
    return numbers, lengths_s


def _carry_first(is_first: Mask, values: Mask) -> Mask:
    """Return at each position the value at the first position of its stretch, ``(*sweep,
    position)``.
    """
    carried = np.empty_like(values)
    carried[..., 0] = values[..., 0]
    for place in range(1, values.shape[-1]):
        carried[..., place] = np.where(
            is_first[..., place], values[..., place], carried[..., place - 1]
        )
    return carried


def _number_stretches(
    begins: list[bool],
    piece_s: list[float],
    leads: list[bool],
    window_s: float,
) -> _Groups:
    """Do what ``_group_positions`` does for a single configuration, which may have a million
    operators.
    """
    numbers = []
    lengths_s = [0.0]
    opens = [leads[0]]
    for begins_here, here_s, leads_here in zip(begins, piece_s, leads, strict=True):
        if begins_here:
            is_long = lengths_s[-1] >= window_s or here_s >= window_s
            if lengths_s[-1] > 0.0 and (is_long or leads_here):
                lengths_s.append(0.0)
                opens.append(leads_here)
            lengths_s[-1] += here_s
        numbers.append(len(lengths_s) - 1)
    is_long_stretch = np.array(lengths_s) >= window_s
    long_so_far = np.cumsum(is_long_stretch)
    opens_next = np.array(opens) & ~is_long_stretch
    last = max(int(long_so_far[-1]) - 1, 0)
    stretch = np.clip(long_so_far - 1 + opens_next, 0, last)
    return np.asarray(stretch.take(numbers))


def _find_leads(segments: Sequence[IssueSegment]) -> Mask:
    """Tell which positions open a step of several segments, ``(position,)``.

    A short piece there joins the step that it opens.
    """
    leads = []
    for places in list_turns(segments):
        for order, place in enumerate(places):
            opens_step = order == 0 and len(places) > 1
            is_first = np.arange(len(segments[place].rows)) == 0
            leads.append(is_first & opens_step)
    return np.concatenate(leads)


def _list_pieces(
    segments: Sequence[IssueSegment],
    kernel_s: Array,
    window_s: float,
) -> tuple[Mask, Array]:
    """Return where pieces that belong together begin, and how long each is, both ``(*sweep,
    position)``.
    """
    begins = []
    piece_s = []
    for places in list_turns(segments):
        # seconds of each position, of each segment once, and of one turn of all segments
        position_s = [kernel_s[..., segments[i].rows] * segments[i].counts for i in places]
        segment_s = [of_rows.sum(axis=-1)[..., np.newaxis] for of_rows in position_s]
        turns = min(segments[i].repeat for i in places)
        repeats_in_turn = [segments[i].repeat / turns for i in places]
        turn_s: Array = np.zeros(())
        for repeats, once_s in zip(repeats_in_turn, segment_s, strict=True):
            turn_s = turn_s + repeats * once_s

        is_turn_short = turn_s < window_s
        for order in range(len(places)):
            once_s = segment_s[order]
            is_segment_short = once_s < window_s
            is_first = np.arange(position_s[order].shape[-1]) == 0
            begins_within = np.where(is_segment_short, is_first, True)
            length_s = np.where(
                is_segment_short, repeats_in_turn[order] * once_s, position_s[order]
            )
            begins.append(np.where(is_turn_short, is_first & (order == 0), begins_within))
            piece_s.append(np.where(is_turn_short, turns * turn_s, length_s))
    return np.concatenate(begins, axis=-1), np.concatenate(piece_s, axis=-1)


def _build_stretches(
    timeline: Timeline,
    groups: _Groups,
    kernel_s: Array,
) -> tuple[Stretch, ...]:
    """Return the stretches of a run whose positions have these numbers, each as a timeline."""
    kernels = timeline.kernels
    parts_of_stretch: list[list[IssueSegment]] = [[] for _ in range(int(groups.max()) + 1)]
    for of_step in _split_steps(kernels.segments, groups):
        of_positions = np.concatenate([numbers for _, numbers in of_step])
        first, last = int(of_positions.min()), int(of_positions.max())
        if first == last:
            parts_of_stretch[first] += [segment for segment, _ in of_step if segment.rows.size]
            continue
        for number in range(first, last + 1):
            parts_of_stretch[number] += _divide_step(of_step, number, kernel_s)

    stretches = []
    for parts in parts_of_stretch:
        rows = np.unique(np.concatenate([part.rows for part in parts]))
        local_parts = tuple(replace(part, rows=rows.searchsorted(part.rows)) for part in parts)
        part_timeline = timeline.select_rows(rows, select_operators(kernels.ops, rows), local_parts)
        stretches.append(Stretch(_name_stretch(part_timeline), rows, part_timeline))
    return tuple(stretches)


_PlacedSegment = tuple[IssueSegment, _Groups]  # with the stretch that each of its positions is in


def _split_steps(
    segments: Sequence[IssueSegment], groups: _Groups
) -> Iterator[list[_PlacedSegment]]:
    """Yield neighbouring segments of one kind of engine step together."""
    ends = np.cumsum([len(segment.rows) for segment in segments])
    placed = zip(segments, np.split(groups, ends[:-1]), strict=True)
    for _, of_step in groupby(placed, key=lambda pair: pair[0].step):
        yield list(of_step)


def _divide_step(
    of_step: Sequence[_PlacedSegment],
    number: int,
    kernel_s: Array,
) -> list[IssueSegment]:
    """Return what one stretch has of a step that is divided among several."""
    chosen = [np.flatnonzero(numbers == number) for _, numbers in of_step]
    share = _share_step(of_step, chosen, kernel_s)
    parts = []
    for (segment, _), here in zip(of_step, chosen, strict=True):
        if here.size:
            rows = segment.rows[here]
            counts = segment.counts[here]
            parts.append(
                replace(
                    segment,
                    rows=rows,
                    counts=counts,
                    step_share=share,
                )
            )
    return parts


def _share_step(
    of_step: Sequence[_PlacedSegment],
    chosen: Sequence[RowIndex],
    kernel_s: Array,
) -> Array | float:
    """Return the share of a step's time in kernels that some positions take, ``(*sweep,)``.

    The host prepares a step as a whole. Its time is spread over a step that is divided as the time
    in kernels is, so that the parts of a step which waits for its host wait for it in sum.
    """
    sizes = [len(segment.rows) for segment, _ in of_step]
    is_whole = [here.size for here in chosen] == sizes
    if is_whole or of_step[0][0].step is None:
        return 1.0
    whole_s: Array = np.zeros(())
    part_s: Array = np.zeros(())
    for (segment, _), here in zip(of_step, chosen, strict=True):
        calls_s = segment.repeat * segment.counts * kernel_s[..., segment.rows]
        whole_s = whole_s + calls_s.sum(axis=-1)
        part_s = part_s + calls_s[..., here].sum(axis=-1)
    return np.asarray(part_s / whole_s)


def _name_stretch(timeline: Timeline) -> str:
    """Name a stretch after the part of the model that it is, or the operator it calls most."""
    labels = [_name_label(segment.label) for segment in timeline.kernels.segments]
    names = list(dict.fromkeys(name for name in labels if name))
    if names:
        return " and ".join(names)
    return str(timeline.kernels.ops[int(np.argmax(timeline.calls))])


def _name_label(label: str) -> str:
    """Return which part of a run the label of a block names.

    >>> [_name_label(label) for label in ("decode.layers", "layers.backward", "optimiser")]
    ['decode', 'backward', 'optimiser']
    >>> [_name_label(label) for label in ("layers", "")]
    ['forward', '']
    >>> _name_label("denoiser: layers")
    'denoiser'
    """
    part = part_of_label(label)
    if part:
        return part
    if label.startswith(f"{DECODE}."):
        return DECODE
    if label.endswith(".backward"):
        return "backward"
    if label in ("optimiser", "gradients", "pipeline"):
        return label
    return "forward" if label else ""
