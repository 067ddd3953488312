"""``wattcast measure``: power of commands, of an idle card, of its sensor and of logs.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from wattcast.cli.command_builder import command, declare_verb
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import JSON
from wattcast.cli.figure_options import PLOT_FILE
from wattcast.core.errors import (
    ExitCode,
    WattcastError,
    bad_value,
)
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.whole_files import check_writable, write_somewhere
from wattcast.lab.campaigns import campaign_verbs
from wattcast.measure import measure_verbs
from wattcast.options.run_options import ModelOptions
from wattcast.options.verb_options import part_of


@dataclass(frozen=True)
class MeasuredRunOptions:
    """What is measured, compared with a prediction, and saved."""

    against: Annotated[
        str | None,
        Option(
            "Model, workload file, or output of `wattcast predict --json`: say which term is off."
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            "With --against MODEL: the GPU it is predicted on; the options below are predict's."
        ),
    ] = None
    iterations: Annotated[int, Option("How often the command runs the predicted workload.")] = 1
    model: Annotated[
        Path | None,
        Option(
            "Power model of `lab fit counters --out`, or h200 or tegra-k1: estimate power "
            "from kernel launches."
        ),
    ] = None
    counters: Annotated[
        Path | None,
        Option(
            "With --model: counter book (.json) or ncu export (.csv), collected if it is not there."
        ),
    ] = None
    launches: Annotated[
        Path | None, Option("With --model: the PyTorch profiler trace that the command writes.")
    ] = None
    source: Annotated[str, Option("auto|nvml|amd|rapl: where readings come from.")] = "auto"
    device: Annotated[
        int | None,
        Option("Which device, counted from 0; default: the first that CUDA_VISIBLE_DEVICES shows."),
    ] = None
    json: Annotated[bool, JSON] = False
    plot: Annotated[Path | None, PLOT_FILE] = None
    save: Annotated[
        Path | None, Option("Keep the samples (.npz) for `wattcast serve --replay`.")
    ] = None


@command("measure run", part_of(ModelOptions, "batch", "seq", "phase", "dtype", "attention"))
def run(
    env: Environment,
    command: Annotated[list[str], Option("The command, after --.", positional=True)],
    choices: MeasuredRunOptions,
    **options: Any,
) -> CommandOutput:
    """Measure time, joules, mean and peak watts and clock of a command; its exit code passes
    through.

    A command that ended well exits with 5 where its energy is unknown, because the device was lost
    or its driver hung, or doubtful, because the energy counter and the power readings contradict
    one another.

    Example: wattcast measure run --against gpt2 --gpu h200 --batch 8 --seq 1024 --iterations 50 --
    python loop.py Example: wattcast measure run --model m.yaml --counters ncu.csv --launches
    trace.json -- python traced.py"""
    from wattcast.measure.measured_run import run_command
    from wattcast.measure.run_figure import draw_run_power
    from wattcast.measure.run_verdict import compare_with_prediction
    from wattcast.report.figure_style import save_figure

    # before the run, where a bad name costs nothing
    if choices.save is not None and choices.save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", choices.save.name)
    for path in (path for path in (choices.save, choices.plot) if path is not None):
        check_writable(path)
    if choices.model is None and (choices.counters or choices.launches):
        raise bad_value("--counters and --launches", "--model FILE beside them", "none")
    predicted = _load_prediction(choices.against, choices.gpu, options) if choices.against else {}
    prepared = None
    if choices.model is not None:
        from wattcast.cli.measure_bridges import estimate_power, prepare_estimate

        prepared = prepare_estimate(
            choices.model, choices.counters, choices.launches, choices.gpu, command
        )
    done = run_command(command, choices.source, choices.device, pass_output=not choices.json)
    code = done.shell_code
    trouble = None
    verdict = from_launches = None
    try:  # whatever goes wrong from here on, the measurement is printed
        if choices.save is not None:
            kept = write_somewhere(choices.save, done.samples.to_bytes())
            env.say(
                f"samples saved: {kept}"
                + (f", because {choices.save} could not be written" if kept != choices.save else "")
            )
            code = code if kept == choices.save else code or ExitCode.FAILED
        from_launches = None if prepared is None else estimate_power(*prepared, done)
        verdict = (
            compare_with_prediction(
                done.measurement, predicted, choices.iterations, choices.against
            )
            if choices.against
            else None
        )
        if choices.plot is not None:
            drawn = draw_run_power(done, predicted["predictions"][0] if predicted else None)
            save_figure(from_launches.figure(done) if from_launches else drawn, choices.plot)
    except WattcastError as error:
        trouble = error
    plain = done.plain()
    lines = [done.measurement.sentence]
    if verdict:
        plain["against"] = verdict.plain()
        lines.append(verdict.sentence)
    if from_launches:
        plain["model"] = from_launches.plain()
        lines.append(from_launches.sentence)
    took = f"the sampler took {100 * (done.measurement.overhead or 0.0):.2f} % of the processors"
    notes = [] if choices.json else [took]
    if done.identity.note:
        notes.append(done.identity.note)
    return CommandOutput(
        plain,
        "\n".join(lines),
        notes=notes,
        exit_code=code,
        fault=trouble,
    )


def _load_prediction(
    against: str,
    gpu: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the output of `predict --json` from a file that holds it, or predict now."""
    import msgspec

    from wattcast.predictor import api
    from wattcast.predictor.prediction_json import predictions_to_output

    if against.endswith(".json"):
        plain: Any = decode_json(read_bytes(Path(against)), object, against)
        if isinstance(plain, dict) and "predictions" in plain:
            return plain
    if gpu is None:
        raise bad_value(
            "--against", "a --gpu beside a model", "none", "Name the GPU the command runs on."
        )
    found: dict[str, Any] = msgspec.to_builtins(
        predictions_to_output([api.predict(against, gpu, **options)])
    )
    return found


for _verb in ("idle", "sensor", "log"):
    declare_verb(f"measure {_verb}", getattr(measure_verbs, _verb))
for _verb in ("models", "engine"):  # campaigns of the lab that users run on a card of their own
    declare_verb(f"measure {_verb}", getattr(campaign_verbs, _verb))
