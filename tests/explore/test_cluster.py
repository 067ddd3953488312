"""The sweep on a real local cluster, one of whose workers is killed in mid-run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from wattcast.core.errors import WattcastError
from wattcast.explore import sweep
from wattcast.explore import sweep as cluster
from wattcast.explore.study import Study

pytest.importorskip("polars")
pytestmark = pytest.mark.filterwarnings("default")  # of Dask's own making, at shutdown


@pytest.fixture(scope="module")
def distributed():
    """Dask, which takes a second to import."""
    return pytest.importorskip("distributed")


def test_a_killed_worker_costs_nothing(distributed, study: Study, tmp_path: Path) -> None:
    local = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    )
    with local, distributed.Client(local) as client:
        pids = list(client.run(os.getpid).values())
        assert len(pids) == 2
        seen: list[int] = []

        def killing(work, indices):
            for part in cluster.cluster_runner(local.scheduler_address)(work, indices):
                seen.append(part[0])
                if len(seen) == 2:
                    os.kill(pids[0], signal.SIGKILL)
                yield part

        sweep.run_sweep(study, tmp_path / "killed", runner=killing, part_points=40)
    parts = -(-study.space.size // 40)
    assert sorted(seen) == list(range(parts))
    sweep.run_sweep(study, tmp_path / "alone", part_points=40)
    pl = sweep.import_polars()
    killed, alone = (pl.read_parquet(tmp_path / name / "*.parquet") for name in ("killed", "alone"))
    assert killed["point"].to_list() == list(range(study.space.size))
    assert killed.equals(alone)


@pytest.mark.slow
def test_a_cluster_of_its_own_gives_the_same(
    distributed, call, study: Study, tmp_path: Path
) -> None:
    done = sweep.run_sweep(
        study, tmp_path / "x.parquet", runner=cluster.cluster_runner("local", 1), part_points=300
    )
    assert (
        done.summary.front["point"].tolist()
        == sweep.run_sweep(study).summary.front["point"].tolist()
    )
    argv = (
        "explore",
        "designs",
        "gpt2",
        "--gpu",
        "h200",
        "--vary",
        "sm_count=64,128",
        "--cluster",
        "local",
    )
    done = call(*argv, "--workers", "1", "--out", str(tmp_path / "y.csv"))
    assert done.code == 0, done.err
    assert len((tmp_path / "y.csv").read_text().splitlines()) == 3


def test_bad_addresses_are_explained(distributed, study: Study, monkeypatch) -> None:
    with pytest.raises(WattcastError, match="tcp://host:8786"):
        cluster.cluster_runner("host")
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    with pytest.raises(WattcastError, match="cannot be reached"):
        sweep.run_sweep(study, runner=cluster.cluster_runner("tcp://127.0.0.1:1"))


def test_a_cluster_without_workers_is_told_apart(distributed, study: Study, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "WORKERS_S", 0.5)
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as empty,
        pytest.raises(WattcastError, match="no worker within"),
    ):
        sweep.run_sweep(study, runner=cluster.cluster_runner(empty.scheduler_address))
