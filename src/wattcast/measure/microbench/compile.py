"""Compiling ahead, in processes of their own (``python -m``), while the device measures.

Each worker compiles every n-th benchmark into a folder; the campaign takes machine code from there as it
comes, and compiles itself what no worker has brought in time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from wattcast.errors import WattcastError
from wattcast.measure.microbench.suite import named
from wattcast.measure.microbench.unit import Benchmark
from wattcast.measure.nvrtc import bindings, compile_cubin

PATIENCE_S = 25.0


def cache_folder() -> Path:
    """Where machine code is kept between commands on one machine; its files are named by their source."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"wattcast-cubins-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != user:
        return Path(tempfile.mkdtemp(prefix="wattcast-cubins-"))  # someone else's folder is not to be trusted
    return folder


def file_name(benchmark: Benchmark, architecture: str) -> str:
    """Name of a benchmark's machine code: other source or another compiler, another name."""
    digest = hashlib.sha256(f"{benchmark.source} {nvrtc_version()}".encode()).hexdigest()[:16]
    return f"{benchmark.name}-{architecture}-{digest}.cubin"


@cache
def nvrtc_version() -> str:
    """Of the run-time compiler."""
    try:
        status, major, minor = bindings("nvrtc").nvrtcVersion()
    except Exception:
        return ""
    return f"{major}.{minor}" if int(status) == 0 else ""


@dataclass
class Compiled:
    """Machine code of benchmarks, from workers or from here."""

    architecture: str
    folder: Path
    names: tuple[str, ...] = ()  # what workers compile; nothing named: the whole suite
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, count: int) -> None:
        """Set ``count`` workers to work."""
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        for place in range(count):
            command = [sys.executable, "-m", "wattcast.measure.microbench.compile", self.architecture]
            command += [str(self.folder), str(place), str(count), *self.names]
            self.workers.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def cubin(self, benchmark: Benchmark) -> bytes:
        """Machine code; waits a while for a worker that is at it, and compiles here what none has begun."""
        path = self.folder / file_name(benchmark, self.architecture)
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists() and claim(path).exists() and time.monotonic() < deadline:
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


def claim(path: Path) -> Path:
    """The file that says a worker is at ``path``."""
    return path.with_suffix(".claim")


def main() -> int:
    """The worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture")
    parser.add_argument("folder", type=Path)
    parser.add_argument("place", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    mine = [b for b in named(options.names) if b.supported(options.architecture)][options.place :: options.count]
    for benchmark in mine:
        path = options.folder / file_name(benchmark, options.architecture)
        if path.exists():
            continue
        with contextlib.suppress(WattcastError), _claimed(path):  # the campaign reports what does not compile
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(compile_cubin(benchmark.source, options.architecture, f"{benchmark.name}.cu"))
            part.rename(path)
    return 0


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    claim(path).touch()
    try:
        yield
    finally:
        claim(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
