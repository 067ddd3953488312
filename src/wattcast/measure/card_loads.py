"""Measure a card by itself in half a minute: idle, copying memory, and multiplying matrices.

Nothing on the card is set, so that no privilege is needed. Clock and temperature are read beside
the watts, so that each load can be compared with its prediction at the same clock. The loads are
run by PyTorch, as the rows were that predictions were fitted to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from wattcast.core.card_figures import (
    CardFigures,
    HostPass,
    LoadFigures,
    Operator,
)
from wattcast.core.errors import (
    BadInput,
    MissingTool,
    Refused,
)
from wattcast.measure.energy_sources import DeviceIdentity
from wattcast.measure.host_timing import TOKENS, time_small_model
from wattcast.measure.sampler import Sampler
from wattcast.measure.shared_cards import describe_nvidia_sharing
from wattcast.measure.steady_state import (
    HeldLoad,
    SettlingRule,
    hold_load,
    take_window,
)

SIZE = 8192  # rows and columns of the operands of a product at full load
# a product that waits for its weights, as decoding does: 235 MB in 16 bits, more than any L2 holds
FEW_ROWS = 8
WIDTH = 28672
DEPTH = 4096
COPIED = 1 << 28  # elements: half a gigabyte read and half a gigabyte written
WEIGHTS = 4  # matrices that are used in turn, so that none is found in L2
NEEDED_BYTE = 3 << 30  # of device memory that must be free
CHUNK_S = 0.03  # of work between two events
FIRST_CALLS = 5  # from which the time of a call is estimated
LOAD_S = 4.0  # that a load lasts at least, so that the card is warm and the governor has settled
IDLE_S = 3.0
CONTEXT_S = 1.0  # after the start of CUDA, in which a card comes to rest
BF16_SINCE = (8, 0)  # the first compute capability with tensor cores for it
RULE = SettlingRule(settle_s=LOAD_S / 2, capped_settle_s=LOAD_S / 2, least_s=LOAD_S, longest_s=8.0)


class LoadRunner(Protocol):
    """A GPU that runs the loads; ``TorchLoads`` is the real one."""

    dtype: str
    uuid: str  # empty where it does not tell

    def prepare(self, name: str) -> Callable[[], None]:
        """Return what queues one call of a load."""

    def mark(self) -> Any:
        """Return an event at the end of what is queued."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def time_host(self) -> tuple[float, str]:
        """Return the seconds of a pass of the small model, and a description of it."""


def list_operators(dtype: str) -> dict[str, Operator]:
    """Return the loads by name, as operators to predict."""
    few_rows = {"m": FEW_ROWS, "n": WIDTH, "k": DEPTH}
    square = {"m": SIZE, "n": SIZE, "k": SIZE}
    return {
        "copy": {"op": "copy", "n": COPIED, "dtype": dtype},
        "product of few rows": {"op": "linear", **few_rows, "dtype": dtype},
        "product": {"op": "linear", **square, "dtype": dtype},
    }


def measure_card(
    say: Callable[[str], None],
    recognise: Callable[[str, str], object],
    open_runner: Callable[[], LoadRunner] | None = None,
) -> CardFigures:
    """Measure the first visible card: idle, three loads, and what launching costs its host.

    ``recognise`` takes its name and part number, and raises an error where nothing compares.
    """
    runner = (open_runner or TorchLoads)()
    with Sampler("nvml") as sampler:
        identity = sampler.identity
        recognise(identity.name, identity.board)
        _check_card(runner, identity)
        time.sleep(CONTEXT_S)
        say(f"{identity.name}: idle")
        idle = _watch_idle(sampler)
        loads = []
        for name, operator in list_operators(runner.dtype).items():
            say(f"{identity.name}: {name}")
            loads.append(_run_load(sampler, runner, name, operator))
    say("host: a small model whose operators are issued one by one")
    return CardFigures(
        identity.name,
        identity.uuid,
        identity.board,
        idle.ticks.power_w,
        idle.samples.mean("sm_clock_hz") or 0.0,
        idle.samples.mean("temperature_c"),
        tuple(loads),
        _time_host(runner),
    )


def _check_card(runner: LoadRunner, identity: DeviceIdentity) -> None:
    """Refuse a card that is not the one that runs the loads, or that others use."""
    told = runner.uuid.removeprefix("GPU-")
    if told and identity.uuid and told != identity.uuid.removeprefix("GPU-"):
        raise Refused(
            f"PyTorch runs on card {told}, and NVML reads {identity.uuid}: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES to one card."
        )
    reasons = tuple(filter(None, (*_list_sharing(identity.index), identity.flag)))
    if reasons:
        raise Refused(f"{identity.name} cannot be measured by itself: {'; '.join(reasons)}.")


