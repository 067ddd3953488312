"""Measure a card for a quarter of an hour, without privileges, and write one file.

The kit runs products of the sizes that language models have, from one token to thousands, and
passes over memory, through PyTorch: NVIDIA, AMD (ROCm) and Jetson alike. Each operator is timed in
a burst, and then runs for some seconds while power is read: from the energy counter where the card
has one, else from its sensor. The file has what ran, board, driver and versions, and whether the
card was a part of one or shared; ``wattcast calibrate --table FILE`` takes it. Nothing here changes
a clock, a limit or a mode.
"""

from __future__ import annotations

import gzip
import json
import math
import platform
import threading
import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    asdict,
    dataclass,
    field,
    replace,
)
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wattcast import __version__
from wattcast.calibrate.kit_files import KIT_FORMAT
from wattcast.core.measured_rows import (
    KernelRow,
    RowKind,
    RunInfo,
)
from wattcast.core.whole_files import write_whole
from wattcast.lab.campaigns.campaign_engine import import_cuda_torch
from wattcast.measure.energy_sources import EnergySource, open_source
from wattcast.measure.shared_cards import describe_sharing
from wattcast.measure.steady_state import make_run_name, say

# outputs and inputs of linear layers, of models of 0.5 to 70 billion parameters
_SIDES = ((1024, 1024), (2048, 2048), (6144, 4096), (4096, 14336), (10240, 8192), (8192, 28672))
_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_PASSES = tuple(1 << power for power in range(14, 28, 2))  # values of an elementwise operator
_BURST_S = 0.03
_SUSTAINED_S = 2.0
_SETTLING_S = 0.5  # of a sustained run, before its power counts
_IDLE_S = 5.0
_SUSTAINED_SHARE = 3  # one operator in so many also runs sustained, and all long ones
_LONG_S = 1e-4
_MOST_MEMORY = 0.2  # of the card's, that one operator takes
_POLL_S = 0.02


class KitDevice(Protocol):
    """What the kit needs of a card: operators that run, and their time."""

    dtype: str
    memory_byte: float

    def build(self, operator: Mapping[str, Any]) -> Callable[[], None]:
        """Return what runs an operator some times, without the host in between."""

    def calls(self) -> int:
        """Return how often what was built last runs its operator."""

    def time_s(
        self,
        run: Callable[[], None],
        times: int,
    ) -> float:
        """Return the seconds that ``times`` runs take one after another."""

    def describe(self) -> dict[str, str]:
        """Return the versions of the libraries."""


@dataclass
class PowerReader:
    """Mean watts and clock of a card over a stretch of time, by counter or by polling."""

    source: EnergySource
    clock_hz: float = math.nan
    _stop: threading.Event = field(default_factory=threading.Event)
    _watts: list[float] = field(default_factory=list)
    _clocks: list[float] = field(default_factory=list)

    def measure(self, run: Callable[[], None]) -> float:
        """Run and return the mean watts meanwhile; NaN where the card tells none."""
        self._stop = threading.Event()
        self._watts = []
        self._clocks = []
        poller = threading.Thread(target=self._poll, daemon=True)
        began_j = self.source.energy_j()
        began_s = time.monotonic()
        poller.start()
        run()
        seconds = time.monotonic() - began_s
        energy_j = self.source.energy_j() - began_j
        self._stop.set()
        poller.join()
        self.clock_hz = float(np.mean(self._clocks)) if self._clocks else math.nan
        if math.isfinite(energy_j) and energy_j > 0.0:
            return energy_j / seconds
        watts = [value for value in self._watts if math.isfinite(value)]
        return float(np.mean(watts)) if watts else math.nan

    def _poll(self) -> None:
        while not self._stop.is_set():
            slow = self.source.slow()
            is_instant = math.isfinite(slow.instant_w)
            self._watts.append(slow.instant_w if is_instant else slow.average_w)
            self._clocks.append(self.source.sm_clock_hz())
            self._stop.wait(_POLL_S)


@dataclass
class _Kit:
    """One run of the kit: its card, its rows, and when to stop."""

    device: KitDevice
    reader: PowerReader
    run: str
    deadline_s: float
    rows: list[KernelRow] = field(default_factory=list)


