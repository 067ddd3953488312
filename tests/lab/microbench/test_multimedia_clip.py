"""The multimedia kernels against NumPy, compiled for the host; the campaign on a stand-in GPU."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from stand_in_machine import compiled

from wattcast.lab.microbench import multimedia_clip
from wattcast.lab.microbench.multimedia_clip import DCTS, NAMES, read_kernel_source

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "architecture", ["sm_90a", *(pytest.param(a, marks=SLOW) for a in ("sm_80", "sm_100"))]
)
def test_the_kernels_compile(architecture: str) -> None:
    assert compiled(read_kernel_source(), architecture).startswith(b"\x7fELF")


FEW = (
    "rotate",
    "motion",
    "debarrel",
    "dct_fp32_cached",
)  # the other DCTs are the same source with another type


@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=SLOW)], ids=["few", "all"])
def test_every_workload_equals_numpy(machine, names: tuple[str, ...]) -> None:
    """The same source that runs on the GPU, thread by thread on the host; a wrong one is noticed."""
    text = (
        "from wattcast.measure.cuda_device import CudaDevice\n"
        "from wattcast.lab.microbench.multimedia_clip import ClipCheckFailed, MediaClip\n"
        "clip = MediaClip.make(CudaDevice.open(), 2)\n"
        f"for name in {names!r}:\n"
        "    try: print(name, clip.check(name))\n"
        "    except ClipCheckFailed as error: print(error)\n"
    )
    done = machine.python(text, STANDIN_CUDA_WRONG="media_debarrel")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith("passed")] == [
        f"{n} passed" for n in names if n != "debarrel"
    ]
    assert any(re.search(r"debarrel: \d+ pixels .* differ from NumPy", line) for line in lines)


@SLOW
def test_the_campaign_measures_every_variant(machine, tmp_path: Path, rows) -> None:
    out = tmp_path / "out"
    done = machine.measure(
        "multimedia", "--out", str(out), "--frames", "3", "--quick", "--budget", "150s"
    )
    assert done.returncode == 0, done.stderr
    found = {row["id"]: row for row in rows(out / "multimedia.jsonl")}
    assert not [row for row in found.values() if row.get("error")]
    assert {"rotate", "motion", "debarrel", "move_frames", *DCTS} <= set(found)
    assert {f"{name}_at_rate" for name in DCTS} <= set(found)
    assert "threads" not in found["move_frames"]  # no kernel
    assert found["dct_fp32_cached"]["checked"] == "passed"
    assert found["dct_fp32_cached_at_rate"]["at"] > found["dct_fp32_cached"]["launch_s"]


def test_a_rotation_by_nothing_changes_nothing_and_a_quarter_turn_moves_the_middle() -> None:
    frame = multimedia_clip.draw_frame(0)
    assert np.array_equal(multimedia_clip.rotate_frame(frame, 65536, 0), frame)
    turned = multimedia_clip.rotate_frame(frame, 0, 65536)[: multimedia_clip.LUMA].reshape(
        multimedia_clip.HEIGHT, multimedia_clip.WIDTH
    )
    luma = frame[: multimedia_clip.LUMA].reshape(multimedia_clip.HEIGHT, multimedia_clip.WIDTH)
    assert turned[540 + 100, 960 + 50] == luma[540 - 50, 960 + 100]


def test_motion_search_finds_the_pan() -> None:
    """The scene moves by (2, 1) a frame, so a block is found at (2, 1) in the frame before."""
    blocks = np.arange(60 * multimedia_clip.BLOCKS_X + 5, 60 * multimedia_clip.BLOCKS_X + 85)
    found = multimedia_clip.search_motion(
        multimedia_clip.draw_frame(1), multimedia_clip.draw_frame(0), blocks
    )
    right = (found[:, 0] == 2) & (found[:, 1] == 1)
    assert right.mean() > 0.5  # a diamond search may stop at a nearer match
    assert (found[right][:, 2] == 0).all()


def test_dct_coefficients_keep_the_energy_of_a_block() -> None:
    table = multimedia_clip.make_cosines()
    assert np.allclose(table @ table.T, np.eye(8), atol=1e-12)
    frame = np.full(multimedia_clip.FRAME_BYTE, 200, dtype=np.uint8)
    out = multimedia_clip.transform_blocks(frame)
    assert out[:, 0, 0] == pytest.approx(8 * 72.0)
    assert abs(out[:, 1:, :]).max() < 1e-9


def test_the_barrel_map_keeps_the_middle_and_blackens_the_corner() -> None:
    where = multimedia_clip.make_barrel_map()
    middle = 540 * multimedia_clip.WIDTH + 960
    assert where[middle] == middle
    assert where[0] == -1
    frame = multimedia_clip.draw_frame(0)
    assert multimedia_clip.debarrel_frame(frame, where)[0] == 16
