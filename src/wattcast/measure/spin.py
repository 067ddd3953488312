"""The clock the multiprocessors really run at: one block counts its own cycles against a wall timer.

Under tensor-core load the hardware runs slower than the clock NVML reports. One
warp spins for a number of cycles on a second stream beside the load and reads the cycle counter and
the nanosecond timer at both ends. It takes a slot of one multiprocessor away, so it serves for the
clock, never for the load's time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from wattcast.measure.nvrtc import Kernel, compile_cubin, load

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long *out, unsigned long long cycles)
{
    if (threadIdx.x != 0) return;
    unsigned long long begin_ns, end_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin_ns) :: "memory");
    unsigned long long begin = clock64(), now = begin;
    while (now - begin < cycles) { __nanosleep(2000); now = clock64(); }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end_ns) :: "memory");
    now = clock64();
    out[0] = now - begin;
    out[1] = end_ns - begin_ns;
}
"""


@dataclass(frozen=True)
class Spinner:
    """A loaded spin kernel with its own stream and output."""

    torch: Any
    kernel: Kernel
    stream: Any
    out: Any

    def start(self, cycles: int) -> None:
        """Launch beside whatever runs; returns at once."""
        arguments = (self.out.data_ptr(), cycles), (ctypes.c_void_p, ctypes.c_ulonglong)
        self.kernel.launch(self.stream.cuda_stream, 1, 32, arguments)

    def clock_hz(self) -> float:
        """Wait for the spin to end: cycles over seconds."""
        self.stream.synchronize()
        cycles, ns = self.out.tolist()
        return float(1e9 * cycles / ns)


def spinner(torch: Any, architecture: str = "") -> Spinner:
    """Compile and load the spin kernel for the current device."""
    major, minor = torch.cuda.get_device_capability()
    cubin = compile_cubin(SOURCE, architecture or f"sm_{major}{minor}", "spin.cu")
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(priority=-1)
    return Spinner(torch, load(cubin, "spin"), stream, out)
