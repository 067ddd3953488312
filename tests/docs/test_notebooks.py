"""The notebooks run from top to bottom; ``python tests/docs/test_notebooks.py`` keeps what they print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_notebook(path: Path):
    """Return the notebook with the outputs of this run; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    return NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False).execute()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_printed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name, reason=f"no {name}: pip install 'wattcast[dev]'")
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    source = str(Path(__file__).resolve().parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])))
    kept, ran = nbformat.read(path, as_version=4), run_notebook(path)
    for before, now in zip(kept.cells, ran.cells, strict=True):
        kinds = [[output.output_type for output in cell.get("outputs", [])] for cell in (before, now)]
        assert kinds[0] == kinds[1], f"{path.name} has not been run since this changed:\n{before.source}"
    assert path.stat().st_size < 100_000, "figures in a notebook stay small"


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


if __name__ == "__main__":
    import nbformat

    for notebook_path in NOTEBOOKS:
        nbformat.write(run_notebook(notebook_path), notebook_path)
