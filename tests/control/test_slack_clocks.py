"""Cards that wait for others run slower: the energy there is, without a slower job.

Jobs are simulated from measured rows of an A100 (time and power of a workload at 17 clocks). What a
card draws while it waits is assumed: a fixed share of what it draws at work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wattcast.control import policy_comparison
from wattcast.control.job_cards import JobCards
from wattcast.control.live_control import control_plant, report_work
from wattcast.control.live_plant import LivePlant
from wattcast.control.plants import KnobRole, build_card_lattice
from wattcast.control.program_files import BUSY_VARIABLE, PROGRESS_VARIABLE, BusyFolder
from wattcast.control.search_problem import Goal, Objective
from wattcast.control.slack_clocks import KNOB_LEVELS, SLACK, SlackShares, choose_clocks_hz
from wattcast.core.arrays import Array
from wattcast.measure.device_control import NvmlReading

IDLE_W = 60.0
WAITING = 0.4  # of what work draws above idle, while a rank spins in a collective
NOISE = 0.01  # of a rank's busy time in a period


# -- the rule --


LEVEL = 7  # of the job's clock


def learn(shares: SlackShares, busy_s: list[float]) -> list[float]:
    shares.learn(LEVEL, busy_s, shares.find_shares(LEVEL))
    return [round(share, 4) for share in shares.find_shares(LEVEL)]


def test_a_slowed_card_is_done_in_99_percent_of_the_busiest_cards_time() -> None:
    """A program that follows the clock in proportion arrives just before the busiest card."""
    shares = SlackShares(3)
    assert SLACK.arrival == 0.99
    assert learn(shares, [1.0, 0.9, 0.99]) == [1.0, round(0.9 / 0.99, 4), 1.0]
    slowed_s = 0.9 / (0.9 / 0.99)
    assert learn(shares, [1.0, slowed_s, 0.99])[1] == round(0.9 / 0.99, 4)


def test_slack_that_a_slower_clock_leaves_is_used_up() -> None:
    """Half of the time of this rank does not follow the clock."""
    shares = SlackShares(2)
    for _ in range(80):
        share = shares.find_shares(LEVEL)[1]
        learn(shares, [1.0, 0.4 / share + 0.4])
    assert 0.4 / shares.find_shares(LEVEL)[1] + 0.4 == pytest.approx(0.99, abs=0.002)


def test_no_card_gets_less_than_half_of_the_jobs_clock() -> None:
    assert learn(SlackShares(2), [1.0, 0.1]) == [1.0, 0.5]
    assert KNOB_LEVELS == (0.5, 1.0)


def test_a_card_that_becomes_the_slowest_gets_the_jobs_clock_back_at_once() -> None:
    shares = SlackShares(2)
    learn(shares, [1.0, 0.6])
    assert learn(shares, [1.0, 1.04])[1] < 0.65  # within the noise of a period
    assert learn(shares, [1.0, 1.06]) == [1.0, 1.0]


def test_a_card_late_below_its_safe_share_gets_the_safe_share_back_at_once() -> None:
    """Late at the safe share too, it gets the job's clock."""
    shares = SlackShares(2)
    safe = learn(shares, [1.0, 0.8])
    for _ in range(9):
        learn(shares, [1.0, 0.9])
    assert shares.find_shares(LEVEL)[1] < 0.7
    assert learn(shares, [1.0, 1.06]) == safe
    assert learn(shares, [1.0, 1.06]) == [1.0, 1.0]


def test_a_share_is_corrected_by_three_tenths_of_its_error_in_a_period() -> None:
    shares = SlackShares(2)
    learn(shares, [1.0, 0.8])
    first = shares.find_shares(LEVEL)[1]
    learn(shares, [1.0, 1.01])  # it follows the clock in proportion, and is a little late
    change = np.log(shares.find_shares(LEVEL)[1] / first)
    assert change == pytest.approx(0.3 * np.log(1.01 / 0.99))


def test_a_share_that_made_a_card_late_in_six_periods_is_not_given_again() -> None:
    """Clocks come in steps: between one that is early and one that is late it would alternate."""
    shares = SlackShares(2)
    learn(shares, [1.0, 0.8])
    for _ in range(5):
        shares.learn(LEVEL, [1.0, 1.002], (1.0, 0.7))
    assert shares.find_shares(LEVEL)[1] < 0.8
    early = [shares.find_shares(LEVEL)[1]]
    shares.learn(LEVEL, [1.0, 1.002], (1.0, 0.7))
    for _ in range(20):
        shares.learn(LEVEL, [1.0, 0.5], (1.0, 0.75))
        early.append(shares.find_shares(LEVEL)[1])
    assert min(early[1:]) == pytest.approx(0.7007)


