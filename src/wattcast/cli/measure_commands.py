"""``wattcast measure``: power of commands, of an idle card, of its sensor and of logs.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

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

if TYPE_CHECKING:
    from wattcast.cli.measure_bridges import LaunchEstimate
    from wattcast.lab.counter_models.launch_power import CounterBook
    from wattcast.measure.measured_run import MeasuredRun
    from wattcast.measure.run_verdict import RunVerdict
    from wattcast.power.power_model import SavedModel


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


@command(
    "measure run",
    part_of(
        ModelOptions,
        "batch",
        "seq",
        "phase",
        "dtype",
        "attention",
    ),
)
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

    # before the run, where a bad name costs nothing
    _check_files(choices)
    predicted = _load_prediction(choices.against, choices.gpu, options) if choices.against else {}
    prepared = None
    if choices.model is not None:
        from wattcast.cli.measure_bridges import prepare_estimate

        prepared = prepare_estimate(
            choices.model,
            choices.counters,
            choices.launches,
            choices.gpu,
            command,
        )

    done = run_command(command, choices.source, choices.device, pass_output=not choices.json)
    outcome = _RunOutcome(done.shell_code)
    try:  # whatever goes wrong from here on, the measurement is printed
        outcome.save_samples(env, choices, done)
        outcome.compare(choices, done, predicted, prepared)
        outcome.draw(choices, done, predicted)
    except WattcastError as error:
        outcome.fault = error
    return outcome.describe(done, shows_overhead=not choices.json)


def _check_files(choices: MeasuredRunOptions) -> None:
    """Raise an error if a file could not be written after the run, or lacks what belongs to it."""
    if choices.save is not None and choices.save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", choices.save.name)
    for path in (choices.save, choices.plot):
        if path is not None:
            check_writable(path)
    if choices.model is None and (choices.counters or choices.launches):
        raise bad_value("--counters and --launches", "--model FILE as well", "none")


@dataclass
class _RunOutcome:
    """What follows from a measured run, as far as nothing went wrong."""

    exit_code: int
    verdict: RunVerdict | None = None  # on the prediction
    estimate: LaunchEstimate | None = None  # of power, from kernel launches
    fault: WattcastError | None = None

    def save_samples(
        self,
        env: Environment,
        choices: MeasuredRunOptions,
        done: MeasuredRun,
    ) -> None:
        """Save the samples, in another place where the file cannot be written."""
        if choices.save is None:
            return
        saved_at = write_somewhere(choices.save, done.samples.to_bytes())
        if saved_at == choices.save:
            env.say(f"samples saved: {saved_at}")
            return
        env.say(f"samples saved: {saved_at}, because {choices.save} could not be written")
        self.exit_code = self.exit_code or ExitCode.FAILED

    def compare(
        self,
        choices: MeasuredRunOptions,
        done: MeasuredRun,
        predicted: dict[str, Any],
        prepared: tuple[SavedModel, CounterBook, Path] | None,
    ) -> None:
        """Estimate power from launches, and judge the prediction, where asked for."""
        from wattcast.measure.run_verdict import compare_with_prediction

        if prepared is not None:
            from wattcast.cli.measure_bridges import estimate_power

            self.estimate = estimate_power(*prepared, done)
        if choices.against:
            self.verdict = compare_with_prediction(
                done.measurement, predicted, choices.iterations, choices.against
            )

    def draw(
        self,
        choices: MeasuredRunOptions,
        done: MeasuredRun,
        predicted: dict[str, Any],
    ) -> None:
        """Save a figure of the power over time, where asked for."""
        from wattcast.measure.run_figure import draw_run_power
        from wattcast.report.figure_style import save_figure

        if choices.plot is None:
            return
        if self.estimate is not None:
            figure = self.estimate.figure(done)
        else:
            figure = draw_run_power(done, predicted["predictions"][0] if predicted else None)
        save_figure(figure, choices.plot)

    def describe(
        self,
        done: MeasuredRun,
        *,
        shows_overhead: bool,
    ) -> CommandOutput:
        """Return the measurement and what follows from it, as JSON and as sentences."""
        plain = done.plain()
        lines = [done.measurement.sentence]
        if self.verdict is not None:
            plain["against"] = self.verdict.plain()
            lines.append(self.verdict.sentence)
        if self.estimate is not None:
            plain["model"] = self.estimate.plain()
            lines.append(self.estimate.sentence)
        notes = []
        if shows_overhead:
            overhead_percent = 100 * (done.measurement.overhead or 0.0)
            notes.append(f"the sampler took {overhead_percent:.2f} % of the processors")
        if done.identity.note:
            notes.append(done.identity.note)
        return CommandOutput(
            plain,
            "\n".join(lines),
            notes=notes,
            exit_code=self.exit_code,
            fault=self.fault,
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
            "--against", "a --gpu with a model", "none", "Name the GPU the command runs on."
        )
    output: dict[str, Any] = msgspec.to_builtins(
        predictions_to_output([api.predict(against, gpu, **options)])
    )
    return output


for _verb in ("idle", "sensor", "log"):
    declare_verb(f"measure {_verb}", getattr(measure_verbs, _verb))
for _verb in ("models", "engine"):  # campaigns of the lab that users run on a card of their own
    declare_verb(f"measure {_verb}", getattr(campaign_verbs, _verb))
