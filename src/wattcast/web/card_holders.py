"""Say which pods and jobs hold which cards, for labels on metrics.

Pods come from the kubelet (``kubelet_pods.py``), jobs from the files that the Slurm prolog of
``deploy/slurm`` writes: ``JOB.before`` names the cards of a job until its epilog. A card that
several hold has a row for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wattcast.core.errors import BadInput, MissingTool
from wattcast.web import kubelet_pods

HOLDER_LABELS = ("namespace", "pod", "container", "slurm_job")
MOST_JOBS = 1000
LONGEST_JOB_BYTE = 65536


@dataclass(frozen=True)
class CardHolder:
    """Name one that holds a card: a container of a pod, or a job."""

    uuid: str
    namespace: str = ""
    pod: str = ""
    container: str = ""
    slurm_job: str = ""

    @property
    def labels(self) -> list[str]:
        """Return the values of ``HOLDER_LABELS``."""
        return [getattr(self, name) for name in HOLDER_LABELS]


@dataclass(frozen=True)
class HolderSources:
    """Where holders are asked for; None: nowhere."""

    kubelet: Path | None = None
    jobs: Path | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether nobody is asked."""
        return self.kubelet is None and self.jobs is None

    def list_holders(self) -> tuple[list[CardHolder], bool]:
        """Return who holds which card now, and whether all that were asked have answered."""
        holders: list[CardHolder] = []
        is_whole = True
        if self.kubelet is not None:
            try:
                held_devices = kubelet_pods.list_pod_devices(self.kubelet)
                holders += [_name_container(held) for held in held_devices]
            except (MissingTool, BadInput):
                is_whole = False
        if self.jobs is not None:
            holders += _list_job_holders(self.jobs)
            is_whole = is_whole and self.jobs.is_dir()
        return list(dict.fromkeys(holders)), is_whole


def _name_container(held: kubelet_pods.PodDevice) -> CardHolder:
    return CardHolder(
        held.uuid,
        held.namespace,
        held.pod,
        held.container,
    )


def _list_job_holders(folder: Path) -> Iterator[CardHolder]:
    """Yield the cards of the jobs that run, by the notes of their prologs."""
    for path in sorted(folder.glob("*.before"))[:MOST_JOBS]:
        try:
            text = path.read_bytes()[:LONGEST_JOB_BYTE].decode()
        except (OSError, UnicodeDecodeError):
            continue  # its epilog was faster
        for line in text.splitlines():
            words = line.split()
            if len(words) == 3:
                yield CardHolder(words[1], slurm_job=path.stem)
