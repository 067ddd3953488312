"""The documentation: every example runs, every command that cannot be run here exists, the site
builds.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from staged_files import stage_files
from typer.core import TyperCommand

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RUN = sorted(
    [
        DOCS / "index.md",
        DOCS / "start.md",
        *(DOCS / "how-to").glob("*.md"),
        *(DOCS / "learn").glob("*.md"),
    ]
)
EVERY = sorted([*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"])
# Pages whose examples, or whose other commands, take seconds: they run every night.
LONG_EXAMPLES = (
    "deploy-and-check",
    "manage-cards",
    "measure-a-board",
    "own-model",
    "size-a-deployment",
    "start",  # by day the README runs its like, and each command is parsed
    "train-on-a-budget",
)
LONG_COMMANDS = (
    "counters",
    "engine-kernels",
    "explore",
    "hall",
    "measuring",
    "other-gpus",
    "power-over-time",
    "see",
    "serving",
    "size-a-deployment",
    "training-jobs",
    "whole-models",
)
NOT_RUN_FILE = Path(__file__).with_name("not_run.txt")
FENCE = re.compile(
    r"^(?:[^\n]*`([\w.-]+\.(?:json|yaml|csv))`:\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def fences(page: Path) -> list[tuple[str, str, str]]:
    """File name (where the sentence before ends in one), language and text of each block, in order."""
    return [(m[1] or "", m[2], m[3]) for m in FENCE.finditer(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    """The command lines of a block, without their comments."""
    joined = text.replace("\\\n", " ")
    words = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [w[w.index("wattcast") + 1 :] for w in words if "wattcast" in w[:2]]


def mark_long(pages: list[Path], names: tuple[str, ...]) -> list:
    """Return pages as parameters of a test, those of these names for the nightly run."""
    params = []
    for page in pages:
        marks = pytest.mark.slow if page.stem in names else ()
        params.append(pytest.param(page, marks=marks, id=page.stem))
    return params


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures without arranging them first, which takes half the time; tests of each package
    arrange theirs.
    """
    drawing = pytest.importorskip(
        "matplotlib.figure", reason="no matplotlib: pip install 'wattcast[plot]'"
    )
    monkeypatch.setattr(drawing.Figure, "get_layout_engine", lambda figure: None)


@pytest.mark.parametrize("page", mark_long(RUN, LONG_EXAMPLES))
def test_every_example_of_a_page_runs(
    page: Path, call, tmp_path: Path, monkeypatch, drafts: None
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for name, language, text in fences(page):
        if name:
            Path(name).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, page.name, "exec"), space)
        elif language == "sh":
            found = commands(text)
            assert len(found) == len(text.replace("\\\n", " ").strip().splitlines()), (
                "a shell example is ours to run"
            )
            for argv in found:
                done = call(*argv)
                assert done.code == 0, (argv, done.err)
    for figure in tmp_path.glob("*.[sp][vnd][gf]"):
        assert figure.stat().st_size > 2000, figure


COMMAND = re.compile(r"^(?: {4}|\$ |.*&& )?(wattcast \w.*?)(?=\s*(?:#|&&|\||$))", re.MULTILINE)
MENTION = re.compile(r"`(wattcast \w[^`|]*)`")
NOT_RUN = [
    tuple(row.split(" | "))
    for row in NOT_RUN_FILE.read_text().splitlines()
    if not row.startswith("#")
]


def documented(page: Path, pattern: re.Pattern[str] = COMMAND) -> list[str]:
    """Return every command line of a page, indented or fenced, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [" ".join(line.split()) for line in pattern.findall(text)]


def left_over(page: Path) -> list[str]:
    """Return the lines that the test of whole pages does not run."""
    sh = [text for _, kind, text in fences(page) if kind == "sh" and page in RUN]
    done = {" ".join(["wattcast", *argv]) for text in sh for argv in commands(text)}
    return [line for line in documented(page) if line not in done]


def runs(line: str) -> bool:
    return not any(line.startswith(start) for start, _ in NOT_RUN)


def takes_long(line: str) -> bool:
    return any(line.startswith(start) and reason.startswith("slow") for start, reason in NOT_RUN)


@pytest.fixture(scope="module")
def staged_folder(call, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's own files: made-up ones, and two predictions that were saved."""
    folder = tmp_path_factory.mktemp("staged")
    stage_files(folder)
    for name, batch in (("before.json", "2"), ("after.json", "4")):
        done = call("predict", "gpt2", "--gpu", "h200", "--batch", batch, "--seq", "128", "--json")
        (folder / name).write_text(done.out, encoding="utf-8")
    return folder


@pytest.fixture
def stage(
    staged_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: None
) -> None:
    """A copy of the reader's files to work in."""
    monkeypatch.chdir(shutil.copytree(staged_folder, tmp_path, dirs_exist_ok=True))


def run_line(call, line: str) -> None:
    """Run a documented line without what it shows as optional."""
    done = call(*shlex.split(re.sub(r" \[[^]]*\]| ?\.\.\.", "", line))[1:])
    assert done.code == 0, (line, done.err)


