"""``gpgpusim.config``: the power options of the manual's section 4.2, the clock and the sample length.

The file is a list of command-line options, ``-name value``, with ``#`` comments; every other option passes
unread. What a file leaves out has the simulator's own default, or stays None where there is none.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from wattcast.errors import BadInput, bad_value, clip
from wattcast.files import read_bytes

MAX_CONFIG_BYTE = 1 << 20
_SAMPLE_OPTIONS = ("gpu_stat_sample_frequency", "gpu_stat_sample_freq", "gpgpu_runtime_stat")  # the last is today's
_XML_OPTIONS = ("gpuwattch_xml_file", "gpuwattach_xml_file", "accelwattch_xml_file")  # the manual spells it both ways


@dataclass(frozen=True)
class SteadyDefinition:
    """A region is steady while each sample is nearer than ``deviation_w`` to the region's mean so far."""

    deviation_w: float = 8.0
    minimum_sample: int = 4  # a region needs more than this many

    @classmethod
    def read(cls, text: str, where: str = "steady_state_definition") -> SteadyDefinition:
        """``"8:4"``: allowed deviation in watts and least number of samples."""
        deviation, colon, least = text.partition(":")
        try:
            found = cls(float(deviation), int(least))
        except ValueError:
            raise bad_value(where, "deviation:samples, such as '8:4'", text) from None
        if not (colon and 0 < found.deviation_w < 1e6 and 0 <= found.minimum_sample < 1_000_000_000):
            raise bad_value(where, "a deviation above zero and a number of samples", text)
        return found


@dataclass(frozen=True)
class SimulatorConfig:
    """What the power model needs of a simulator's configuration."""

    clock_hz: float | None = None  # core
    sm_count: int | None = None
    sample_cycle: int = 500
    power_simulation_enabled: bool = True
    power_trace_enabled: bool = True
    power_per_cycle_dump: bool = False
    steady_power_levels_enabled: bool = True
    steady: SteadyDefinition = SteadyDefinition()
    xml_file: str | None = None
    dvfs_enabled: bool = False


def read_config(path: Path) -> SimulatorConfig:
    """Read ``gpgpusim.config``; options that have nothing to do with power pass unread."""
    try:
        text = read_bytes(path, MAX_CONFIG_BYTE).decode("utf-8")
        words = shlex.split(text, comments=True)
    except UnicodeDecodeError:
        raise bad_value(path.name, "text", "bytes that are none") from None
    except ValueError as error:
        raise BadInput(f"{path.name}: a quote is left open ({error}).") from None
    options = _options(words, path.name)
    flag = _Flags(options, path.name)
    clusters, cores = flag.whole("gpgpu_n_clusters", None), flag.whole("gpgpu_n_cores_per_cluster", None)
    steady = options.get("steady_state_definition")
    return SimulatorConfig(
        clock_hz=flag.core_clock(),
        sm_count=clusters * (1 if cores is None else cores) if clusters is not None else None,
        sample_cycle=flag.sample_cycle(),
        power_simulation_enabled=flag.switch("power_simulation_enabled", False),
        power_trace_enabled=flag.switch("power_trace_enabled", False),
        power_per_cycle_dump=flag.switch("power_per_cycle_dump", False),
        steady_power_levels_enabled=flag.switch("steady_power_levels_enabled", False),
        steady=SteadyDefinition.read(steady, f"{path.name}: -steady_state_definition")
        if steady
        else SteadyDefinition(),
        xml_file=next((options[name] for name in _XML_OPTIONS if name in options), None),
        dvfs_enabled=flag.switch("dvfs_enabled", False),
    )


def _options(words: list[str], name: str) -> dict[str, str]:
    """Option -> value; the last of an option given twice counts, as in the simulator."""
    options: dict[str, str] = {}
    key = None
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            key = word.lstrip("-")
            options[key] = ""
        elif key is None:
            raise bad_value(name, "options such as '-power_simulation_enabled 1'", clip(word))
        elif not options[key]:
            options[key] = word
    return options


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Flags:
    options: dict[str, str]
    name: str

    def switch(self, option: str, default: bool) -> bool:
        text = self.options.get(option)
        if text is None:
            return default
        if text not in ("0", "1"):
            raise bad_value(f"{self.name}: -{option}", "0 or 1", text)
        return text == "1"

    def whole(self, option: str, default: int | None) -> int | None:
        text = self.options.get(option)
        if text is None:
            return default
        if not text.isdigit() or not 0 < int(text) <= 1_000_000_000:
            raise bad_value(f"{self.name}: -{option}", "a whole number above zero", text)
        return int(text)

    def sample_cycle(self) -> int:
        for option in _SAMPLE_OPTIONS:
            if option in self.options:
                head = self.options[option].partition(":")[0]  # {<freq>:<flag>}
                return _Flags({option: head}, self.name).whole(option, 500) or 500
        return 500

    def core_clock(self) -> float | None:
        text = self.options.get("gpgpu_clock_domains")
        if text is None:
            return None
        head = text.partition(":")[0]
        if not _is_number(head) or not 0 < float(head) <= 1e5:
            raise bad_value(f"{self.name}: -gpgpu_clock_domains", "core:interconnect:L2:DRAM in MHz", text)
        return float(head) * 1e6