def measure_card(
    out: Path,
    budget_s: float,
    few: int = 0,
) -> dict[str, int]:
    """Measure the card that PyTorch sees and write the kit's file."""
    device = TorchKitDevice(import_cuda_torch("the kit"))
    source, identity = open_source("auto")
    run = make_run_name()
    reasons = tuple(
        item for item in (identity.flag, *describe_sharing(source, identity.index)) if item
    )
    for reason in reasons:
        say(f"shared: {reason}")
    versions = device.describe()
    info = RunInfo(
        run=run,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        card_name=identity.name,
        card_uuid=identity.uuid,
        card_board=identity.board,
        driver=identity.driver,
        power_limit_w=identity.power_limit_w,
        top_clock_hz=identity.top_clock_hz,
        wattcast=__version__,
        torch=versions.get("torch", ""),
        cuda=versions.get("cuda", ""),
    )
    try:
        rows = run_kit(
            device,
            PowerReader(source),
            run,
            budget_s,
            few,
        )
    finally:
        source.close()
    write_kit(out, info, rows, reasons)
    return {
        "bursts": sum(row.kind == RowKind.BURST for row in rows),
        "sustained": sum(row.kind == RowKind.SUSTAINED for row in rows),
        "reasons that the card was shared": len(reasons),
    }


def run_kit(
    device: KitDevice,
    reader: PowerReader,
    run: str,
    budget_s: float,
    few: int = 0,
) -> list[KernelRow]:
    """Measure idle power and every operator of the plan, as far as the time goes."""
    kit = _Kit(device, reader, run, time.monotonic() + budget_s)
    idle_s = 0.2 if few else _IDLE_S
    idle_w = reader.measure(lambda: time.sleep(idle_s))
    idle = KernelRow(
        id="idle",
        kind=RowKind.IDLE,
        family="idle",
        operator={},
        run=run,
    )
    kit.rows.append(replace(idle, power_w=_known(idle_w), sm_clock_hz=_known(reader.clock_hz)))
    plan = list_operators(device.dtype, device.memory_byte)
    for place, operator in enumerate(plan[:few] if few else plan):
        if time.monotonic() > kit.deadline_s:
            say(f"time is up after {place} of {len(plan)} operators")
            break
        _measure_operator(kit, operator, place, 0.2 if few else _SUSTAINED_S)
    return kit.rows


def list_operators(dtype: str, memory_byte: float) -> list[dict[str, Any]]:
    """Return the operators of the plan that fit, short and long ones mixed."""
    operators: list[dict[str, Any]] = []
    for n, k in _SIDES:
        for m in _TOKENS:
            product = {
                "op": "linear",
                "m": m,
                "n": n,
                "k": k,
                "bias": False,
                "dtype": dtype,
            }
            operators.append(product)
    add = {
        "op": "elementwise",
        "function": "add",
        "dtype": dtype,
    }
    operators += [{**add, "n": values} for values in _PASSES]
    fitting = [item for item in operators if _footprint_byte(item) < _MOST_MEMORY * memory_byte]
    # so that a run that is broken off has met every size
    order = np.random.default_rng(0).permutation(len(fitting))
    return [fitting[place] for place in order]


def _footprint_byte(operator: Mapping[str, Any]) -> float:
    if operator["op"] == "elementwise":
        return 6.0 * float(operator["n"])
    m, n, k = (float(operator[name]) for name in "mnk")
    return 2.0 * (m * k + n * k + m * n)


