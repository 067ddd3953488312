"""The notebooks run from top to bottom; ``python tests/docs/test_notebooks.py`` keeps what they
print.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))
# The others run every night: all six take twenty seconds of processor time.
USUAL = ("read-a-power-trace", "train-on-a-budget")


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
def cells_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], list]]:
    """Run a notebook together with those that run as often, when the first of them is asked for."""
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
        cells: dict[Path, list] = {}

        def run(path: Path) -> list:
            if path not in cells:
                is_usual = path.stem in USUAL
                cells.update(run_notebooks([p for p in NOTEBOOKS if (p.stem in USUAL) == is_usual]))
            return cells[path]

        yield run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem in USUAL else pytest.mark.slow, id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_shows_what_it_printed(
    path: Path, cells_of: Callable[[Path], list]
) -> None:
    import nbformat

    for before, now in zip(nbformat.read(path, as_version=4).cells, cells_of(path), strict=True):
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
