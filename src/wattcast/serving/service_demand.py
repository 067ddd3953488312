"""Describe what a service is to serve, and what its plan has least of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from wattcast.options.serving_options import PlanAim as PlanAim
from wattcast.options.setting_options import MachineOptions
from wattcast.predictor.machine_factors import UNTOLD
from wattcast.predictor.prices import Prices
from wattcast.serving.arrivals import (
    Trace,
    draw_trace,
    drop_long_requests,
)
from wattcast.serving.latency_bounds import LatencyBound
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, count_positions

PERCENTILE = 90.0  # of a latency bound that names none
REQUESTS = 500  # simulated for each answer
# Runs are made longer until they tell. So much longer ones differ by less than bounds leave.
_LONGER_RUNS = 64
_ENOUGH_REQUESTS = 16_000


@dataclass(frozen=True)
class ServiceDemand:
    """What is to be served, and what the plan has least of."""

    model: ModelSpec
    rate_per_s: float
    prompt: str | int
    output: str | int
    bounds: tuple[LatencyBound, ...] = ()
    headroom: float = 0.0
    spare_replicas: int = 0  # that may be down while all bounds hold
    site_power_w: float = math.inf  # mean power of all GPUs, at most
    power_budget_w: float | None = None  # of a hall at its meter, which is to be filled
    host_share: float = 0.0  # of the GPUs' energy, that hosts, network and fans take besides
    arrivals: str = "poisson"
    options: ModelOptions = field(default_factory=ModelOptions)
    seed: int = 1
    requests: int = REQUESTS  # simulated for each answer
    aim: PlanAim = PlanAim.GPUS
    prices: Prices = field(default_factory=Prices)
    machine: MachineOptions = UNTOLD  # how hosts and cards differ from the usual ones
    force: bool = False  # requests of more tokens than the model was made for are served too

    @property
    def peak_per_s(self) -> float:
        """Requests a second that all replicas must serve, headroom included."""
        return self.rate_per_s * (1.0 + self.headroom)

    # Latency bounds

    @property
    def bounds_tokens(self) -> bool:
        """Whether time per output token is bounded."""
        return any(bound.quantity == "tpot" for bound in self.bounds)

    @property
    def longest_token_s(self) -> float:
        """Mean time from token to token that no plan exceeds in a steady state; infinite: any.

        A bound on what 9 in 10 requests take, or more of them, bounds their mean as well where
        arrivals do not come in bursts.
        """
        if self.arrivals not in ("poisson", "fixed"):
            return math.inf
        longest_s = math.inf
        for bound in self.bounds:
            is_of_most = (bound.percentile or PERCENTILE) >= PERCENTILE
            if bound.quantity == "tpot" and is_of_most:
                longest_s = min(longest_s, bound.seconds)
        return longest_s

    # Requests

    def draw_requests(self, requests: int = 0) -> Trace:
        """Draw requests at one a second; another rate stretches the same arrivals."""
        return self._accept_requests(requests or self.requests)[0]

    @property
    def rejection(self) -> str:
        """Say how many of the simulated requests the engine rejects as too long; empty: none."""
        return self._accept_requests(self.requests)[1]

    @cached_property
    def seconds_per_request(self) -> float:
        """Least mean time between arrivals of the runs that may be simulated.

        A run that is too short to tell is made longer. A longer one begins with the same arrivals,
        and its mean may be less.
        """
        longest = max(self.requests, min(_LONGER_RUNS * self.requests, _ENOUGH_REQUESTS))
        arrival_s = self.draw_requests(longest).arrival_s
        first = min(self.requests, len(arrival_s))
        means_s = arrival_s / np.arange(1, len(arrival_s) + 1)
        return float(means_s[first - 1 :].min()) / self.rate_per_s

    @cached_property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        trace = self.draw_requests()
        return float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())

    def _accept_requests(self, count: int) -> tuple[Trace, str]:
        """Draw requests, and leave out those that the engine rejects as too long."""
        if count not in self._traces:
            trace = draw_trace(
                1.0,
                self.prompt,
                self.output,
                self.arrivals,
                seconds=0.0,
                requests=count,
                seed=self.seed,
            )
            most = count_positions(self.model)
            self._traces[count] = drop_long_requests(trace, self.model.name, most, self.force)
        return self._traces[count]

    @cached_property
    def _traces(self) -> dict[int, tuple[Trace, str]]:
        """Draws by their number of requests, each with a sentence about rejected requests."""
        return {}

    # Power and money, with hosts

    @property
    def meter_share(self) -> float:
        """Joules at the meter of the site per joule of the GPUs: hosts, network, fans and PUE."""
        return (1.0 + self.host_share) * self.prices.pue

    def find_cost(
        self,
        gpu: str,
        joules: float,
        gpu_s: float,
    ) -> float | None:
        """Return the money for what GPUs and their hosts draw, and for the GPUs' time."""
        return self.prices.cost(gpu, joules * (1.0 + self.host_share), gpu_s)

    def find_carbon_g(self, joules: float) -> float | None:
        """Return the grams of CO2 equivalent of what GPUs and their hosts draw."""
        return self.prices.carbon_g(joules * (1.0 + self.host_share))

    # Plans

    def count_replicas(
        self,
        capacity_per_s: float,
        growth: float = 1.0,
    ) -> int:
        """Return the replicas of a capacity that serve ``growth`` times the rate.

        Headroom and spare replicas are included.
        """
        needed = growth * self.rate_per_s * (1.0 + self.headroom) / capacity_per_s
        return max(math.ceil(needed - 1e-9), 1) + self.spare_replicas

    def rank_use(
        self,
        gpu: str,
        gpus: int,
        joules: float,
    ) -> tuple[float, float]:
        """Return what is minimised first and what decides between equals.

        ``joules`` are those of a request.
        """
        match self.aim:
            case PlanAim.GPUS:
                return float(gpus), joules
            case PlanAim.COST:
                cost = self.find_cost(gpu, joules, gpus / self.rate_per_s)
                return (math.inf if cost is None else cost), joules
            case _:
                return joules, float(gpus)  # carbon is energy times one number