def _measure_operator(
    kit: _Kit,
    operator: dict[str, Any],
    place: int,
    sustained_s: float,
) -> None:
    """Add a burst row of an operator and, of some, a sustained one; what fails is noted."""
    sizes = "-".join(str(operator[name]) for name in ("m", "n", "k") if name in operator)
    family = operator["op"]
    blank = KernelRow(
        id=f"{family}-{sizes}-{operator['dtype']}",
        kind=RowKind.BURST,
        family=family,
        operator=operator,
        layout="nt" if family == "linear" else "contiguous",
        detail={} if family == "linear" else {"form": "contiguous", "rows": 1},
        rotated="weights" if family == "linear" else "all",
        run=kit.run,
    )
    try:
        run = kit.device.build(operator)
        calls = kit.device.calls()
        once_s = kit.device.time_s(run, 2) / 2.0
        times = max(round(_BURST_S / once_s), 1)
        latency_s = kit.device.time_s(run, times) / (times * calls)
        kit.rows.append(
            replace(
                blank,
                latency_s=latency_s,
                copies=calls,
                replays=times,
            )
        )
        if latency_s < _LONG_S and place % _SUSTAINED_SHARE:
            return
        kit.device.time_s(run, max(round(min(_SETTLING_S, sustained_s) / once_s), 1))
        times = max(round(sustained_s / once_s), 1)
        took_s = [0.0]

        def run_sustained() -> None:
            took_s[0] = kit.device.time_s(run, times)

        power_w = kit.reader.measure(run_sustained)
    except Exception as error:  # of a library that has no such kernel, or of the card
        kit.rows.append(replace(blank, error=f"{type(error).__name__}: {error}"[:300]))
        return
    sustained = replace(
        blank,
        id=f"sustained-{blank.id}",
        kind=RowKind.SUSTAINED,
        latency_s=took_s[0] / (times * calls),
        power_w=_known(power_w),
        sm_clock_hz=_known(kit.reader.clock_hz),
        duration_s=took_s[0],
    )
    kit.rows.append(sustained)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_kit(
    out: Path,
    info: RunInfo,
    rows: Sequence[KernelRow],
    shared: Sequence[str],
) -> None:
    """Write the kit's file: a compressed JSON document."""
    plain = {
        "format": KIT_FORMAT,
        "run": asdict(info),
        "host": {"machine": platform.machine(), "system": platform.platform()},
        "shared": list(shared),
        "rows": [asdict(row) for row in rows],
    }
    write_whole(out, gzip.compress(json.dumps(plain).encode()))


class TorchKitDevice:
    """The card that PyTorch sees, by CUDA or by ROCm, which answers to the same names."""

    _CALLS = 20
    _MOST_SETS = 64

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.set_grad_enabled(False)
        properties = torch.cuda.get_device_properties(0)
        self.memory_byte = float(properties.total_memory)
        self._l2_byte = float(getattr(properties, "L2_cache_size", 0) or 64e6)
        self.dtype = "bf16" if torch.cuda.is_bf16_supported() else "fp16"

    def build(self, operator: Mapping[str, Any]) -> Callable[[], None]:
        torch = self._torch
        form = torch.bfloat16 if operator["dtype"] == "bf16" else torch.float16
        if operator["op"] == "linear":
            m = operator["m"]
            n = operator["n"]
            k = operator["k"]
            sets = int(min(max(2.0 * self._l2_byte / (2.0 * n * k), 1), self._MOST_SETS)) + 1
            tokens = torch.randn(m, k, device="cuda", dtype=form)
            weights = [torch.randn(n, k, device="cuda", dtype=form) for _ in range(sets)]

            def call(copy: int) -> None:
                torch.nn.functional.linear(tokens, weights[copy % sets])
        else:
            values = operator["n"]
            sets = int(min(max(2.0 * self._l2_byte / (6.0 * values), 1), self._MOST_SETS)) + 1
            pairs = []
            for _ in range(sets):
                first = torch.randn(values, device="cuda", dtype=form)
                second = torch.randn(values, device="cuda", dtype=form)
                pairs.append((first, second))

            def call(copy: int) -> None:
                torch.add(*pairs[copy % sets])

        for copy in range(2):
            call(copy)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in range(self._CALLS):
                call(copy)
        replay: Callable[[], None] = graph.replay
        return replay

    def calls(self) -> int:
        return self._CALLS

    def time_s(
        self,
        run: Callable[[], None],
        times: int,
    ) -> float:
        torch = self._torch
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end))

    def describe(self) -> dict[str, str]:
        version = self._torch.version
        toolkit = version.cuda or getattr(version, "hip", None) or ""
        return {"torch": str(self._torch.__version__), "cuda": str(toolkit)}
