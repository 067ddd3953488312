"""A simulator that listens to its own power: a governor holds a limit by lowering the clock.

The chip and its energies are made up. The simulator below knows two kinds of work, arithmetic and
streaming, and hands each sample's counters to a PowerMeter; the listener answers with the clock and
voltage of the next sample.

    python examples/simulator_feedback.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wattcast.lab.gpuwattch.architecture import read_architecture
from wattcast.lab.gpuwattch.component_build import (
    ClockSetting,
    PowerMeter,
    SamplePower,
    build_component_model,
)
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.energy_table import read_energies
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect, dialect_counters

CHIP = Path(__file__).parent / "made_up_chip"
CYCLES = 500
CLOCKS_HZ = (0.5e9, 0.6e9, 0.7e9, 0.8e9, 0.9e9, 1.0e9)


def voltage_v(clock_hz: float) -> float:
    """Supply of the made-up chip: 0.7 V at half the clock, 1 V at all of it."""
    return 0.4 + 0.6 * clock_hz / 1e9


@dataclass
class Governor:
    """One step down when a sample is over the limit, one up when there is room for it."""

    limit_w: float
    room: float = 0.85

    def __call__(self, sample: SamplePower) -> ClockSetting | None:
        step = CLOCKS_HZ.index(sample.setting.clock_hz)
        if sample.power_w > self.limit_w and step > 0:
            step -= 1
        elif sample.power_w < self.room * self.limit_w and step + 1 < len(CLOCKS_HZ):
            step += 1
        else:
            return None
        return ClockSetting(CLOCKS_HZ[step], voltage_v(CLOCKS_HZ[step]))


def work() -> Iterator[dict[str, float]]:
    """Counters of one sample after another: arithmetic, then streaming, then arithmetic again."""
    nothing = {c.column: 0.0 for c in dialect_counters(SimulatorDialect.GPUWATTCH) if c.event}
    arithmetic = {
        "TOT_INST": 6000.0,
        "FP_INT": 6000.0,
        "IC_H": 3000.0,
        "REG_RD": 4e5,
        "REG_WR": 2e5,
        "FPU_ACC": 1.6e5,
    }
    streaming = {
        "TOT_INST": 800.0,
        "DC_RM": 900.0,
        "L2_RM": 900.0,
        "NOC_A": 2000.0,
        "MEM_RD": 250.0,
    }
    for kind, duty, count in ((arithmetic, 0.75, 20), (streaming, 0.1, 20), (arithmetic, 0.75, 20)):
        for _ in range(count):
            yield nothing | kind | {"PIPE_A": duty}


def simulate(limit_w: float | None) -> PowerMeter:
    """Run the work, with a governor or without."""
    model = build_component_model(
        read_architecture(CHIP / "architecture.xml"),
        read_energies(CHIP / "energies.yaml"),
        read_component_set(SimulatorDialect.GPUWATTCH),
    ).model
    listeners = (Governor(limit_w),) if limit_w is not None else ()
    meter = PowerMeter(
        model,
        ClockSetting(CLOCKS_HZ[-1], voltage_v(CLOCKS_HZ[-1])),
        SimulatorDialect.GPUWATTCH,
        listeners,
    )
    for counts in work():
        meter.sample(counts, CYCLES)
    return meter


def main() -> None:
    for limit_w in (None, 26.0):
        meter = simulate(limit_w)
        name = "no limit" if limit_w is None else f"{limit_w:g} W limit"
        print(
            f"{name:12s} {meter.samples} samples in {meter.time_s * 1e6:6.2f} us, "
            f"{meter.energy_j / meter.time_s:6.2f} W mean, {meter.energy_j * 1e6:7.1f} uJ"
        )


if __name__ == "__main__":
    main()
