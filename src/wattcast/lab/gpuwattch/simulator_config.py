"""The options of ``gpgpusim.config`` that the component model needs.

Clock, SMs, the length of a sample and which of the simulator's files are switched on. Options that
have nothing to do with power pass unread."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
)
from wattcast.core.strict_files import decode_text, read_bytes
from wattcast.lab.gpuwattch.architecture import parse_number

MAX_SIMULATOR_CONFIG_BYTE = 1 << 20
_WRITE_BACK_STAGE = 10  # EX_WB in -gpgpu_pipeline_widths
_LARGEST_NUMBER = 1_000_000_000
_HIGHEST_MHZ = 1e5
# The length of a sample has changed its name; the last of these is today's
_SAMPLE_OPTIONS = (
    "gpu_stat_sample_frequency",
    "gpu_stat_sample_freq",
    "gpgpu_runtime_stat",
)


@dataclass(frozen=True)
class SteadyStateDefinition:
    """A region is steady while each sample is nearer than ``deviation_w`` to the region's mean so
    far.
    """

    deviation_w: float = 8.0
    minimum_sample: int = 4  # a region needs more than this many

    @classmethod
    def read(
        cls,
        text: str,
        where: str = "steady_state_definition",
    ) -> SteadyStateDefinition:
        """Read ``"8:4"``: the allowed deviation in watts and the least number of samples."""
        deviation, colon, least = text.partition(":")
        try:
            definition = cls(float(deviation), int(least))
        except ValueError:
            raise bad_value(where, "deviation:samples, such as '8:4'", text) from None
        deviation_fits = 0 < definition.deviation_w < 1e6
        samples_fit = 0 <= definition.minimum_sample < _LARGEST_NUMBER
        if not (colon and deviation_fits and samples_fit):
            raise bad_value(where, "a deviation above zero and a number of samples", text)
        return definition


@dataclass(frozen=True)
class SimulatorConfig:
    """The options of a simulator's configuration that the power model needs."""

    clock_hz: float | None = None  # core
    sm_count: int | None = None
    sample_cycle: int = 500
    power_simulation_enabled: bool = True
    power_trace_enabled: bool = True
    power_per_cycle_dump: bool = False
    steady_power_levels_enabled: bool = True
    steady: SteadyStateDefinition = SteadyStateDefinition()
    # warps that an SM can write back in a cycle, where only active lanes count
    commit_width: int | None = None
    schedulers: int | None = None  # of an SM


def read_simulator_config(path: Path) -> SimulatorConfig:
    """Read ``gpgpusim.config``; options that have nothing to do with power pass unread."""
    text = decode_text(read_bytes(path, MAX_SIMULATOR_CONFIG_BYTE), path.name)
    options = _ConfigOptions(path.name, _split_options(text, path.name))
    switches = {
        item.name: options.read_switch(item.name)
        for item in fields(SimulatorConfig)
        if item.type == "bool"
    }
    return SimulatorConfig(
        clock_hz=options.read_core_clock_hz(),
        sm_count=options.read_sm_count(),
        sample_cycle=options.read_sample_cycle(),
        steady=options.read_steady_state(),
        commit_width=options.read_commit_width(),
        schedulers=options.read_schedulers(),
        **switches,
    )


def _split_options(text: str, where: str) -> dict[str, str]:
    """Return the first word after each option; of an option given twice the last one counts, as in
    the simulator.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(f"{where}: a quote is left open ({error}).") from None
    options: dict[str, str] = {}
    option = None
    for word in words:
        is_negative_number = word[1:2].isdigit()
        if word.startswith("-") and not is_negative_number:
            option = word.lstrip("-")
            options[option] = ""
        elif option is None:
            raise bad_value(where, "options such as '-power_simulation_enabled 1'", clip_text(word))
        elif not options[option]:
            options[option] = word
    return options


@dataclass(frozen=True)
class _ConfigOptions:
    """The options of a file by name, which are read and checked one by one."""

    where: str
    texts: dict[str, str]

    def read_switch(self, option: str) -> bool:
        text = self.texts.get(option, "0")
        if text not in ("0", "1"):
            raise bad_value(f"{self.where}: -{option}", "0 or 1", text)
        return text == "1"

    def read_core_clock_hz(self) -> float | None:
        domains = self.texts.get("gpgpu_clock_domains")
        if domains is None:
            return None
        core_mhz = parse_number(domains.partition(":")[0])
        if core_mhz is None or not 0 < core_mhz <= _HIGHEST_MHZ:
            where = f"{self.where}: -gpgpu_clock_domains"
            raise bad_value(where, "core:interconnect:L2:DRAM in MHz", domains)
        return core_mhz * 1e6

    def read_sm_count(self) -> int | None:
        if "gpgpu_n_clusters" not in self.texts:
            return None
        clusters = self._read_count("gpgpu_n_clusters")
        return clusters * self._read_count("gpgpu_n_cores_per_cluster")

    def read_schedulers(self) -> int | None:
        if "gpgpu_num_sched_per_core" not in self.texts:
            return None
        return self._read_count("gpgpu_num_sched_per_core")

    def read_sample_cycle(self) -> int:
        for option in _SAMPLE_OPTIONS:
            if option in self.texts:
                return self._read_count(option)
        return SimulatorConfig.sample_cycle

    def read_steady_state(self) -> SteadyStateDefinition:
        text = self.texts.get("steady_state_definition") or "8:4"
        return SteadyStateDefinition.read(text, f"{self.where}: -steady_state_definition")

    def read_commit_width(self) -> int | None:
        """Return the warps written back a cycle, where the clock of idle lanes is gated."""
        widths = self.texts.get("gpgpu_pipeline_widths", "").split(",")
        if self.texts.get("gpgpu_clock_gated_lanes") != "1" or len(widths) <= _WRITE_BACK_STAGE:
            return None
        width = widths[_WRITE_BACK_STAGE].strip()
        if not width.isdigit() or int(width) == 0:
            return None
        return int(width)

    def _read_count(self, option: str) -> int:
        """Return a whole number above zero, 1 where the option is left out."""
        text = self.texts.get(option, "1")
        if option in _SAMPLE_OPTIONS:
            text = text.partition(":")[0]  # {<freq>:<flag>}
        if not text.isdigit() or not 0 < int(text) <= _LARGEST_NUMBER:
            raise bad_value(f"{self.where}: -{option}", "a whole number above zero", text)
        return int(text)
