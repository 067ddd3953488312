"""The notebooks run from top to bottom; ``python tests/docs/test_notebooks.py`` keeps what they
print.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_notebooks(paths: list[Path]) -> dict[Path, list]:
    """Return the cells of notebooks with the outputs of this run; an error in a cell is raised.

    They run in one kernel, which forgets all names between two: to start it takes longer than most
    cells."""
    import nbformat
    from nbclient import NotebookClient

    cells = {path: nbformat.read(path, as_version=4).cells for path in paths}
    whole = nbformat.v4.new_notebook()
    for own in cells.values():
        for cell in own:
            cell.pop("outputs", None)
        whole.cells += [
            *own,
            nbformat.v4.new_code_cell("import matplotlib.pyplot as p\np.close('all')\n%reset -f"),
        ]
    NotebookClient(whole, timeout=300, kernel_name="python3", record_timing=False).execute()
    return cells


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list]:
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name, reason=f"no {name}: pip install 'wattcast[dev]'")
    source, folder = (
        str(Path(__file__).resolve().parents[2] / "src"),
        str(tmp_path_factory.mktemp("jupyter")),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, folder)
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        )
        return run_notebooks(NOTEBOOKS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_printed(path: Path, ran: dict[Path, list]) -> None:
    import nbformat

    for before, now in zip(nbformat.read(path, as_version=4).cells, ran[path], strict=True):
        # what a loaded kernel prints may come in two pieces
        kinds = [
            list(dict.fromkeys(o.output_type for o in cell.get("outputs", [])))
            for cell in (before, now)
        ]
        assert kinds[0] == kinds[1], (
            f"{path.name} has not been run since this changed:\n{before.source}"
        )
    assert path.stat().st_size < 100_000, "figures in a notebook stay small"


LECTURES = (
    "why-decode-is-memory-bound",
    "the-price-of-a-power-limit",
    "size-a-deployment",
    "from-counters-to-watts",
)


def test_a_lecture_has_a_question_a_figure_and_exercises() -> None:
    import nbformat

    assert len(NOTEBOOKS) == 6
    for name in LECTURES:
        path = next(path for path in NOTEBOOKS if path.stem == name)
        cells = nbformat.read(path, as_version=4).cells
        words = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert "**Question.**" in words
        assert "## Exercises" in words
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert "assert " in cells[-1].source + cells[-2].source, "an exercise is worked out"


if __name__ == "__main__":
    import nbformat

    for notebook_path in NOTEBOOKS:
        kept = nbformat.read(notebook_path, as_version=4)
        kept.cells = run_notebooks([notebook_path])[notebook_path]
        nbformat.write(kept, notebook_path)