def _list_sharing(index: int) -> tuple[str, ...]:
    """Return why the card is not this program's alone, as far as its driver tells."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the sampler's process reads it, and this one cannot
        return ()
    try:
        return describe_nvidia_sharing(pynvml, index)
    finally:
        pynvml.nvmlShutdown()


def _watch_idle(sampler: Sampler) -> Any:
    """Return the window of a card with a context and nothing to do."""
    head = sampler.head
    begin_s = time.monotonic()
    time.sleep(IDLE_S)
    sampler.check()
    return take_window(sampler.since(head), begin_s, time.monotonic(), RULE)


def _run_load(
    sampler: Sampler,
    runner: LoadRunner,
    name: str,
    operator: Operator,
) -> LoadFigures:
    """Run a load until it has settled, and return its figures."""
    queue_call = runner.prepare(name)
    calls = _count_calls(runner, queue_call)

    def queue_chunk() -> None:
        for _ in range(calls):
            queue_call()

    load = hold_load(sampler, runner, queue_chunk, RULE)
    return _read_figures(name, operator, load, calls)


def _count_calls(runner: LoadRunner, queue_call: Callable[[], None]) -> int:
    """Return how many calls make a chunk, by the time of a few; the first one warms up."""
    queue_call()
    first = runner.mark()
    for _ in range(FIRST_CALLS):
        queue_call()
    last = runner.mark()
    last.synchronize()
    call_s: float = first.elapsed_time(last) / 1e3 / FIRST_CALLS
    return max(round(CHUNK_S / max(call_s, 1e-6)), 1)


def _read_figures(
    name: str,
    operator: Operator,
    load: HeldLoad,
    calls: int,
) -> LoadFigures:
    row = load.describe(calls)
    clock_hz = row["sm_clock_hz"]
    if clock_hz is None:
        raise Refused(f"{name}: the card does not tell its clock, so no prediction compares.")
    return LoadFigures(
        name,
        operator,
        row["latency_s"],
        row["power_w"],
        clock_hz,
        row["temperature_c"],
        "sw_power_cap" in row["throttle"],
        tuple(row["flags"]),
        row["memory_power_w"],
    )


def _time_host(runner: LoadRunner) -> HostPass:
    """Return the time of a pass of a small model, or the reason why there is none."""
    try:
        seconds, words = runner.time_host()
    except Exception as error:  # of libraries that the watts do not need
        return HostPass(None, TOKENS, f"{type(error).__name__}: {error}")
    return HostPass(seconds, TOKENS, words)


class TorchLoads:
    """The loads on the first CUDA device of PyTorch."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise MissingTool("measuring a card needs PyTorch; torch is missing.") from None
        if not torch.cuda.is_available():
            raise BadInput(
                "no CUDA device here. Run `wattcast doctor --card` on the machine with the GPU, or "
                "tell predictions how your card differs: --power-factor 1.04."
            )
        self._torch = torch
        free_byte, _ = torch.cuda.mem_get_info()
        if free_byte < NEEDED_BYTE:
            needed = f"{NEEDED_BYTE / 2**30:.0f} GiB of free device memory"
            raise Refused(f"measuring a card needs {needed}; {free_byte / 2**30:.1f} GiB are free.")
        self.dtype = "bf16" if torch.cuda.get_device_capability() >= BF16_SINCE else "fp16"
        self.uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
        self._type = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        self.synchronize()  # starts the context

    def prepare(self, name: str) -> Callable[[], None]:
        """Return what queues one call of a load; the operands of the load before are given back."""
        torch = self._torch
        torch.cuda.empty_cache()
        if name == "copy":
            source = torch.randn(COPIED, device="cuda", dtype=self._type)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        operator = list_operators(self.dtype)[name]
        rows, width, depth = (operator[size] for size in ("m", "n", "k"))
        inputs = torch.randn(rows, depth, device="cuda", dtype=self._type)
        # small numbers, so that sums of 16 bits stay finite
        weights = [
            torch.randn(width, depth, device="cuda", dtype=self._type) / depth**0.5
            for _ in range(WEIGHTS)
        ]
        output = torch.empty(rows, width, device="cuda", dtype=self._type)
        place = [0]

        def multiply() -> None:
            place[0] = (place[0] + 1) % WEIGHTS
            torch.mm(inputs, weights[place[0]].t(), out=output)

        return multiply

    def mark(self) -> Any:
        """Return an event at the end of what is queued."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        self._torch.cuda.synchronize()

    def time_host(self) -> tuple[float, str]:
        """Return the seconds of a pass of GPT-2 at batch 1, and a description of it."""
        return time_small_model()
