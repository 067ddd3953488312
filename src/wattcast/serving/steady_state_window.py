"""Find the steady state of a simulated run, apart from its start and its drain.

A run starts with an empty engine and ends with a drain: after the last request has arrived, those
in the engine are finished by ever smaller batches. Requests over the whole time are therefore fewer
per second than the engine serves while traffic lasts. The steady state begins when the first
request has ended, so that requests leave as others arrive, and ends with the last arrival.

Traffic that the engine cannot serve has no steady state in the strict sense: requests pile up. They
do where more of them arrive than end, by more than chance. The requests in the engine are counted
at both ends of the window, N and M. Two counts of one Poisson variable differ by less than two
standard deviations, of which one is sqrt(N + M), in 95 % of runs (Przyborowski and Wilenski 1940).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wattcast.core.arrays import Array
from wattcast.serving.arrivals import Trace
from wattcast.serving.plan_coefficients import PLAN


class RequestTimes(Protocol):
    """What is asked of a simulated run."""

    @property
    def trace(self) -> Trace: ...

    @property
    def first_token_s(self) -> Array: ...  # of each request

    @property
    def last_token_s(self) -> Array: ...

    def energy_until(self, times_s: Array) -> Array:
        """Return the joules of all GPUs up to each time."""
        ...


@dataclass(frozen=True)
class SteadyState:
    """Rates and power between the end of the first request and the last arrival."""

    begin_s: float
    end_s: float
    arrivals_per_s: float
    requests_per_s: float  # that end
    output_tokens_per_s: float
    power_w: float  # mean, of all GPUs
    in_engine: tuple[int, int]  # requests waiting or running, at the begin and at the end
    queue_grows: bool

    @property
    def energy_j_per_token(self) -> float:
        """Joules of all GPUs per output token."""
        return self.power_w / self.output_tokens_per_s


def find_steady_state(result: RequestTimes) -> SteadyState | None:
    """Find the steady state of a run; None where too few requests end before the last arrives."""
    arrival_s = result.trace.arrival_s
    ended_s = result.last_token_s
    begin_s = float(ended_s.min())
    end_s = float(arrival_s[-1])
    inside = (ended_s > begin_s) & (ended_s <= end_s)
    if int(inside.sum()) < PLAN.steady_ends:
        return None
    length_s = end_s - begin_s
    arrived = int(((arrival_s > begin_s) & (arrival_s <= end_s)).sum())
    before = _count_in_engine(result, begin_s)
    after = _count_in_engine(result, end_s)
    window_s = np.array([begin_s, end_s])
    tokens = np.diff(_count_tokens(result, window_s))
    joules = np.diff(result.energy_until(window_s))
    return SteadyState(
        begin_s=begin_s,
        end_s=end_s,
        arrivals_per_s=arrived / length_s,
        requests_per_s=int(inside.sum()) / length_s,
        output_tokens_per_s=float(tokens[0]) / length_s,
        power_w=float(joules[0]) / length_s,
        in_engine=(before, after),
        queue_grows=_has_growing_queue(before, after, arrived),
    )


def _count_in_engine(result: RequestTimes, moment_s: float) -> int:
    """Count the requests that have arrived and not ended at a moment."""
    arrived = int((result.trace.arrival_s <= moment_s).sum())
    return arrived - int((result.last_token_s <= moment_s).sum())


def _has_growing_queue(
    before: int,
    after: int,
    arrived: int,
) -> bool:
    """Tell whether requests pile up by more than chance.

    An engine that has just begun holds fewer requests than later, so one end alone would
    understate what chance does.

    >>> _has_growing_queue(10, 14, 100), _has_growing_queue(10, 60, 100)
    (False, True)
    >>> _has_growing_queue(27, 42, 172)
    False
    """
    chance = PLAN.growth_deviations * math.sqrt(max(before + after, 1))
    return after - before > max(chance, PLAN.growth_share * arrived)


def _count_tokens(result: RequestTimes, moments_s: Array) -> Array:
    """Count the output tokens up to each moment; a request yields its tokens evenly after its
    first.
    """
    first_s = result.first_token_s
    last_s = result.last_token_s
    later = result.trace.output_tokens - 1
    counted = []
    for moment_s in moments_s.tolist():
        spent_s = np.clip(moment_s, first_s, last_s) - first_s
        length_s = last_s - first_s
        share = np.divide(spent_s, length_s, out=np.ones(len(spent_s)), where=length_s > 0.0)
        counted.append(float(np.where(first_s <= moment_s, 1.0 + later * share, 0.0).sum()))
    return np.array(counted)
