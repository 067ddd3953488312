"""``wattcast lab validate`` and ``wattcast doctor``: how accurate Wattcast is, and what this
machine has.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from wattcast import __version__
from wattcast.cli.command_builder import command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.figure_options import (
    FIGURE_FORMAT,
    FIGURES_FOLDER,
    PLOT_FILE,
)
from wattcast.core import bad_value, units
from wattcast.core.errors import clip_text
from wattcast.core.option_declaration import Option
from wattcast.core.own_cards import (
    forget_own_cards,
    read_own_cards,
    write_own_card,
)
from wattcast.core.own_host import (
    OwnHost,
    forget_own_host,
    read_own_host,
    write_own_host,
)
from wattcast.core.strict_files import read_shipped_table, reference_folder
from wattcast.core.whole_files import write_whole
from wattcast.measure.visible_devices import (
    CUDA_LIST,
    HIP_LISTS,
    ROCR_LIST,
)
from wattcast.report.text_tables import print_rows


@dataclass(frozen=True)
class LedgerOptions:
    """What of the ledger is computed, explained, drawn and written."""

    refit: Annotated[
        bool, Option("Repeat the cross-validation instead of reading its results.")
    ] = False
    ablations: Annotated[
        bool,
        Option("Judge also published sets that take minutes; results are kept for the next call."),
    ] = False
    again: Annotated[bool, Option("With --ablations: judge them even where results were kept.")] = (
        False
    )
    write: Annotated[str, Option("Write the ledger as a page, such as docs/accuracy.md.")] = ""
    quantity: Annotated[str, Option("What --plot draws: latency|power|clock.")] = "latency"
    plot: Annotated[Path | None, PLOT_FILE] = None
    figures: Annotated[Path | None, FIGURES_FOLDER] = None
    format: Annotated[str, FIGURE_FORMAT] = "png"
    explain: Annotated[str, Option("Print the commands behind a set, or one row, by name.")] = ""
    files: Annotated[Path | None, Option("Folder to write the files that those read.")] = None
    published: Annotated[
        Path | None,
        Option("Judge a simulator's own validation: config, hw_total_W, sim_total_W, parts."),
    ] = None
    write_docs: Annotated[
        bool,
        Option("Judge every row anew and fill all figures of README, docs and paper, in a clone."),
    ] = False
    fill_docs: Annotated[
        bool, Option("Fill figures of README, docs and paper from docs/ledger.json.")
    ] = False


@command("lab validate")
def validate(
    env: Environment,
    choices: LedgerOptions,
) -> CommandOutput:
    """Print held-out errors beside trivial floors, published numbers and goals."""
    from wattcast.lab.paper_figures.validation_figures import save_ledger_figures
    from wattcast.lab.validate import ledger
    from wattcast.lab.validate.ledger_figures import draw_held_out

    if choices.explain:
        return _explain_rows(env, choices.explain, choices.files)
    if choices.published is not None:
        return _judge_published(choices.published)
    if choices.files is not None:
        raise bad_value("--files", "a row or set to write them for (--explain ROW)", "none")
    if choices.fill_docs:
        return _fill_docs(env, None)
    if choices.quantity not in ("latency", "power", "clock"):
        raise bad_value("--quantity", "latency, power or clock", choices.quantity)
    long = choices.ablations or choices.write_docs
    rows = ledger.build_ledger(
        choices.refit,
        env.say,
        long=long,
        again=choices.again,
        variables=env.variables,
    )
    if choices.write_docs:
        write_whole(Path("docs", "accuracy.md"), ledger.ledger_to_markdown(rows).encode())
        _fill_docs(env, rows)
    if choices.write:
        write_whole(Path(choices.write), ledger.ledger_to_markdown(rows).encode())
    for path in (
        save_ledger_figures(choices.figures, ending=choices.format)
        if choices.figures is not None
        else ()
    ):
        env.say(f"figure saved: {path}")
    if choices.plot is not None:
        env.save_plot(draw_held_out(choices.quantity), choices.plot)
    return CommandOutput({"rows": rows}, ledger.format_ledger(rows))


def _judge_published(table: Path) -> CommandOutput:
    """Return the errors that a simulator's published watts have by its own measured ones."""
    from wattcast.lab.validate.public_checks.simulator_runs import published_model_errors

    errors = published_model_errors(table)
    lines = [f"{'variant':32} {'kernels':>7} {'mean error':>10} {'correlation':>11}  worst kernel"]
    lines += [
        f"{error.config:32} {error.kernels:7} {error.mape:8.1f} % {error.correlation:11.3f}  "
        f"{error.worst_kernel} {error.worst:+.1f} %"
        for error in errors
    ]
    notes = [
        f"{error.config}: components add up to {error.least_sum:.3f} to {error.most_sum:.3f} of "
        "the total."
        for error in errors
        if error.least_sum is not None
        and error.most_sum is not None
        and not 0.999 < error.least_sum <= error.most_sum < 1.001
    ]
    rows = [vars(error) for error in errors]
    return CommandOutput({"variants": rows}, "\n".join(lines), notes=notes)


