"""A sweep equals single predictions, and loses nothing when it is interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.core.errors import BadInput, Refused, WattcastError
from wattcast.explore import explorations, sweep
from wattcast.explore import search_space as constraints
from wattcast.explore import study as studies
from wattcast.explore.study import (
    Study,
    configure_points,
    evaluate_points,
    find_unused_fields,
    tabulate_points,
)
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.graph import count_operators

QUANTITIES = ("latency_s", "power_w", "energy_j", "clock_hz", "effective_clock_hz", "busy_s")
pytest.importorskip("polars")


def whole(study: Study) -> dict[str, np.ndarray]:
    return tabulate_points(study, 0, study.space.size)


def test_points_equal_single_predictions(study: Study) -> None:
    found = whole(study)
    assert 0.1 < found["capped"].mean() < 0.9
    for number in range(0, study.space.size, 37):
        one = {name: values[0] for name, values in study.space.points(number, number + 1).items()}
        alone = evaluate_points(study, {name: np.array([value]) for name, value in one.items()})
        for name in QUANTITIES:
            assert found[name][number] == pytest.approx(float(alone[name][0]), rel=1e-12), (
                name,
                number,
            )
        assert bool(alone["capped"][0]) == bool(found["capped"][number])
        assert bool(alone["fits"][0]) == bool(found["fits"][number])


def test_settings_equal_single_predictions() -> None:
    """A sweep of settings gives what single predictions of the chip give."""
    settings = explorations.build_study(
        "gpt2",
        "h200",
        ["clock=600MHz:1980MHz:60MHz", "power_limit=250W,300W,700W"],
        stack="eager",
        batch=64,
        seq=512,
    )
    found = whole(settings)
    assert 0.1 < found["capped"].mean() < 0.9
    for number in range(0, settings.space.size, 7):
        points = settings.space.points(number, number + 1)
        one = {name: values[0] for name, values in points.items()}
        alone = predict_graph(settings.graph, *configure_points(settings, one))
        for name in QUANTITIES:
            assert found[name][number] == pytest.approx(float(getattr(alone, name)), rel=1e-12)
        assert bool(alone.capped) == bool(found["capped"][number])
        assert bool(alone.fits) == bool(found["fits"][number])


def test_chunks_change_nothing(study: Study, monkeypatch) -> None:
    """Points above their limit are gathered over all chunks before the governor sees them, in
    chunks again.
    """
    found = whole(study)
    monkeypatch.setattr(studies, "CELLS", 7 * len(count_operators(study.graph)))
    small = whole(study)
    assert list(small) == list(found)
    for name, values in found.items():
        assert small[name].dtype == values.dtype
        assert np.allclose(small[name], values, rtol=1e-12, atol=0), name


def test_what_changes_nothing_is_found_for_every_point() -> None:
    """A field no model uses leaves results without a sweep axis, below the limit and above it."""
    for limit, capped in (("1000W", False), ("250W", True)):
        found = whole(
            explorations.build_study(
                "gpt2", "h200", ["links.pcie=64GB/s,128GB/s"], power_limit=limit, batch=64, seq=512
            )
        )
        assert found["capped"].tolist() == [capped, capped]
        assert found["latency_s"][0] == found["latency_s"][1] > 0


def test_a_limit_below_idle_power_is_said_not_hidden() -> None:
    study = explorations.build_study("gpt2", "h200", ["power_limit=50W,700W"], seq=128)
    assert whole(study)["limit_met"].tolist() == [False, True]


def test_scales_do_what_they_say(study: Study) -> None:
    slow = explorations.build_study(
        "gpt2", "h200", ["tensor=0.25,1,4"], stack="eager", batch=64, seq=512, clock="1200MHz"
    )
    latency = whole(slow)["latency_s"]
    assert latency[0] > latency[1] > latency[2]
    dim = explorations.build_study(
        "gpt2", "h200", ["voltage=0.8,1"], stack="eager", batch=64, seq=512, clock="1200MHz"
    )
    power = whole(dim)["power_w"]
    assert power[0] < power[1]
    unused = explorations.build_study(
        "gpt2", "h200", ["sm_count=64,128", "links.pcie=64GB/s,128GB/s"]
    )
    assert find_unused_fields(unused) == ["links.pcie"]


def test_constraints_keep_exactly_the_points_that_meet_them(study: Study) -> None:
    free = whole(study)
    limits = ["power_w<=250", "sm_count>64"]
    kept = whole(
        replace(
            study, constraints=constraints.parse_constraints(limits, study.gpu, study.space.columns)
        )
    )
    wanted = (free["power_w"] <= 250) & (free["sm_count"] > 64)
    assert 0 < wanted.sum() < wanted.size
    assert kept["point"].tolist() == free["point"][wanted].tolist()
    assert np.allclose(kept["energy_j"], free["energy_j"][wanted], rtol=1e-12)


def test_parts_without_any_point_left_are_parts_all_the_same(study: Study, tmp_path: Path) -> None:
    """Clock is the slowest axis: whole parts and chunks fall to the constraint before anything is
    evaluated.
    """
    limits = ["clock>=1.6GHz", "sm_count<=96", "power_w>=280"]
    bound = replace(
        study, constraints=constraints.parse_constraints(limits, study.gpu, study.space.columns)
    )
    done = sweep.run_sweep(bound, tmp_path / "points.parquet", part_points=40)
    found = sweep.import_polars().read_parquet(tmp_path / "points.parquet")
    assert found["point"].to_list() == whole(bound)["point"].tolist()
    assert done.summary.kept == len(found) > 0
    three = sweep.run_sweep(bound, objectives=("latency_s", "power_w", "sm_count"), part_points=40)
    assert three.summary.kept == done.summary.kept


def test_points_for_figures_are_few_and_of_every_value(monkeypatch) -> None:
    """Every 50th point of a grid whose last axis has 25 values would always be of the same one."""
    monkeypatch.setattr(sweep, "SHOWN", 200)
    study = explorations.build_study(
        "gpt2", "h200", ["sm_count=1:200:1", "memory.bandwidth=1TB/s:25TB/s:1TB/s"], seq=128
    )
    shown = sweep.run_sweep(study).summary.shown
    assert 120 < len(shown["point"]) < 300
    assert len(np.unique(shown["memory.byte_per_s"])) > 20
    assert len(np.unique(shown["sm_count"])) > 80


def test_parts_processes_and_files_give_the_same(study: Study, tmp_path: Path) -> None:
    pl = sweep.import_polars()
    once = sweep.run_sweep(study, tmp_path / "once.parquet")
    parted = sweep.run_sweep(study, tmp_path / "parted.parquet", part_points=100)
    spread = sweep.run_sweep(
        study, tmp_path / "spread", part_points=250, runner=sweep.process_runner(2)
    )
    again = sweep.run_sweep(study, tmp_path / "again", part_points=250)
    first, second = (pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("once", "parted"))
    assert first["point"].to_list() == list(range(study.space.size))
    by_two, by_one = (
        pl.read_parquet(tmp_path / name / "*.parquet") for name in ("spread", "again")
    )
    assert by_two.equals(by_one)
    for name in QUANTITIES:
        assert np.allclose(first[name], second[name], rtol=1e-12, atol=0)
    fronts = {tuple(s.summary.front["point"].tolist()) for s in (once, parted, spread, again)}
    assert len(fronts) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again",
        "once.parquet",
        "parted.parquet",
        "spread",
    ]


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_other_formats_hold_the_same(study: Study, tmp_path: Path, ending: str) -> None:
    pl = sweep.import_polars()
    sweep.run_sweep(study, tmp_path / f"x.{ending}", part_points=100)
    read = {"csv": pl.read_csv, "json": pl.read_json}[ending](tmp_path / f"x.{ending}")
    found = whole(study)
    assert read.columns == list(found)
    assert np.allclose(read["energy_j"], found["energy_j"], rtol=1e-12)
    assert read["point"].to_list() == found["point"].tolist()


class Stop(Exception):
    """The power fails."""


def test_a_killed_run_continues_and_computes_nothing_twice(study: Study, tmp_path: Path) -> None:
    seen: list[int] = []

    def failing(work, indices):
        for index in indices:
            if len(seen) == 3:
                raise Stop
            seen.append(index)
            yield work.compute_part(index)

    out = tmp_path / "points.parquet"
    with pytest.raises(Stop):
        sweep.run_sweep(study, out, runner=failing, part_points=64)
    assert not out.exists()
    assert len(list((tmp_path / "points.parquet.parts").glob("part-*"))) == 3

    def counting(work, indices):
        for index in indices:
            seen.append(index)
            yield work.compute_part(index)

    done = sweep.run_sweep(study, out, runner=counting, part_points=64)
    assert done.continued == 3
    assert sorted(seen) == list(range(-(-study.space.size // 64)))
    assert sweep.import_polars().read_parquet(out)["point"].to_list() == list(
        range(study.space.size)
    )
    assert (
        done.summary.front["point"].tolist()
        == sweep.run_sweep(study).summary.front["point"].tolist()
    )


def test_another_study_in_the_same_folder_is_refused(study: Study, tmp_path: Path) -> None:
    sweep.run_sweep(study, tmp_path / "points")
    assert sweep.run_sweep(study, tmp_path / "points").continued == 1
    other = explorations.build_study("gpt2", "h200", ["sm_count=64,128"], seq=128)
    with pytest.raises(Refused, match="another study"):
        sweep.run_sweep(other, tmp_path / "points")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(Refused, match="other files"):
        sweep.run_sweep(study, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_keeps_what_is_finished(study: Study, tmp_path: Path, monkeypatch) -> None:
    written: list[Path] = []
    real = sweep.write_whole

    def filling(path: Path, data: bytes) -> None:
        if len(written) == 3:
            raise BadInput(f"{path}: cannot be written (No space left on device).")
        real(path, data)
        written.append(path)

    monkeypatch.setattr(sweep, "write_whole", filling)
    with pytest.raises(BadInput, match="No space left"):
        sweep.run_sweep(study, tmp_path / "points", part_points=64)
    monkeypatch.undo()
    assert len(list((tmp_path / "points").glob("part-*"))) == 2
    assert sweep.run_sweep(study, tmp_path / "points", part_points=64).continued == 2


def test_a_torn_part_is_named(study: Study, tmp_path: Path) -> None:
    sweep.run_sweep(study, tmp_path / "points")
    (tmp_path / "points" / "part-000000.parquet").write_bytes(b"half")
    with pytest.raises(BadInput, match=r"part-000000\.parquet: not a readable part"):
        sweep.run_sweep(study, tmp_path / "points")


def test_impossible_constraints_say_which_one_binds() -> None:
    study = explorations.build_study(
        "gpt2", "h200", ["sm_count=64:192:32"], where=["power_w<=10", "latency<=1h"], seq=128
    )
    says = r"power_w<=10 W holds for 0\.0% \(closest: .* W\); latency_s<=.* holds for 100"
    with pytest.raises(BadInput, match=says):
        sweep.run_sweep(study)


def test_a_huge_space_asks_first() -> None:
    axes = ["clock=600MHz:1980MHz:1MHz", "sm_count=64:192:1", "memory.bandwidth=2TB/s:8TB/s:1GB/s"]
    with pytest.raises(Refused, match="--yes"):
        sweep.run_sweep(explorations.build_study("gpt2", "h200", axes, seq=128))


def test_the_fingerprint_tells_studies_apart() -> None:
    same = explorations.build_study("gpt2", "h200", ["sm_count=64,128"], seq=128)
    assert (
        same.digest()
        == explorations.build_study("gpt2", "h200", ["sm_count=64,128"], seq=128).digest()
    )
    before = same.digest()
    whole(
        same
    )  # a bundle keeps what it worked out; once that was part of the digest, and no study could continue
    assert same.digest() == before
    others = [
        explorations.build_study("gpt2", "h200", ["sm_count=64,132"], seq=128),
        explorations.build_study("gpt2", "h100-sxm", ["sm_count=64,128"], seq=128),
        explorations.build_study("gpt2", "h200", ["sm_count=64,128"], seq=256),
        explorations.build_study(
            "gpt2", "h200", ["sm_count=64,128"], where=["power_w<=400"], seq=128
        ),
        explorations.build_study("gpt2", "h200", ["sm_count=64,128"], power_limit="400W", seq=128),
    ]
    assert len({s.digest() for s in [same, *others]}) == 6


@pytest.mark.parametrize(
    ("front", "says"),
    [
        (("latency_s",), "two or more"),
        (("latency_s", "watts"), "unknown column"),
        (("power_w", "power_w"), "different"),
    ],
)
def test_a_bad_front_is_explained(study: Study, front: tuple[str, ...], says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        sweep.run_sweep(study, objectives=front)
