"""Compile CUDA C at run time and launch it through NVIDIA's driver bindings.

Every call is checked, and every wait has a limit. The file also holds the spin kernel, which reads
the clock that the multiprocessors really run at.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import MissingTool, files
from wattcast.core.errors import WattcastError


class CudaError(WattcastError):
    """A CUDA or NVRTC call failed."""


def compile_cubin(
    source: str,
    architecture: str = "sm_90",
    name: str = "kernel.cu",
) -> bytes:
    """Compile CUDA C ``source`` to machine code; no GPU is needed."""
    nvrtc = import_bindings("nvrtc")
    try:
        program = _check(
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                0,
                [],
                [],
            )
        )
    except RuntimeError as error:  # the bindings look for the library at the first call
        raise MissingTool(
            f"NVRTC cannot be loaded (pip install 'wattcast[lab]'): {str(error)[:200]}"
        ) from None
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(f"{name} does not compile: {log.decode(errors='replace').strip()}")
    cubin: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def import_bindings(part: str) -> Any:
    """Import a part of NVIDIA's CUDA bindings (``nvrtc`` or ``driver``); raise ``MissingTool``
    without them.
    """
    try:
        from importlib import import_module

        return import_module(f"cuda.bindings.{part}")
    except ImportError:
        raise MissingTool(
            "NVIDIA's CUDA bindings are not installed (pip install 'wattcast[measure]')."
        ) from None


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"a CUDA call failed: {status!r}.")
    return values[0] if values else None


Bytes = npt.NDArray[np.generic]
LARGE_SHARED = 48 * 1024  # beyond this a kernel has to ask
ARGUMENT_TYPES = (*(ctypes.c_void_p,) * 4, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_int)
WAIT_S = 20.0  # no wait for the device lasts longer
# Errors of a call that leave the context whole.
BENIGN = {1, 2, 101, 200, 201, 209, 218, 222, 301, 500, 600, 701}
NOT_READY = 600
ADDRESS_ALIGNMENT = 64  # bytes, of the description of a tensor map
POLL_S = 1e-4  # between looks whether the device is done
LONGEST_NAME = 96  # bytes


class DeviceFault(CudaError):
    """An error after which this process cannot use the device any more."""


@dataclass(frozen=True)
class DeviceEvent:
    """A moment on the device's stream."""

    device: CudaDevice
    handle: Any

    def synchronize(self, longest_s: float = WAIT_S) -> None:
        """Wait until the stream has come here; a device that does not answer is a fault."""
        deadline = time.monotonic() + longest_s
        query = self.device.driver.cuEventQuery
        status = query(self.handle)[0]
        while int(status) == NOT_READY:
            if time.monotonic() > deadline:
                raise DeviceFault(f"the device was still busy after {longest_s:.0f} s.")
            time.sleep(POLL_S)
            status = query(self.handle)[0]
        self.device.check((status,), "waiting for the device")

    def elapsed_time(self, later: DeviceEvent) -> float:
        """Return the milliseconds from here to ``later``."""
        return float(self.device.call("cuEventElapsedTime", self.handle, later.handle))


@dataclass
class CudaKernel:
    """A loaded kernel."""

    module: Any
    function: Any
    name: str
    shared_byte: int