def _fill_docs(env: Environment, rows: Sequence[dict[str, Any]] | None) -> CommandOutput:
    """Write figures of the ledger into README and docs of the clone that this runs in."""
    from wattcast.cli.main import main
    from wattcast.lab.validate import doc_figures

    def run(words: Sequence[str]) -> str:
        env.say(f"wattcast {' '.join(words)}")
        return doc_figures.run_command(words, main, Environment)

    pages = [str(page) for page in doc_figures.write_docs(Path(), rows, run)]
    for page in pages:
        env.say(f"written: {page}")
    return CommandOutput({"pages": pages}, "")


def _explain_rows(
    env: Environment,
    asked: str,
    folder: Path | None,
) -> CommandOutput:
    """Return the commands that predict rows of the ledger, and write the files that these read."""
    from wattcast.lab.validate.judged_sets import OtherSet, explain_rows
    from wattcast.lab.validate.typed_commands import write_files

    explained = explain_rows(asked, reference_folder(env.variables))
    if isinstance(explained, OtherSet):
        plain = {
            "set": asked,
            "asked": explained.question,
            "why": explained.why,
            "command": explained.command,
        }
        return CommandOutput(plain, explained.sentence)
    if folder is not None:
        for path in write_files((row.command for row in explained), folder):
            env.say(f"written: {path}")
    elif any(row.command.files for row in explained):
        env.say("Some commands read files; --files DIR writes them.")
    rows = [
        {
            "set": row.where,
            "row": row.id,
            "command": row.command.line,
            "files": list(row.command.files),
            "measured": dict(row.measured),
        }
        for row in explained
    ]
    lines = []
    for row in explained:
        lines += [f"# {row.name}", row.command.line]
    return CommandOutput({"rows": rows}, "\n".join(lines))


@command("doctor")
def doctor(
    env: Environment,
    host: Annotated[
        bool,
        Option(
            "Measure what issuing an operator costs this host, in seconds, and remember it "
            "for predict; needs a GPU."
        ),
    ] = False,
    card: Annotated[
        bool,
        Option(
            "Measure how this NVIDIA card and its host differ from the usual ones, in half a "
            "minute, and remember it for predictions of its kind."
        ),
    ] = False,
    forget_host: Annotated[bool, Option("Forget the host that was measured.")] = False,
    forget_card: Annotated[bool, Option("Forget the cards that were measured.")] = False,
) -> CommandOutput:
    """Look at this machine: libraries, data, devices; say what works and how to get the rest."""
    asked = {
        "--host": host,
        "--card": card,
        "--forget-host": forget_host,
        "--forget-card": forget_card,
    }
    chosen = [name for name, is_asked in asked.items() if is_asked]
    if len(chosen) > 1:
        raise bad_value("doctor", f"one of {', '.join(asked)}", " and ".join(chosen))
    if host:
        return _measure_host()
    if card:
        return _measure_card(env)
    if forget_host:
        gone = forget_own_host()
        sentence = "The host of this machine is forgotten." if gone else "No host was remembered."
        return CommandOutput({"forgotten": gone}, sentence)
    if forget_card:
        gone = forget_own_cards()
        sentence = "The cards of this machine are forgotten." if gone else "No card was remembered."
        return CommandOutput({"forgotten": gone}, sentence)
    checks = examine_machine(env.variables)
    rows = [
        vars(check)
        | {"name": ("ok   " if check.ok else "--   ") + check.name}
        | ({} if check.ok else {"found": f"{check.found or 'missing'}: {check.advice}"})
        for check in checks
    ]
    columns = {
        "name": "",
        "found": "found",
        "purpose": "what it is for",
    }
    plain = {"checks": [vars(check) for check in checks]}
    return CommandOutput(
        plain, lambda console: print_rows(console, rows, columns, left=tuple(columns))
    )


