"""Compile microbenchmarks in worker processes while the device measures.

Each worker compiles every n-th benchmark into a folder. The campaign takes machine code from there as it arrives,
and compiles what no worker has brought in time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from wattcast.core.errors import WattcastError
from wattcast.core.whole_files import private_cache, write_whole
from wattcast.measure.cuda_device import compile_cubin, import_bindings
from wattcast.measure.sampler import make_child_environment
from wattcast.microbench.benchmark_suite import find_benchmarks
from wattcast.microbench.unit_source import Benchmark

PATIENCE_S = 25.0
WORKERS = 6


def cache_folder() -> Path:
    """Return the folder that keeps machine code between commands; its files are named by their source."""
    return private_cache("cubins")


def worker_count() -> int:
    """Return how many compiling processes leave the measuring ones alone."""
    return min(WORKERS, max((os.cpu_count() or 2) - 2, 1))


def cubin_name(benchmark: Benchmark, architecture: str) -> str:
    """Name a benchmark's machine code by its source and the compiler's version."""
    digest = hashlib.sha256(f"{benchmark.source} {nvrtc_version()}".encode()).hexdigest()[:16]
    return f"{benchmark.name}-{architecture}-{digest}.cubin"


@cache
def nvrtc_version() -> str:
    """Return the version of the run-time compiler."""
    try:
        status, major, minor = import_bindings("nvrtc").nvrtcVersion()
    except Exception:
        return ""
    return f"{major}.{minor}" if int(status) == 0 else ""


@dataclass
class CompiledKernels:
    """Machine code of benchmarks, from workers or from here."""

    architecture: str
    folder: Path
    names: tuple[str, ...] = ()  # what workers compile; nothing named: the whole suite
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, count: int) -> None:
        """Set ``count`` workers to work."""
        environment = make_child_environment()
        for place in range(count):
            command = [sys.executable, "-m", "wattcast.microbench.compile_ahead", self.architecture]
            command += [str(self.folder), str(place), str(count), *self.names]
            self.workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def cubin(self, benchmark: Benchmark) -> bytes:
        """Machine code; waits a while for a worker that is at it, and compiles here what none has begun."""
        path = self.folder / cubin_name(benchmark, self.architecture)
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists() and claim_path(path).exists() and time.monotonic() < deadline:
            if all(worker.poll() is not None for worker in self.workers):
                break
            time.sleep(0.01)
        return path.read_bytes() if path.exists() else compile_cubin(benchmark.source, self.architecture)

    def finish(self, longest_s: float) -> None:
        """Wait for the workers."""
        deadline = time.monotonic() + longest_s
        while any(w.poll() is None for w in self.workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stop()

    def stop(self) -> None:
        """End the workers that are still at work."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(2.0)


def claim_path(path: Path) -> Path:
    """Return the file that shows that a worker compiles ``path``."""
    return path.with_suffix(".claim")


def main() -> int:
    """Compile this worker's share of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture")
    parser.add_argument("folder", type=Path)
    parser.add_argument("place", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    supported = [b for b in find_benchmarks(options.names) if b.supported(options.architecture)]
    for benchmark in supported[options.place :: options.count]:
        path = options.folder / cubin_name(benchmark, options.architecture)
        if path.exists():
            continue
        claim_path(path).touch()
        try:
            write_whole(path, compile_cubin(benchmark.source, options.architecture, f"{benchmark.name}.cu"))
        except WattcastError:
            pass  # the campaign reports what does not compile
        finally:
            claim_path(path).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
