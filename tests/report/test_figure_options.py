"""Every command that draws speaks with one voice: ``--plot FILE``, and ``--figures FOLDER
--format`` for sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wattcast.cli import figure_options
from wattcast.cli.main import walk_commands
from wattcast.core.errors import BadInput, ExitCode, MissingTool, UnknownName
from wattcast.core.option_declaration import parse_option_value
from wattcast.report import figure_style

LAB = {"lab power-trace", "lab check-energies", "lab kernel", "lab estimate", "lab apply"}
ONE = {
    "predict",
    "compare",
    "plan",
    "simulate",
    "train",
    "hall",
    "measure run",
    "gpus show",
    *LAB,
} | {f"explore {name}" for name in ("sweep", "designs", "fleet")}
SETS = {"manage simulate", "manage replay", "lab fit counters", "lab microbench", "lab validate"}


def options(command: Any) -> dict[str, Any]:
    return {name: p for p in command.params for name in p.opts if name.startswith("--")}


def read_option(command: Any, flag: str, text: str) -> Any:
    """Read a value as a command does before its function is called."""
    return parse_option_value(command.options[flag.removeprefix("--")], text)


def test_all_commands_that_draw_have_plot_and_sets_have_figures_and_format() -> None:
    plots = {name for name, command in walk_commands() if "--plot" in options(command)}
    folders = {name for name, command in walk_commands() if "--figures" in options(command)}
    assert plots == ONE | SETS
    assert folders == SETS
    for name, command in walk_commands():
        known = options(command)
        if name in SETS:
            assert known["--format"].default == "png", name
        if "--figure" in known:  # a name of a figure, never a file
            assert known["--figure"].type.name in ("str", "text", "boolean"), name


def test_a_bad_name_is_refused_while_options_are_read() -> None:
    """Whatever a command would do first is not done: the options themselves refuse."""
    asked = 0
    for name, command in walk_commands():
        known = options(command)
        for option, bad in (("--plot", "x.gif"), ("--format", "gif")):
            is_of_figures = name in (SETS if option == "--format" else ONE | SETS)
            if option not in known or not is_of_figures:
                continue
            asked += 1
            with pytest.raises(BadInput, match="png"):
                read_option(command, option, bad)
        if "--plot" in known:
            assert read_option(command, "--plot", "x.SVG") == Path("x.SVG"), name
    assert asked == len(ONE) + 2 * len(SETS)


def test_folders_and_files_are_not_taken_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(BadInput, match="a file"):
        figure_options.check_plot_option(tmp_path / "a.png")
    (tmp_path / "b").write_text("")
    with pytest.raises(BadInput, match="--plot FILE"):
        figure_options.check_figures_option(tmp_path / "b")
    assert figure_options.check_figures_option(tmp_path / "new") == tmp_path / "new"


def test_without_matplotlib_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_style, "find_spec", lambda name: None)
    for check in (
        lambda: figure_options.check_plot_option(Path("a.png")),
        lambda: figure_options.check_figures_option(Path("new")),
    ):
        with pytest.raises(MissingTool, match="wattcast\\[plot\\]"):
            check()


def test_one_of_a_set_or_all_in_any_format(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / "table.csv"
    table.write_text(
        "app\n"
        + "".join(f"3505,{c},{2000 / c:.4f},{40 + c / 10:.3f}\n" for c in range(600, 1200, 100))
    )
    png, one, all_of_them = tmp_path / "one.png", tmp_path / "one.pdf", tmp_path / "all"
    done = call("manage", "replay", str(table), "--plot", str(png), "--json")
    assert done.code == 0, done.err
    assert png.read_bytes().startswith(b"\x89PNG")
    argv = ["--plot", str(one), "--figures", str(all_of_them), "--format", "pdf", "--json"]
    done = call("manage", "replay", str(table), *argv)
    assert done.code == 0, done.err
    made = sorted(all_of_them.iterdir())
    assert len(made) >= 5
    assert all(path.suffix == ".pdf" and path.read_bytes().startswith(b"%PDF") for path in made)
    assert (
        one.read_bytes()
        == (all_of_them / "figure_10_ed2_gain_over_default_with_probing.pdf").read_bytes()
    )
    picked = call(
        "manage", "replay", str(table), "--plot", str(one), "--figure", "convergence_app", "--json"
    )
    assert picked.code == 0, picked.err
    assert one.read_bytes() == (all_of_them / "convergence_app.pdf").read_bytes()


def test_a_failed_command_leaves_the_old_figure(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    old = tmp_path / "old.png"
    old.write_bytes(b"old")
    assert call("predict", "no-such-model", "--gpu", "h200", "--plot", str(old)).code != 0
    assert old.read_bytes() == b"old"

    def broken(*_: object, **__: object) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(figure_style, "encode_figure", broken)
    with pytest.raises(OSError, match="disk full"):
        figure_style.save_figure(figure_style.new_figure(2.0, 2.0), old)
    assert old.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]


def test_a_figure_by_an_unknown_name_lists_those_there_are(call) -> None:
    with pytest.raises(UnknownName, match="costs, voltages"):
        figure_style.draw_named({"costs": lambda: None, "voltages": lambda: None}, "cost")  # type: ignore[dict-item, return-value]
    alone = call("manage", "simulate", "--figure", "predictor_accuracy")
    assert alone.code == ExitCode.BAD_INPUT
    assert "--plot FILE" in alone.err


def test_a_bare_node_refuses_a_bad_name_before_it_runs_and_writes_whole_files(
    tmp_path: Path, capsys
) -> None:
    from wattcast.measure import run_figure
    from wattcast.measure.__main__ import main

    ran = tmp_path / "ran"
    assert (
        main(["run", "--plot", str(tmp_path / "x.gif"), "--", "touch", str(ran)])
        == ExitCode.BAD_INPUT
    )
    assert ".png, .svg or .pdf" in capsys.readouterr().err
    assert not ran.exists()
    pytest.importorskip("matplotlib")
    old = tmp_path / "old.svg"
    old.write_bytes(b"old")

    class Broken:
        def savefig(self, *_: object, **__: object) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_figure.save_run_figure(Broken(), old)
    assert old.read_bytes() == b"old"
    run_figure.save_run_figure(figure_style.new_figure(2.0, 2.0), old)
    assert old.read_bytes().startswith(b"<?xml")
    assert [path.name for path in tmp_path.iterdir()] == ["old.svg"]
