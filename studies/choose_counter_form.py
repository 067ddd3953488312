"""Choose the form of the H200's counter model by microbenchmarks alone, never by the multimedia
rows it is tested on.

Run: ``python studies/choose_counter_form.py``. The rule was committed before the chosen form was
judged (docs/method/history.md, "Counter models"):

1. Families are the first words of the benchmarks' names. A family is predicted by a fit without it.
2. Memory draws a step once it is awake, if the memory power of held-out families is then missed by
less. The rate at
   which the step is complete is the one with the least error over all rows.
3. Predictors are added to the core rail one at a time, each time the one that lowers the error
most. The error is
   that of the total at the top clock, averaged within a family and then over families; an error
   counts as 25 % at most, because a family that alone uses a unit cannot be predicted without
   itself.
4. A predictor is added only if the gain is at least 0.1 points and larger than its standard error
over families, and
   if held-out mixes of units, which resemble programs most, are missed by no more than before.
5. The leaning is chosen by held-out mixes, as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.row_tables import database_folder
from wattcast.lab.counter_models.microbench_lines import make_table_lines
from wattcast.lab.counter_models.rails_apart import (
    RailsDesign,
    leaning_errors,
    make_rails_design,
    read_shipped_table,
    solve_rails,
    split_rows,
)

GPU = "h200"
LEANING = 0.6  # of the model before, while predictors are chosen
MOST_ERROR = 25.0  # percent of a row
LEAST_GAIN = 0.1  # points of percent
STEP_BYTE_PER_S = (1e10, 2e10, 5e10, 1e11, 2e11, 3e11, 4e11, 6e11, 8e11)
THREADS = "sm__sass_thread_inst_executed_op_{}_pred_on.sum"
COUNTS = {  # candidates that are one metric
    "SM cycles with work": "sm__cycles_active.sum",
    "moves": THREADS.format("misc"),
    "integer instructions": THREADS.format("integer"),
    "conversions": THREADS.format("conversion"),
    "control flow": THREADS.format("control"),
    "memory instructions of threads": THREADS.format("memory"),
    "fp32 with three operands": THREADS.format("ffma"),
    "fp64 with three operands": THREADS.format("dfma"),
    "instructions of threads": "smsp__thread_inst_executed.sum",
    "uniform instructions": "sm__inst_executed_pipe_uniform.sum",
    "branches and barriers": "sm__inst_executed_pipe_cbu.sum",
    "address divergence": "sm__inst_executed_pipe_adu.sum",
    "loads and stores": "sm__inst_executed_pipe_lsu.sum",
    "bulk copies": "sm__inst_executed_pipe_tma.sum",
    "constant requests": "idc__requests.sum",
    "instruction requests": "sm__icc_requests.sum",
    "instruction misses": "sm__icc_requests_lookup_miss.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "L1 bank reads": "l1tex__data_bank_reads.sum",
    "L1 bank writes": "l1tex__data_bank_writes.sum",
    "L2 sectors read": "lts__t_sectors_op_read.sum",
    "L2 sectors written": "lts__t_sectors_op_write.sum",
    "L2 sectors reduced": "lts__t_sectors_op_red.sum",
    "L2 bytes": "lts__t_bytes.sum",
    "L1 bytes": "l1tex__t_bytes.sum",
    "bytes from SMs to L2": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "shared-memory passes": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}


class HeldOutFamilies:
    """Training rows of the shipped table with their families, and errors of designs with each
    family held out.
    """

    def __init__(self) -> None:
        whole = read_shipped_table(GPU)
        kept = split_rows(whole)[0]
        lines = [
            line
            for line, keep in zip(make_table_lines(database_folder(GPU), GPU), kept, strict=True)
            if keep
        ]
        trained = np.unique(whole.benchmark[kept])
        # before anything is computed, rows that are tested or left out go
        before = [
            p.event != "l2_write_sector" for p in whole.predictors
        ]  # the model of the second round
        events = tuple(p for p, kept in zip(whole.predictors, before, strict=True) if kept)
        whole = replace(
            whole, awake_per_s=None, predictors=events, occurrence=whole.occurrence[:, before]
        )
        self.table = replace(whole, test=(), left_out={}).keep_benchmarks(
            np.isin(np.arange(whole.benchmarks), trained)
        )
        self.design = make_rails_design(self.table)
        self.train = np.ones(self.table.rows, dtype=bool)
        self.family = np.array([str(line["benchmark"]).split("_")[0] for line in lines])
        self.column = {
            name: np.array([float(line.get(name, 0.0)) for line in lines])
            for name in lines[-1]
            if "__" in name
        }
        self.seconds = np.array([float(line["seconds"]) for line in lines])
        self.square = self.design.static[:, 1] / self.table.clock_hz

    def candidates(self) -> Iterator[tuple[str, Array]]:
        """Yield the rate of every candidate for the core rail."""
        for name, metric in COUNTS.items():
            yield name, self.column[metric] / self.seconds
        column, seconds = self.column, self.seconds
        share = column["smsp__thread_inst_executed_per_inst_executed.ratio"] / 32.0
        occupancy = column["sm__warps_active.avg.pct_of_peak_sustained_active"] / 100.0
        multiplied = column["sm__inst_executed_pipe_fma.sum"] * share / seconds
        single = column[THREADS.format("fp32")] / 32.0 / seconds
        yield "integer products", np.maximum(multiplied - single, 0.0)
        yield "resident warps", column["sm__cycles_active.sum"] * occupancy / seconds
        # warps that take turns change the operands at every issue
        yield "multiply-adds by warps in turn", multiplied * occupancy
        yield (
            "instructions by warps in turn",
            column["smsp__inst_executed.sum"] * occupancy / seconds,
        )
        yield (
            "threads by warps in turn",
            column["smsp__thread_inst_executed.sum"] * occupancy / seconds,
        )
        registers = column["launch__registers_per_thread"]
        yield "registers in use", column["sm__cycles_active.sum"] * occupancy * registers / seconds

    def add_to_core(self, design: RailsDesign, rate: Array) -> RailsDesign:
        """Return the design with one more predictor on the core rail."""
        return replace(
            design, core=np.concatenate([design.core, (rate * self.square)[:, np.newaxis]], axis=1)
        )

    def add_memory_step(self, full_byte_per_s: float) -> RailsDesign:
        """Return the design with a ramp of memory power that is complete at a rate."""
        memory = [i for i, p in enumerate(self.table.predictors) if p.rail == "memory"]
        awake = np.minimum(self.table.occurrence[:, memory].sum(axis=1) / full_byte_per_s, 1.0)
        rail = self.design.rail("memory")
        columns = np.concatenate([rail.columns, awake[:, np.newaxis]], axis=1)
        return self.design.with_rail(replace(rail, columns=columns))

    def held_out(self, design: RailsDesign) -> tuple[Array, Array]:
        """Return total and memory power of each row by a fit without its family; idle rows are
        always trained on.
        """
        total_w, memory_w = np.zeros(self.table.rows), np.zeros(self.table.rows)
        for family in np.unique(self.family):
            mine = self.family == family
            costs = solve_rails(design, self.train if family == "idle" else ~mine, LEANING)
            total_w[mine], memory_w[mine] = (
                costs.total_w(design)[mine],
                costs.apart_w(design)[mine],
            )
        return total_w, memory_w

    def family_errors(self, design: RailsDesign) -> dict[str, float]:
        """Return the error of every family of working benchmarks at the top clock, in percent."""
        found_w, _ = self.held_out(design)
        error = np.minimum(100.0 * np.abs(found_w / self.table.power_w - 1.0), MOST_ERROR)
        counted: Mask = self.table.at_default() & (self.family != "idle")
        return {
            str(f): float(error[counted & (self.family == f)].mean())
            for f in np.unique(self.family[counted])
        }


def main() -> None:
    """Print each choice with what decided it."""
    rows = HeldOutFamilies()

    def memory_error_w(design: RailsDesign) -> float:
        return float(np.abs(rows.held_out(design)[1] - design.rail("memory").power_w).mean())

    steps = {full: rows.add_memory_step(full) for full in STEP_BYTE_PER_S}
    errors_w = {full: memory_error_w(design) for full, design in steps.items()}
    full = min(errors_w, key=lambda rate: errors_w[rate])
    plain_w = memory_error_w(rows.design)
    print(f"memory power, families held out: a line {plain_w:.2f} W off, a step complete at")
    print(
        "  " + ", ".join(f"{1e-12 * rate:g} TB/s {error:.2f}" for rate, error in errors_w.items())
    )
    design = steps[full] if errors_w[full] < plain_w else rows.design
    before = rows.family_errors(design)
    print(
        f"core rail: {np.mean(list(before.values())):.2f} % over {len(before)} families, mixes {before['mix']:.2f}"
    )
    left = dict(rows.candidates())
    while left:
        tried = {
            name: rows.family_errors(rows.add_to_core(design, rate)) for name, rate in left.items()
        }
        gains = {n: np.array([before[f] - after[f] for f in before]) for n, after in tried.items()}
        for name in sorted(gains, key=lambda n: -gains[n].mean())[:8]:
            gain = gains[name]
            spread = gain.std(ddof=1) / np.sqrt(gain.size)
            print(
                f"  {name:32} gains {gain.mean():.2f} +- {spread:.2f}, mixes {tried[name]['mix']:.2f}"
            )
        fit = [
            name
            for name, gain in gains.items()
            if gain.mean() > max(LEAST_GAIN, gain.std(ddof=1) / np.sqrt(gain.size))
            and tried[name]["mix"] <= before["mix"]
        ]
        if not fit:
            break
        best = max(fit, key=lambda name: gains[name].mean())
        design, before = rows.add_to_core(design, left.pop(best)), tried[best]
        print(f"added: {best}; {np.mean(list(before.values())):.2f} %, mixes {before['mix']:.2f}")
    print("leaning, error of held-out mixes:", leaning_errors(rows.table, design, rows.train))


if __name__ == "__main__":
    main()
