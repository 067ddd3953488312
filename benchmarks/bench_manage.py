"""One decision of the controller and ten thousand iterations: as seconds, and against the oracle's sweep."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from wattcast.manage import hd7970
from wattcast.manage.harmonia import Harmonia
from wattcast.manage.objective import Objective
from wattcast.manage.plant import TableRun
from wattcast.manage.policies import oracle
from wattcast.manage.sensitivity import preset
from wattcast.manage.simulate import play_table

ITERATIONS = 10_000


class Manage:
    """The controller on the simulated HD 7970."""

    def setup(self) -> None:
        tables = hd7970.tables()
        order = np.resize(tables.applications["CoMD"], ITERATIONS)
        self.tables = replace(tables, applications={"long": order})
        self.controller = Harmonia(tables.lattice, tables.default, model=preset("hd7970_simulated"))
        assert self.tables.rows
        self.moments = list(self._moments())

    def _moments(self):
        """Every state and observation of the first runs of an application, searching and settled."""
        run, state = TableRun(hd7970.tables(), "CoMD"), self.controller.start()
        while (kernel := run.next_kernel()) is not None:
            observation = run.run(self.controller.settings(state, kernel))
            yield state, observation
            state, _ = self.controller.step(state, observation)

    def time_ten_thousand_iterations(self) -> None:
        play_table(self.tables, "long", self.controller)

    def track_decision_us(self) -> float:
        begin = time.perf_counter()
        for state, observation in self.moments:
            self.controller.step(state, observation)
        return 1e6 * (time.perf_counter() - begin) / len(self.moments)

    def track_iterations_per_oracle_sweep(self) -> float:
        """How many controlled iterations take as long as the oracle over 448 settings of 32 phases."""
        begin = time.perf_counter()
        oracle(self.tables, Objective())
        sweep_s = time.perf_counter() - begin
        begin = time.perf_counter()
        play_table(self.tables, "long", self.controller)
        return sweep_s / ((time.perf_counter() - begin) / ITERATIONS)
