"""Instructions of profiled kernels, as ncu's source page has them, and where their warps wait."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from judge_full_set import MEASURED
from wattcast.core.errors import BadInput, ExitCode
from wattcast.lab.microbench.source_page import SourceLine, find_hot_lines, read_source_page

FOLDER = MEASURED["ninth"]
WARPS = 16777216 / 32


def unpack(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_bytes(gzip.decompress((FOLDER / f"{name}.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("before_source.csv", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def kernels(page: Path) -> dict[str, tuple[SourceLine, ...]]:
    return read_source_page(page)


def test_every_kernel_has_its_instructions_and_their_counts(
    kernels: dict[str, tuple[SourceLine, ...]],
) -> None:
    assert len(kernels) == 21
    rounded = [line for line in kernels["periodic__before"] if line.instruction.startswith("FRND")]
    assert len(rounded) == 32  # two of each of sixteen neighbours
    assert {line.executed for line in rounded} == {WARPS}
    assert [line.place for line in kernels["julia"]] == list(range(len(kernels["julia"])))


def test_warps_wait_where_the_bottleneck_is(kernels: dict[str, tuple[SourceLine, ...]]) -> None:
    """Rounding waits for the special unit's queue, a scan at barriers, a walk for memory."""
    hot = find_hot_lines(kernels)
    first = {}
    for line in hot:
        first.setdefault(line.kernel, line)
    assert first["periodic__before"].line.instruction.startswith("FRND")
    assert "special unit" in first["periodic__before"].line.reason
    assert first["gemv__before"].line.reason == "memory"
    assert {line.line.reason for line in hot if line.kernel == "weather__before"} <= {
        "instructions"
    }
    assert "a barrier" in {line.line.reason for line in hot if line.kernel == "scan__before"}
    shares = [line.share for line in hot if line.kernel == "gemv__before"]
    assert shares == sorted(shares, reverse=True)


def test_the_command_adds_them_to_its_advice(call, page: Path, tmp_path: Path) -> None:
    profile = unpack("before_full.csv", tmp_path)
    whole = profile.read_text().splitlines()
    start = next(i for i, line in enumerate(whole) if line.startswith('"ID"'))
    profile.write_text("\n".join(whole[start : start + 4]))  # two kernels are enough
    shown = call("lab", "tune", str(profile), "--source", str(page))
    assert shown.code == ExitCode.OK
    assert "Where warps wait" in shown.out
    assert "FRND" in shown.out
    without = call("lab", "tune", str(profile), "--json")
    assert json.loads(without.out)["source"] == []


def test_a_file_without_instructions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_text('"ID","Kernel Name"\n"0","f"\n')
    with pytest.raises(BadInput, match="--page source"):
        read_source_page(path)
