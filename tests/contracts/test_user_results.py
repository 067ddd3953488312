"""Every result of a verb can be carried away: a short repr, plain data, a table, a figure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wattcast
from wattcast.core.errors import MissingTool, UnknownName
from wattcast.core.user_results import UserResult, make_frame
from wattcast.explore import assign_fleet, explore_designs, read_fleet
from wattcast.measure.window_summary import Measurement

FLEET = "gpus: {h200: 1}\nworkloads:\n  - {workload: gpt2, rate: 1/s, options: {seq: 64}}\n"
SERVED: dict[str, Any] = {"rate": "2/s", "requests": 5, "prompt": 16, "output": 4}


def assign(folder: Path) -> Any:
    path = folder / "fleet.yaml"
    path.write_text(FLEET)
    return assign_fleet(read_fleet(path))


def calibrate(folder: Path) -> Any:
    path = folder / "rows.csv"
    path.write_text("workload,batch,seq,latency_ms\ngpt2,8,512,9.0\n")
    return wattcast.calibrate(path, "l40s")


MAKERS: dict[str, Callable[[Path], Any]] = {
    "predict": lambda _: wattcast.predict("gpt2", "h200", seq=128),
    "predict sweep": lambda _: wattcast.predict("gpt2", "h200", seq=128, clock=[1e9, 1.5e9]),
    "predict several gpus": lambda _: wattcast.predict("gpt2", ["h200", "l4"], seq=128),
    "predict_many": lambda _: wattcast.predict_many(["gpt2", "bert-base"] * 4, "h200", seq=128),
    "simulate": lambda _: wattcast.simulate("gpt2", "h200", **SERVED),
    "simulate several gpus": lambda _: wattcast.simulate("gpt2", ["h200", "l4"], **SERVED),
    "plan": lambda _: wattcast.plan("gpt2", "h200", rate="2/s", prompt=16, output=4, tp=[1]),
    "train": lambda _: wattcast.train("gpt2", "h200", gpus=1, seq=128),
    "train several gpus": lambda _: wattcast.train("gpt2", ["h200", "l4"], gpus=1, seq=128),
    "compare": lambda _: wattcast.compare("gpt2@h200", "@l4", seq=128),
    "explore": lambda _: wattcast.explore("gpt2", "h200", ["batch=1,2"], seq=64),
    "explore gpus": lambda _: wattcast.explore("gpt2", "h200,l4", seq=64),
    "explore designs": lambda _: explore_designs("gpt2", "h200", ["sm_count=64,128"], seq=64),
    "explore fleet": assign,
    "calibrate": calibrate,
    "measure": lambda _: Measurement("block", 2.0, 500.0, 250.0, peak_w=300.0, peak_of="sensor"),
}
ROWS_OF = {
    "predict sweep": 2,
    "predict several gpus": 2,
    "predict_many": 8,
    "simulate": 5,
    "simulate several gpus": 10,
    "train several gpus": 2,
    "explore": 2,
    "explore gpus": 2,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    return {name: make(folder) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_has_a_short_repr(results: dict[str, Any], name: str) -> None:
    """The repr of a plan had 427,426 characters."""
    text = repr(results[name])
    assert 10 < len(text) < 400
    assert "object at" not in text


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_plain_data(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert isinstance(result, UserResult)
    plain = result.to_dict()
    assert plain
    assert json.loads(result.to_json()) == json.loads(json.dumps(plain))


@pytest.mark.parametrize("library", ["polars", "pandas"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_a_table(results: dict[str, Any], name: str, library: str) -> None:
    module = pytest.importorskip(library, reason=f"no {library}: pip install {library}")
    frame = results[name].to_frame(library)
    assert isinstance(frame, module.DataFrame)
    assert frame.shape[0] == ROWS_OF.get(name, frame.shape[0])
    assert min(frame.shape) > 0


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_is_a_figure(results: dict[str, Any], name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'wattcast[plot]'")
    figure = results[name].plot(tmp_path / "figure.svg")
    assert figure.axes
    assert (tmp_path / "figure.svg").stat().st_size > 2000


def test_a_table_takes_the_library_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """README's block needed polars where only the base was installed."""
    import wattcast.core.user_results as module

    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(module, "import_module", refuse)
    with pytest.raises(MissingTool, match="explore"):
        make_frame([{"a": 1}])
    with pytest.raises(MissingTool, match="needs pandas"):
        make_frame([{"a": 1}], "pandas")
    with pytest.raises(UnknownName, match="polars"):
        make_frame([{"a": 1}], "polar")


def test_rows_that_lack_a_column_are_null_in_it() -> None:
    pytest.importorskip("polars", reason="no polars: pip install polars")
    frame = make_frame([{"a": 1}, {"a": 2.5, "b": "x"}], "polars")
    assert frame["b"].to_list() == [None, "x"]
    assert frame["a"].to_list() == [1.0, 2.5]


def test_several_gpus_are_those_one_by_one() -> None:
    both = wattcast.predict("gpt2", gpu=["h200", "l4"], seq=64)
    alone = [wattcast.predict("gpt2", gpu=name, seq=64) for name in ("h200", "l4")]
    assert [p.latency_s for p in both] == [p.latency_s for p in alone]
    assert [p.gpu for p in both] == ["h200", "l4"]


def test_a_notebook_shows_the_progress_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan of many kinds was silent for half a minute below its cell."""
    from types import SimpleNamespace

    from wattcast.core.user_results import find_notebook_progress

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert find_notebook_progress() is None, "IPython in a terminal, or imported by others"
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("wattcast.serving.plan_search.PROGRESS_S", 0.0)
    wattcast.plan("gpt2", "h200", rate="2/s", prompt=64, output=8, requests=20)
    assert "\rh200: " in capsys.readouterr().err