@dataclass
class CudaDevice:
    """One GPU with a context and a stream; use ``open``."""

    driver: Any
    name: str
    capability: tuple[int, int]
    sm_count: int
    l2_byte: int
    shared_byte: int  # of a block, at most
    stream: Any
    _events: list[Any] = field(default_factory=list)

    @classmethod
    def open(cls, index: int = 0) -> CudaDevice:
        """Start CUDA on a device; a clear sentence when there is none."""
        driver = import_bindings("driver")
        try:
            status = driver.cuInit(0)[0]
        except Exception as error:
            raise MissingTool(
                f"microbenchmarks need an NVIDIA GPU and its driver: {error}"
            ) from None
        if int(status) != 0:
            raise MissingTool(
                f"microbenchmarks need an NVIDIA GPU; CUDA answers {_name(driver, status)}."
            )
        device = cls(
            driver,
            "",
            (0, 0),
            0,
            0,
            0,
            0,
        )
        handle = device.call("cuDeviceGet", index)
        context = device.call("cuDevicePrimaryCtxRetain", handle)
        device.call("cuCtxSetCurrent", context)

        def read(name: str) -> int:
            attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(device.call("cuDeviceGetAttribute", attribute, handle))

        name = bytes(device.call("cuDeviceGetName", LONGEST_NAME, handle))
        device.name = name.split(b"\0")[0].decode(errors="replace")
        device.capability = read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")
        device.sm_count = read("MULTIPROCESSOR_COUNT")
        device.l2_byte = read("L2_CACHE_SIZE")
        device.shared_byte = read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        device.stream = device.call("cuStreamCreate", 1)  # not blocked by the default stream
        return device

    @property
    def architecture(self) -> str:
        """What to compile for; on 9.x with the instructions that only this architecture has."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major == 9 else ''}"

    def call(
        self,
        name: str,
        *arguments: Any,
    ) -> Any:
        """Call a driver function by name and return its value, or raise an error that names it."""
        return self.check(getattr(self.driver, name)(*arguments), name)

    def check(
        self,
        result: tuple[Any, ...],
        what: str,
    ) -> Any:
        """Return the value of a driver call's result, or raise its error."""
        status, *values = result
        code = int(status)
        if code != 0:
            kind = CudaError if code in BENIGN else DeviceFault
            raise kind(f"{what}: {_name(self.driver, status)} ({code}).")
        return values[0] if values else None

    def allocate(self, size: int) -> int:
        """Allocate device memory and return its address."""
        try:
            return int(self.call("cuMemAlloc", size))
        except CudaError as error:
            raise CudaError(
                f"{size / 2**20:.0f} MiB of device memory could not be had: {error}"
            ) from None

    def free(self, address: int) -> None:
        """Give memory back."""
        self.call("cuMemFree", address)

    def upload(
        self,
        address: int,
        values: Bytes,
    ) -> None:
        """Copy a host array to device memory."""
        values = np.ascontiguousarray(values)
        self.call("cuMemcpyHtoD", address, values.ctypes.data, values.nbytes)
        # The copy may still be under way, and our stream does not wait for it.
        self.call("cuCtxSynchronize")

    def download(
        self,
        address: int,
        count: int,
        dtype: npt.DTypeLike,
    ) -> Bytes:
        """Copy device memory to a new host array; waits for the stream first."""
        self.synchronize()
        values = np.empty(count, dtype=dtype)
        self.call("cuMemcpyDtoH", values.ctypes.data, address, values.nbytes)
        return values

    def zero(
        self,
        address: int,
        size: int,
    ) -> None:
        """Set memory to zero, on the stream."""
        self.call(
            "cuMemsetD32Async",
            address,
            0,
            size // 4,
            self.stream,
        )

    def copy(
        self,
        to: int,
        source: int,
        size: int,
    ) -> None:
        """Copy from device to device, by the driver, on the stream."""
        self.call(
            "cuMemcpyDtoDAsync",
            to,
            source,
            size,
            self.stream,
        )

    def load(
        self,
        cubin: bytes,
        name: str,
        shared_byte: int = 0,
    ) -> CudaKernel:
        """Load the kernel ``name`` of ``cubin``."""
        if shared_byte > self.shared_byte:
            raise CudaError(
                f"{name} needs {shared_byte} bytes of shared memory; a block has "
                f"{self.shared_byte}."
            )
        module = self.call("cuModuleLoadData", cubin)
        function = self.call("cuModuleGetFunction", module, name.encode())
        if shared_byte > LARGE_SHARED:
            attribute = (
                self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            )
            self.call("cuFuncSetAttribute", function, attribute, shared_byte)
        return CudaKernel(module, function, name, shared_byte)

    def unload(self, kernel: CudaKernel) -> None:
        """Forget a kernel."""
        self.call("cuModuleUnload", kernel.module)

    def resident(
        self,
        kernel: CudaKernel,
        threads: int,
    ) -> int:
        """Return the blocks of a kernel that fit on a multiprocessor at once."""
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self.call(query, kernel.function, threads, kernel.shared_byte))

    def launch(
        self,
        kernel: CudaKernel,
        blocks: int,
        threads: int,
        values: tuple[int, ...],
        types: tuple[Any, ...] = ARGUMENT_TYPES,
    ) -> None:
        """Put one launch on the stream."""
        shape = (blocks, 1, 1, threads, 1, 1, kernel.shared_byte)
        self.call(
            "cuLaunchKernel",
            kernel.function,
            *shape,
            self.stream,
            (values, types),
            0,
        )

    def mark(self) -> DeviceEvent:
        """Record an event now and return it; events are used again after ``recycle``."""
        handle = self._events.pop() if self._events else self.call("cuEventCreate", 0)
        self.call("cuEventRecord", handle, self.stream)
        return DeviceEvent(self, handle)

    def recycle(self, events: list[DeviceEvent]) -> None:
        """Take events back."""
        self._events.extend(event.handle for event in events)

    def synchronize(self, longest_s: float = WAIT_S) -> None:
        """Wait for everything on the stream."""
        event = self.mark()
        event.synchronize(longest_s)
        self.recycle([event])

    def texture(
        self,
        address: int,
        size: int,
    ) -> int:
        """Return the handle of a texture of four-word elements over linear memory."""
        driver = self.driver
        resource = driver.CUDA_RESOURCE_DESC()
        resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_LINEAR
        resource.res.linear.devPtr = driver.CUdeviceptr(address)
        resource.res.linear.format = driver.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT32
        resource.res.linear.numChannels = 4
        resource.res.linear.sizeInBytes = size
        reading = driver.CUDA_TEXTURE_DESC()
        reading.flags = 1  # read as integers
        return int(self.call("cuTexObjectCreate", resource, reading, None))

    def tensor_map(
        self,
        address: int,
        columns: int,
        rows: int,
        box_columns: int,
        box_rows: int,
    ) -> Bytes:
        """Return the 128 bytes by which the copy engine takes boxes, rows of 128 bytes, out of a
        16-bit matrix.

        In shared memory a box lies as tensor cores read it: groups of 16 bytes swizzled within 128.
        """
        driver = self.driver
        # The bindings' own descriptions do not always lie at an address that 64 divides.
        words = np.zeros(24, dtype=np.uint64)
        first_word = -words.ctypes.data // 8 % (ADDRESS_ALIGNMENT // 8)
        description = words[first_word:][:16]
        lists: list[Bytes] = [
            np.array([columns, rows], np.uint64),
            np.array([2 * columns], np.uint64),
            np.array([box_columns, box_rows], np.uint32),
            np.ones(2, np.uint32),
        ]
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        status = encode(
            ctypes.c_void_p(description.ctypes.data),
            int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
            2,
            ctypes.c_void_p(address),
            *(ctypes.c_void_p(values.ctypes.data) for values in lists),
            int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE),
            int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        self.check((driver.CUresult(status),), "cuTensorMapEncodeTiled")
        return description

    def profile(self, on: bool) -> None:
        """Tell a profiler that listens to begin or to end."""
        self.call("cuProfilerStart" if on else "cuProfilerStop")


