"""The index arithmetic of streaming kernels, run on the host: the very text that the kernels
contain.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from wattcast.lab.microbench.benchmark_kernels import DeviceBuffers
from wattcast.lab.microbench.benchmark_suite import find_benchmarks, list_benchmarks
from wattcast.lab.microbench.microbench_results import micro_row_id
from wattcast.lab.microbench.unit_source import Benchmark, write_piece

SMS, L2_BYTE, DRAM_BYTE = 132, 62914560, 4 << 30  # of the H200 that measured
CHUNK = re.compile(r"(\w+)_chunks = \(unsigned\)\(bytes / (\d+)ull\)")
PROGRAM = r"""
#include <stdio.h>
typedef unsigned long long u64;
static struct { unsigned x; } blockIdx, gridDim, threadIdx;
int main(void)
{
  u64 wrong = 0, farthest = 0, touched = 0;
  unsigned char *const buffer = (unsigned char *)1048576;
  const u64 bytes = %(bytes)dull;
  gridDim.x = %(blocks)du;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    %(walk)s
    for (int iteration = 0; iteration < %(iterations)d; ++iteration) {
      const u64 end = (u64)(%(p)s_at - buffer) + %(chunk)dull;
      wrong += end > bytes; if (end > farthest) farthest = end;
      touched |= 1ull << (%(p)s_k %% 64u);
      %(go)s
    }
  }
  printf("%%llu %%llu\n", wrong, farthest);
  return 0;
}
"""


def walkers() -> list[Benchmark]:
    """Benchmarks whose reported or last unit walks through a buffer."""
    return [b for b in list_benchmarks() if any(CHUNK.search(unit.declare) for unit, _ in b.parts)]


def emulate(
    folder: Path,
    p: str,
    chunk: int,
    blocks: int,
    size: int,
    iterations: int,
    text: str | None = None,
) -> list[int]:
    """Steps beyond the buffer and the farthest byte, of all blocks."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    values = {"p": p, "chunk": chunk, "blocks": blocks, "bytes": size, "iterations": iterations}
    values["walk"] = write_piece("walk.declare", p, buffer="buffer", chunk=chunk, place="0u")
    values["go"] = text or write_piece("walk.advance", p, chunk=chunk)
    (folder / "walk.c").write_text(PROGRAM % values)
    subprocess.run(
        [compiler, "-O1", "-o", str(folder / "walk"), str(folder / "walk.c")], check=True
    )
    done = subprocess.run([str(folder / "walk")], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def shape(benchmark: Benchmark) -> tuple[str, int, int, int]:
    """Prefix, chunk, blocks and bytes on an H200."""
    unit = next(unit for unit, _ in benchmark.parts if CHUNK.search(unit.declare))
    found = CHUNK.search(unit.declare)
    assert found is not None
    device = type("Device", (), {"l2_byte": L2_BYTE})()
    blocks = max(round(benchmark.share * SMS), 1) * benchmark.blocks_per_sm * benchmark.turns
    size = DeviceBuffers(device, 0, 0, 0, 0, DRAM_BYTE).working_set_byte(
        benchmark.working_set, blocks
    )
    return found[1], int(found[2]), blocks, size


def test_every_walk_stays_inside_its_buffer(tmp_path: Path) -> None:
    """2,000 iterations of every shape. The first round's L2 kernels left their buffer: see below."""
    shapes = {shape(b)[1:] for b in walkers()}
    assert len(shapes) > 8
    assert {size for _, _, size in shapes} == {1 << 20, 15728640, DRAM_BYTE}
    for chunk, blocks, size in sorted(shapes):
        assert emulate(tmp_path, "x", chunk, blocks, size, 2000)[0] == 0


@pytest.mark.parametrize("name", ["l2_read", "l2_write", "dram_copy", "async_copy_l2"])
def test_the_kernels_contain_what_is_emulated(name: str) -> None:
    (benchmark,) = find_benchmarks([name])
    p, chunk, _, _ = shape(benchmark)
    assert write_piece("walk.advance", p, chunk=chunk) in benchmark.unit.advance
    assert f"{p}_step = gridDim.x % {p}_chunks" in benchmark.source
    assert f"{p}_k = blockIdx.x % {p}_chunks" in benchmark.source


def test_a_grid_larger_than_the_buffers_chunks_used_to_run_away(tmp_path: Path) -> None:
    """Of 240 chunks and 264 blocks: going on by the whole grid and taking the count off once gained
    24 each time.

    l2_write, with 120 chunks, met an illegal address; l2_read slid through 3 GB and was taken for
    an L2 row."""
    old = "x_k += gridDim.x; if (x_k >= x_chunks) x_k -= x_chunks; x_at = x_base + (u64)x_k * 65536ull;"
    wrong, farthest = emulate(tmp_path, "x", 65536, 264, 15728640, 2041, old)
    assert wrong > 0
    assert farthest > 3e9
    assert emulate(tmp_path, "x", 65536, 264, 15728640, 2041) == [0, 15728640]


LATER = ("bulk", "tile", "multicast")  # written when blocks stayed inside their buffers


def test_mended_kernels_have_ids_of_their_own() -> None:
    """What an older kernel measured stays on file and is not taken for the new one's."""
    assert micro_row_id("fp32_fma", 0) == "fp32_fma"
    assert micro_row_id("fp32_fma", 1) == "fp32_fma-r1"
    assert micro_row_id("fp32_fma", 1, version=2) == "fp32_fma-v2-r1"
    mended = {b.name for b in list_benchmarks() if b.version > 1}
    assert {
        "fp32_fma",
        "fp64_fma",
        "l2_read",
        "l2_write",
        "l1_write",
        "async_copy_dram",
        "occupancy_64",
    } <= mended
    assert {
        b.name for b in walkers() if b.working_set == "l2" and not b.name.startswith(LATER)
    } <= mended