def test_a_new_clock_of_the_job_begins_with_shares_that_are_safe_at_any() -> None:
    shares = SlackShares(2)
    safe = learn(shares, [1.0, 0.8])
    for _ in range(9):
        learn(shares, [1.0, 0.9])
    assert shares.find_shares(LEVEL)[1] < 0.7
    assert [round(share, 4) for share in shares.find_shares(3)] == safe


def test_nothing_is_learned_from_ranks_that_report_nonsense() -> None:
    shares = SlackShares(2)
    for busy_s in ([1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]):
        assert learn(shares, busy_s) == [1.0, 1.0]


def test_periods_at_the_jobs_clock_do_not_undo_what_was_learned() -> None:
    """Savings are measured against periods in which no card is slowed."""
    shares = SlackShares(2)
    learn(shares, [1.0, 0.7])
    before = learn(shares, [1.0, 0.9])
    shares.learn(LEVEL, [1.0, 0.75], (1.0, 1.0))
    assert [round(share, 4) for share in shares.find_shares(LEVEL)] == before


def test_a_card_gets_the_lowest_clock_that_is_enough() -> None:
    levels = (1.0e9, 1.2e9, 1.4e9, 1.6e9)
    assert choose_clocks_hz(levels, None, (1.0, 0.8, 0.5)) == [None, 1.4e9, 1.0e9]
    assert choose_clocks_hz(levels, 1.4e9, (1.0, 0.99, 0.8)) == [1.4e9, 1.4e9, 1.2e9]