def _measure_host() -> CommandOutput:
    """Time a small model on this machine and remember what issuing an operator costs."""
    from wattcast.measure.host_timing import TOKENS, time_small_model
    from wattcast.predictor.api import host_cost_of_run

    latency_s, words = time_small_model()
    cost_s = host_cost_of_run(
        "gpt2",
        latency_s,
        batch=1,
        seq=TOKENS,
        head="none",
    )
    today = datetime.now(UTC).date().isoformat()
    path = write_own_host(OwnHost(cost_s, words, today))
    plain = {
        "host_s_per_operator": cost_s,
        "latency_s": latency_s,
        "measured": words,
    }
    sentence = (
        f"{units.show(cost_s, 's', 3)} to issue an operator ({words}, {units.show(latency_s, 's')} "
        f"a pass). Predictions of eager models take it from {path} from now on; engines keep the "
        "host that was measured of vLLM. Undo: wattcast doctor --forget-host."
    )
    return CommandOutput(plain | {"file": str(path)}, sentence)


def _measure_card(env: Environment) -> CommandOutput:
    """Measure the first visible card, compare it with the usual one, and remember both factors."""
    from wattcast.calibrate.card_factor import compare_card, name_card
    from wattcast.measure.card_loads import measure_card

    comparison = compare_card(measure_card(env.say, name_card))
    path = write_own_card(comparison.card)
    plain = comparison.to_dict() | {"file": str(path)}
    undo = (
        f"Predictions of a {comparison.gpu} take this from {path} from now on and say so. "
        "Ignore it: --power-factor 1 --host-factor 1; undo: wattcast doctor --forget-card."
    )
    return CommandOutput(plain, "\n".join([*comparison.sentences, undo]))


@dataclass(frozen=True)
class ToolCheck:
    """One thing looked for: whether it is there, what was found, what it is for, how to get it."""

    name: str
    ok: bool
    found: str
    purpose: str
    advice: str


BASE = "numpy; msgspec; PyYAML yaml; typer; rich"  # distributions, with a module of another name


def examine_machine(variables: Mapping[str, str]) -> list[ToolCheck]:
    """Run all checks in a fixed order; none of them wakes a GPU."""
    from wattcast.report.html_report import BROWSERS

    version = f"{__version__}, Python {platform.python_version()}"
    base = "predict, gpus, models, compare, report"
    checks = [
        ToolCheck(
            "wattcast",
            True,
            version,
            "",
            "",
        ),
        _check_libraries("base", BASE, base, "pip install wattcast"),
    ]
    for row in read_shipped_table("wattcast.cli", "extras.csv"):
        name = f"extra {row['extra']}"
        advice = f"pip install 'wattcast[{row['extra']}]'"
        checks.append(_check_libraries(name, row["libraries"], row["purpose"], advice))
    counters = "lab counters: hardware counters of NVIDIA GPUs"
    return [
        *checks,
        _check_driver(),
        *_check_visible_cards(variables),
        _check_tool(("ncu",), counters, "install Nsight Compute"),
        _check_tool(BROWSERS, "reports as PDF, tests of the page", "install Chromium"),
        _check_reference(variables),
        _check_own_host(),
        _check_own_cards(),
        _check_card_settings(),
    ]