def _name(driver: Any, status: Any) -> str:
    try:
        _, text = driver.cuGetErrorName(status)
        return bytes(text).decode() if text else str(status)
    except Exception:
        return str(status)


@dataclass(frozen=True)
class ClockSpinner:
    """A loaded spin kernel with its own stream and output."""

    driver: Any
    function: Any
    stream: Any
    out: Any

    def start(self, cycles: int) -> None:
        """Launch beside whatever runs; returns at once."""
        values = (self.out.data_ptr(), cycles)
        types = (ctypes.c_void_p, ctypes.c_ulonglong)
        shape = (1, 1, 1, 32, 1, 1, 0)
        stream = self.stream.cuda_stream
        launch = self.driver.cuLaunchKernel
        _check(
            launch(
                self.function,
                *shape,
                stream,
                (values, types),
                0,
            )
        )

    def clock_hz(self) -> float:
        """Wait for the spin to end: cycles over seconds."""
        self.stream.synchronize()
        cycles, ns = self.out.tolist()
        return float(1e9 * cycles / ns)


def make_spinner(torch: Any) -> ClockSpinner:
    """Compile and load the spin kernel for the current device."""
    major, minor = torch.cuda.get_device_capability()
    source = files("wattcast.measure").joinpath("spin.cu").read_text(encoding="utf-8")
    cubin = compile_cubin(source, f"sm_{major}{minor}", "spin.cu")
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(priority=-1)
    driver = import_bindings("driver")
    module = _check(driver.cuModuleLoadData(cubin))
    return ClockSpinner(driver, _check(driver.cuModuleGetFunction(module, b"spin")), stream, out)