def test_ranks_report_through_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BusyFolder(tmp_path, 2)
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setenv(BUSY_VARIABLE, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    report_work(1.0, busy_s=0.3)
    report_work(1.0, busy_s=0.5)
    assert folder.read() is None  # of rank 0 nothing is known
    monkeypatch.setenv("LOCAL_RANK", "0")
    report_work(1.0, busy_s=0.7)
    report_work(1.0)
    assert folder.read() == (0.7, 0.4)
    report_work(1.0, busy_s=0.8)
    assert folder.read() is None  # nothing new of rank 1
    with (tmp_path / "rank-1").open("a") as stream:
        stream.write("0.5\nnonsense\n-1\n")
    assert folder.read() == (0.8, 0.5)
    assert (tmp_path / "progress").read_text() == "+1\n" * 5


# -- whole jobs --


@dataclass(frozen=True)
class WorkCurve:
    """Time and power of a unit of work at each clock, as measured."""

    clock_hz: Array
    time_s: Array
    power_w: Array

    def time_at(self, clock_hz: Array) -> Array:
        return np.interp(clock_hz, self.clock_hz, self.time_s)

    def power_at(self, clock_hz: Array) -> Array:
        return np.interp(clock_hz, self.clock_hz, self.power_w)


def run_data_parallel(busy_s: Array) -> Array:
    """Return the time of a step in which all ranks wait for the slowest, ``(..., rank)``."""
    return np.asarray(busy_s.max(axis=-1))


def run_pipeline(busy_s: Array, micro_batches: int = 32) -> Array:
    """Return the time of a step of one forward and one backward per micro-batch (1F1B), by when
    each task may begin, ``(..., stage)``. Backward takes twice the time of forward.
    """
    stages = busy_s.shape[-1]
    forward_s = busy_s / micro_batches / 3.0
    orders = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, micro_batches)
        order = [("f", batch) for batch in range(warm_up)]
        for batch in range(micro_batches - warm_up):
            order += [("f", warm_up + batch), ("b", batch)]
        order += [("b", batch) for batch in range(micro_batches - warm_up, micro_batches)]
        orders.append(order)
    ends: dict[tuple[str, int, int], Array] = {}
    free_s = [np.zeros(busy_s.shape[:-1])] * stages
    place = [0] * stages
    while any(place[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, batch = orders[stage][place[stage]]
                needs = None
                if kind == "f" and stage > 0:
                    needs = ("f", stage - 1, batch)
                if kind == "b" and stage < stages - 1:
                    needs = ("b", stage + 1, batch)
                if needs is not None and needs not in ends:
                    break
                length_s = forward_s[..., stage] * (1.0 if kind == "f" else 2.0)
                begin_s = free_s[stage]
                if needs is not None:
                    begin_s = np.maximum(begin_s, ends[needs])
                free_s[stage] = begin_s + length_s
                ends[kind, stage, batch] = free_s[stage]
                place[stage] += 1
    return np.max(free_s, axis=0)


@dataclass
class JobCard:
    """A card of a simulated job."""

    job: SimulatedJob
    rank: int
    name: str = "A100"
    uuid: str = "GPU"
    count: int = 1
    losses: int = 0
    is_adrift: bool = False

    def clocks_hz(self) -> Any:
        return tuple(self.job.curve.clock_hz.tolist()), (1.2e9,)

    def limits_w(self) -> None:
        return None

    def read(self) -> NvmlReading:
        job = self.job
        clock_hz = float(job.clocks_hz[self.rank])
        energy_j = float(job.energy_j[self.rank])
        power_w = float(job.powers_w[self.rank])
        return NvmlReading(job.now_s, energy_j, power_w, clock_hz, 1.2e9, 1.0, 0.5)

    def beat(self) -> None:
        pass

    def apply(self, core_hz: float | None, *_: float | None) -> None:
        self.job.clocks_hz[self.rank] = core_hz or self.job.curve.clock_hz[-1]
        self.job.powers_w = self.job.find_powers_w(self.job.clocks_hz)

    def give_back(self) -> None:
        self.apply(None)


@dataclass
class SimulatedJob:
    """Ranks with different work, which wait for one another in every step."""

    curve: WorkCurve
    work: Array  # (rank,) of a step, relative
    run: Any
    seed: int = 0
    now_s: float = 0.0
    steps: float = 0.0
    clocks_hz: Array = field(init=False)
    energy_j: Array = field(init=False)
    powers_w: Array = field(init=False)

    def __post_init__(self) -> None:
        self.clocks_hz = np.full(len(self.work), self.curve.clock_hz[-1])
        self.energy_j = np.zeros(len(self.work))
        self.powers_w = self.find_powers_w(self.clocks_hz)
        self.chance = np.random.default_rng(self.seed)
        self.reported = 0

    def find_busy_s(self, clocks_hz: Array) -> Array:
        return self.work * self.curve.time_at(clocks_hz)

    def find_step_s(self, clocks_hz: Array) -> float:
        return float(self.run(self.find_busy_s(clocks_hz)))

    def find_powers_w(self, clocks_hz: Array) -> Array:
        """Return the mean power of each card, at work and waiting."""
        share = self.find_busy_s(clocks_hz) / self.find_step_s(clocks_hz)
        working_w = self.curve.power_at(clocks_hz)
        waiting_w = IDLE_W + WAITING * (working_w - IDLE_W)
        return share * working_w + (1.0 - share) * waiting_w

    def find_step_j(self, clocks_hz: Array) -> float:
        return float(self.find_powers_w(clocks_hz).sum() * self.find_step_s(clocks_hz))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.energy_j = self.energy_j + self.powers_w * seconds
        self.steps += 1000.0 * seconds / self.find_step_s(self.clocks_hz)

    def count(self) -> float:
        return self.steps

    def read(self) -> tuple[float, ...] | None:
        """Return how long each rank was busy, as ``BusyFolder`` does."""
        noise = np.exp(NOISE * self.chance.standard_normal(len(self.work)))
        return tuple((self.find_busy_s(self.clocks_hz) * noise).tolist())

    def find_least_j(self, job_hz: float, slowest_s: float) -> float:
        """Return the least energy of a step that takes no longer than ``slowest_s``.

        Clocks are those of the controller, from half of the job's clock on. With ranks that wait
        once, each has its own best clock. Of a pipeline all clocks of all
        stages are tried."""
        is_usable = (self.curve.clock_hz <= job_hz * 1.0001) & (self.curve.clock_hz >= 0.5 * job_hz)
        levels_hz = self.curve.clock_hz[is_usable]
        if self.run is run_data_parallel:
            least_j = 0.0
            for work in self.work:
                busy_s = work * self.curve.time_at(levels_hz)
                working_w = self.curve.power_at(levels_hz)
                waiting_w = IDLE_W + WAITING * (working_w - IDLE_W)
                joules = busy_s * working_w + (slowest_s - busy_s) * waiting_w
                least_j += joules[busy_s <= slowest_s * (1.0 + 1e-9)].min()
            return float(least_j)
        trials_hz = np.array(list(itertools.product(levels_hz, repeat=len(self.work))))
        busy_s = self.work * self.curve.time_at(trials_hz)
        step_s = self.run(busy_s)
        working_w = self.curve.power_at(trials_hz)
        waiting_w = IDLE_W + WAITING * (working_w - IDLE_W)
        joules = (busy_s * working_w + (step_s[:, None] - busy_s) * waiting_w).sum(axis=-1)
        return float(joules[step_s <= slowest_s * (1.0 + 1e-9)].min())


def steer(job: SimulatedJob, objective: Objective, periods: int) -> tuple[LivePlant, Any]:
    """Control a job with the live controller; return the plant and what it measured."""
    cards: Any = [JobCard(job, rank) for rank in range(len(job.work))]
    steered = JobCards(cards)
    lattice = build_card_lattice(*steered.clocks_hz(), slack_shares=KNOB_LEVELS)
    source: Any = job
    plant = LivePlant(
        steered, lattice, 1.0, lambda: job.now_s < periods, job.pass_time, source, busy=source
    )
    return plant, control_plant(plant, objective)


def measure_shares(job: SimulatedJob, objective: Objective, periods: int = 90) -> tuple[float, Any]:
    """Return the share of the slack's energy that control turns into a saving, and its savings."""
    plant, savings = steer(job, objective, periods)
    which = plant.lattice.find_knob(KnobRole.SLACK_CLOCK)
    if savings is None or which is None or savings.settings[which] != 0:
        return 0.0, savings  # the slack is not used
    core = plant.lattice.find_knob(KnobRole.CORE_CLOCK)
    assert core is not None
    job_hz = plant.lattice.knobs[core].levels[savings.settings[core]]
    shares = plant._slack.find_shares(savings.settings[core])
    levels_hz = tuple(job.curve.clock_hz.tolist())
    clocks_hz = np.array(
        [hz or levels_hz[-1] for hz in choose_clocks_hz(levels_hz, job_hz, shares)]
    )
    even_hz = np.full(len(job.work), job_hz)
    slowest_s = max(job.find_step_s(clocks_hz), job.find_step_s(even_hz))
    saved_j = job.find_step_j(even_hz) - job.find_step_j(clocks_hz)
    possible_j = job.find_step_j(even_hz) - job.find_least_j(job_hz, slowest_s)
    # The start and the end of a pipeline are longer; ranks that wait once lose nothing.
    most = 0.01 if job.run is run_data_parallel else 0.05
    assert savings.time.change < most
    assert saved_j >= 0.0
    return saved_j / possible_j, savings


@pytest.fixture(scope="module")
def curves(reference: Path) -> dict[str, WorkCurve]:
    path = reference / "energaizer" / "measurements" / "a100_pcie_40gb_dvfs.csv"
    curves = {}
    for tables in policy_comparison.read_replay_tables(path):
        levels_hz = np.asarray(tables.lattice.knobs[0].levels)
        for name, time_s, power_w in zip(
            tables.kernels, tables.time_s, tables.power_w, strict=True
        ):
            # Measured times scatter by 1 to 2 %; a clock that is higher is not slower.
            falling_s = np.maximum.accumulate(time_s[::-1])[::-1]
            rising_w = np.maximum.accumulate(power_w)
            curves[name] = WorkCurve(levels_hz, falling_s, rising_w)
    return curves


UNEVEN = np.array([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65])
STRAGGLER = np.array([1.0] + [0.8] * 7)
STAGES = np.array([0.8, 1.0, 0.9, 0.7])
WORKLOADS = ("gpt2", "opt", "qwen2", "bert")


def choose_workload(curves: dict[str, WorkCurve], start: str) -> WorkCurve:
    """Return the longest workload of a family, whose rows scatter least."""
    names = [name for name in curves if name.startswith(start)]
    return curves[max(names, key=lambda name: curves[name].time_s[-1])]


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in WORKLOADS[1:])]
)
@pytest.mark.parametrize(
    ("work", "run"),
    [(UNEVEN, run_data_parallel), (STRAGGLER, run_data_parallel), (STAGES, run_pipeline)],
    ids=["uneven", "straggler", "pipeline"],
)
def test_slack_becomes_four_fifths_of_the_energy_that_is_there(
    curves: dict[str, WorkCurve], family: str, work: Array, run: Any
) -> None:
    """In the mean of these twelve jobs 0.93; in the worst 0.798, where a step of the clock, 90 MHz
    in these rows, is a tenth of the slack. ``find_least_j`` knows all curves.
    """
    job = SimulatedJob(choose_workload(curves, family), work, run, seed=53)
    share, savings = measure_shares(job, Objective(Goal.ED2))
    print(f"{family}: {share:.2f} of the slack's energy, {savings.energy}, {savings.time}")
    assert share > 0.79