def _check_driver() -> ToolCheck:
    try:
        driver = CDLL("libnvidia-ml.so.1")._name
    except OSError:
        driver = ""
    purpose = "measuring and managing NVIDIA GPUs"
    advice = "no NVIDIA driver on this machine; predictions need none"
    return ToolCheck(
        "NVIDIA driver",
        bool(driver),
        driver,
        purpose,
        advice,
    )


def _check_visible_cards(variables: Mapping[str, str]) -> list[ToolCheck]:
    """Show the variables that hide cards; nothing where none is set."""
    names = dict.fromkeys((CUDA_LIST, *HIP_LISTS, ROCR_LIST))
    words = [f"{name}={clip_text(variables[name], 40)!r}" for name in names if name in variables]
    if not words:
        return []
    purpose = "measure and manage take the first card it shows; --device N overrides it"
    return [
        ToolCheck(
            "visible GPUs",
            True,
            ", ".join(words),
            purpose,
            "",
        )
    ]


def _check_reference(variables: Mapping[str, str]) -> ToolCheck:
    is_there = reference_folder(variables) is not None
    advice = "set WATTCAST_REFERENCE to its folder"
    return ToolCheck(
        "reference data",
        is_there,
        "found" if is_there else "",
        "lab validate",
        advice,
    )


def _check_own_host() -> ToolCheck:
    """Show what issuing an operator costs on this machine, where it was measured."""
    advice = "not measured: wattcast doctor --host (needs PyTorch, transformers and a CUDA device)"
    purpose = "host-bound predictions"
    host = read_own_host()
    if host is None:
        return ToolCheck(
            "own host",
            False,
            "",
            purpose,
            advice,
        )
    cost = f"{units.show(host.host_s_per_operator, 's', 3)} an operator"
    return ToolCheck(
        "own host",
        True,
        cost,
        purpose,
        advice,
    )


def _check_own_cards() -> ToolCheck:
    """Show how the cards of this machine differ from the usual ones, where that was measured."""
    cards = read_own_cards()
    words = [
        f"{card.name} {card.uuid[:12]}: {list(card.power.values())[-1].value:.3f} times the watts"
        for card in cards
    ]
    return ToolCheck(
        "own cards",
        bool(cards),
        "; ".join(words),
        "watts and host of predictions",
        "not measured: wattcast doctor --card (needs PyTorch and an NVIDIA card)",
    )


def _check_card_settings() -> ToolCheck:
    """Look for cards that a dead process left changed; a daemon's cards are not left."""
    from wattcast.control.card_notes import (
        describe_leftover,
        is_tended,
        list_leftovers,
    )

    changes = [describe_leftover(note) for note in list_leftovers() if not is_tended(note.uuid)]
    advice = "; ".join([*changes, "run `wattcast manage restore` as root"])
    state = "left changed" if changes else "none left changed"
    return ToolCheck(
        "GPU settings",
        not changes,
        state,
        "manage",
        advice,
    )


def _check_libraries(
    name: str,
    wanted: str,
    purpose: str,
    advice: str,
) -> ToolCheck:
    """Look for distributions by their modules, and give the version of each."""
    there: list[str] = []
    missing: list[str] = []
    for library in wanted.split("; "):
        distribution, _, module = library.partition(" ")
        try:
            is_installed = importlib.util.find_spec(module or distribution) is not None
        except ModuleNotFoundError:  # a parent of the module
            is_installed = False
        try:
            version = importlib.metadata.version(distribution) if is_installed else ""
        except importlib.metadata.PackageNotFoundError:
            version = "version unknown"
        (there if is_installed else missing).append(f"{distribution} {version}".strip())
    lacking = f"{', '.join(missing)} missing" if missing else ""
    return ToolCheck(
        name,
        not missing,
        "; ".join(filter(None, [", ".join(there), lacking])),
        purpose,
        advice,
    )


def _check_tool(
    names: Sequence[str],
    purpose: str,
    advice: str,
) -> ToolCheck:
    path = next(filter(None, (shutil.which(name) for name in names)), None)
    return ToolCheck(
        names[0],
        path is not None,
        path or "",
        purpose,
        advice,
    )