def test_every_command_in_the_docs_exists_with_its_options(call, monkeypatch) -> None:
    for place in (
        f"{TyperCommand.__module__}.TyperCommand.format_help",
        "wattcast.cli.main.shorten_help",
    ):
        monkeypatch.setattr(place, lambda *given: None)  # drawn in tests/cli/test_help.py
    asked = {}
    for page in EVERY:
        for line in [*documented(page), *documented(page, MENTION)]:
            argv = shlex.split(re.sub(r"\[[^]]*\]|\.\.\.|>.*", "", line))[1:]
            ours = argv[: argv.index("--")] if "--" in argv else argv
            options = frozenset(word.partition("=")[0] for word in ours if word.startswith("-"))
            asked.setdefault((*ours[:3], options), (page, ours))  # values are not looked at
    assert len(asked) > 100
    for page, ours in asked.values():
        done = call(*ours, "--help")
        assert done.code == 0, (page.name, ours, done.err)


@pytest.mark.parametrize(
    "page", mark_long([p for p in EVERY if any(map(runs, left_over(p)))], LONG_COMMANDS)
)
def test_every_other_command_runs(page: Path, call, stage: None) -> None:
    """Commands outside the blocks that are run as a whole, in order; not_run.txt says why some are
    left out.
    """
    for line in filter(runs, left_over(page)):
        run_line(call, line)


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({x for p in EVERY for x in left_over(p) if takes_long(x)}))
def test_commands_that_take_long_run_too(line: str, call, stage: None) -> None:
    run_line(call, line)


DAMAGE = {
    "random": lambda path: path.write_bytes(random.Random(29).randbytes(4000)),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


LATER = [pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGE if kind != "random"]


@pytest.mark.parametrize("kind", ["random", *LATER])
def test_a_damaged_file_is_no_internal_error(
    kind: str, call, staged_folder, tmp_path, monkeypatch
) -> None:
    """Damaged tables, journals and logs, and folders in their place, gave an internal error at
    thirteen places.
    """
    tried = 0
    for line in sorted({line for page in EVERY for line in left_over(page) if runs(line)}):
        argv = shlex.split(re.sub(r" \[[^]]*\]| ?\.\.\.", "", line))[1:]
        for name in {word.rstrip("/") for word in argv} & {
            path.name for path in staged_folder.iterdir()
        }:
            folder = shutil.copytree(staged_folder, tmp_path / str(tried), symlinks=True)
            monkeypatch.chdir(folder)
            found = [
                path for path in (folder / name, *(folder / name).rglob("*")) if path.is_file()
            ]
            found = [
                path for path in found if path.resolve().is_relative_to(folder.resolve())
            ]  # not the database that ships
            if found:
                DAMAGE[kind](min(found))
                done = call(*argv)
                assert "internal error" not in done.err, (line, name, done.err)
            tried += 1
    assert tried > 20


def test_what_is_not_run_is_documented_and_has_a_reason() -> None:
    for start, reason in NOT_RUN:
        assert any(line.startswith(start) for page in EVERY for line in left_over(page)), start
        assert len(reason) > 10


def test_examples_that_are_not_run_say_so() -> None:
    languages = {language for page in RUN for _, language, _ in fences(page)}
    assert languages <= {"sh", "python", "json", "yaml", "csv", "console", "text"}
    counted = [language for page in RUN for _, language, _ in fences(page)]
    assert counted.count("sh") + counted.count("python") >= 2 * counted.count("console")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="no mkdocs: pip install 'wattcast[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_asks_nobody(site: Path) -> None:
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert {
        "index.html",
        "start.html",
        "accuracy.html",
        "reference/cli.html",
        "reference/api.html",
    } <= pages
    assert {f"method/{page.stem}.html" for page in (DOCS / "method").glob("*.md")} <= pages
    for path in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', path.read_text()
        )
        assert not [address for address in fetched if "wattcast" not in address], path


@pytest.mark.slow
def test_links_between_pages_lead_somewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        if path.name == "404.html":
            continue
        for target in re.findall(
            r'<a[^>]+href="([^"#?:]+)(?:#[^"]*)?"', path.read_text(encoding="utf-8")
        ):
            assert (path.parent / target).exists(), f"{path.relative_to(site)}: {target}"


@pytest.mark.slow
def test_schemas_are_published_and_hold_for_what_is_printed(site: Path, call) -> None:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="no jsonschema: pip install 'wattcast[dev]'"
    )
    schema = json.loads((site / "reference" / "predict.schema.json").read_text())
    check = jsonschema.Draft202012Validator(schema)
    for more in ((), ("--price", "2USD/h")):
        check.validate(
            json.loads(
                call("predict", "gpt2", "--gpu", "h200", "--seq", "512", "--json", *more).out
            )
        )
    assert list(check.iter_errors({"wattcast": "1"})), "and not for anything"
    routes = json.loads((site / "reference" / "openapi.json").read_text())["paths"]
    assert {"/api/predict", "/api/plan"} <= routes.keys()


@pytest.mark.slow
def test_the_reference_names_every_command(site: Path) -> None:
    from wattcast.cli.main import COMMANDS

    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for verb in COMMANDS:
        assert f"wattcast {verb}" in text
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in (
        "wattcast.predict",
        "wattcast.plan",
        "wattcast.report.configuration_view.build_power_trace",
    ):
        assert f'id="{name}"' in api, name
    assert "Predict" in api, "with docstrings"
