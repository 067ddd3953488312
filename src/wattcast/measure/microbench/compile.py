"""Compiling ahead, in processes of their own, while the device measures: ``python -m wattcast.measure.microbench.compile``.

Each worker compiles every n-th benchmark into a folder; the campaign takes machine code from there as it
comes, and compiles itself what no worker has brought in time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from wattcast.errors import WattcastError
from wattcast.measure.microbench.suite import named
from wattcast.measure.microbench.unit import Benchmark
from wattcast.measure.nvrtc import compile_cubin

PATIENCE_S = 25.0


@dataclass
class Compiled:
    """Machine code of benchmarks, from workers or from here."""

    architecture: str
    folder: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, count: int) -> None:
        """Set ``count`` workers to work."""
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        for place in range(count):
            command = [sys.executable, "-m", "wattcast.measure.microbench.compile", self.architecture]
            command += [str(self.folder), str(place), str(count)]
            self.workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def cubin(self, benchmark: Benchmark) -> bytes:
        """Machine code; waits a while for a worker that is at it."""
        path = self.folder / f"{benchmark.name}.cubin"
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists() and time.monotonic() < deadline and any(w.poll() is None for w in self.workers):
            time.sleep(0.01)
        return path.read_bytes() if path.exists() else compile_cubin(benchmark.source, self.architecture)

    def stop(self) -> None:
        """End the workers that are still at work."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(2.0)


def main() -> int:
    """The worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture")
    parser.add_argument("folder", type=Path)
    parser.add_argument("place", type=int)
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    mine = [b for b in named([]) if b.supported(options.architecture)][options.place :: options.count]
    for benchmark in mine:
        path = options.folder / f"{benchmark.name}.cubin"
        if path.exists():
            continue
        with contextlib.suppress(WattcastError):  # the campaign compiles it again and reports the error
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(compile_cubin(benchmark.source, options.architecture, f"{benchmark.name}.cu"))
            part.rename(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