def draw_jobs(curves: dict[str, WorkCurve]) -> Iterator[SimulatedJob]:
    """Draw forty jobs: any workload of the file, two to eight cards, any division of the work."""
    chance = np.random.default_rng(3053)
    for number in range(40):
        name = str(chance.choice(sorted(curves)))
        is_pipeline = bool(chance.random() < 0.4)
        count = 4 if is_pipeline else int(chance.integers(2, 9))
        work = chance.uniform(0.5, 1.0, count)
        work[chance.integers(count)] = 1.0
        run = run_pipeline if is_pipeline else run_data_parallel
        yield SimulatedJob(curves[name], work, run, seed=number)


def find_best_even_hz(job: SimulatedJob) -> float:
    """Return the clock of least E·D² at which all cards run alike."""
    costs = []
    for clock_hz in job.curve.clock_hz:
        even_hz = np.full(len(job.work), clock_hz)
        costs.append(job.find_step_j(even_hz) * job.find_step_s(even_hz) ** 2)
    return float(job.curve.clock_hz[int(np.argmin(costs))])


def find_arrival_clocks(job: SimulatedJob, job_hz: float) -> Array:
    """Return the clocks that the rule ends at without noise: the lowest to arrive in time."""
    busy_s = job.find_busy_s(np.full(len(job.work), job_hz))
    levels_hz = job.curve.clock_hz
    usable_hz = levels_hz[(levels_hz <= job_hz) & (levels_hz >= SLACK.lowest * job_hz)]
    clocks_hz = []
    for work, full_s in zip(job.work, busy_s, strict=True):
        in_time = work * job.curve.time_at(usable_hz) <= SLACK.arrival * busy_s.max()
        is_slowed = full_s < busy_s.max() and in_time.any()
        clocks_hz.append(usable_hz[in_time][0] if is_slowed else job_hz)
    return np.array(clocks_hz)


def test_the_clocks_that_the_rule_ends_at_have_nearly_all_of_the_slack(
    curves: dict[str, WorkCurve],
) -> None:
    """At the best even clock, the clocks of the rule reach four fifths in 37 of 38 jobs, without noise.

    Two more have their best even clock at the lowest, where no card can be slower. The one that falls
    short would arrive with the next lower clock, but for the hundredth of a step that is kept."""
    shares = []
    empty = 0
    for job in draw_jobs(curves):
        job_hz = find_best_even_hz(job)
        even_hz = np.full(len(job.work), job_hz)
        clocks_hz = find_arrival_clocks(job, job_hz)
        slowest_s = max(job.find_step_s(clocks_hz), job.find_step_s(even_hz))
        even_j = job.find_step_j(even_hz)
        possible_j = even_j - job.find_least_j(job_hz, slowest_s)
        if possible_j < 1e-3 * even_j:
            assert job_hz == job.curve.clock_hz[0]
            empty += 1
            continue
        shares.append((even_j - job.find_step_j(clocks_hz)) / possible_j)
    assert empty == 2
    assert sum(share >= 0.8 for share in shares) == 37
    assert min(shares) > 0.6


@pytest.mark.slow
def test_slack_of_random_jobs_becomes_four_fifths_of_the_energy_that_is_there(
    curves: dict[str, WorkCurve],
) -> None:
    """Forty jobs drawn after all was written. Those that use no slack count as zero."""
    shares = []
    for number, job in enumerate(draw_jobs(curves)):
        share, savings = measure_shares(job, Objective(Goal.ED2))
        saving = "nothing" if savings is None else savings.energy
        print(f"{number} {len(job.work)} {job.run.__name__}: {share:.3f}, {saving}")
        shares.append(share)
    print(f"mean {np.mean(shares):.3f}, lowest {min(shares):.3f}, of {len(shares)}")
    assert np.mean(shares) >= 0.8


def test_a_job_without_slack_slows_no_card(curves: dict[str, WorkCurve]) -> None:
    job = SimulatedJob(choose_workload(curves, "gpt2"), np.ones(8), run_data_parallel)
    plant, _ = steer(job, Objective(Goal.ED2), 60)
    assert min(plant._slack.find_shares(plant.default[0])) > 0.96


def test_a_pipeline_is_simulated_as_its_schedule_says() -> None:
    """Even stages: M + S - 1 slots of a micro-batch."""
    step_s = run_pipeline(np.full(4, 3.2), 32)
    assert step_s == pytest.approx(0.1 * (32 + 4 - 1))
