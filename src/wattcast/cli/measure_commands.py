"""``wattcast measure``: power of commands, of an idle card, of its sensor and of logs.

Nothing here changes a clock, a limit or a mode of a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wattcast.cli.shared_options import CommandOutput, Environment, command, declare_verb
from wattcast.core.errors import ExitCode, WattcastError, bad_value
from wattcast.core.strict_files import decode_json, read_bytes
from wattcast.core.whole_files import check_writable, write_somewhere
from wattcast.lab.campaigns import campaign_verbs
from wattcast.measure import measure_verbs


@command("measure run", "batch", "seq", "phase", "dtype", "attention")
def run(
    env: Environment,
    command: list[str],
    against: str | None = None,
    gpu: str | None = None,
    iterations: int = 1,
    model: Path | None = None,
    counters: Path | None = None,
    launches: Path | None = None,
    source: str = "auto",
    device: int | None = None,
    json: bool = False,
    plot: Path | None = None,
    save: Path | None = None,
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
    if save is not None and save.suffix != ".npz":
        raise bad_value("--save", "a name that ends in .npz", save.name)
    for path in (path for path in (save, plot) if path is not None):
        check_writable(path)
    if model is None and (counters or launches):
        raise bad_value("--counters and --launches", "--model FILE beside them", "none")
    predicted = _load_prediction(against, gpu, options) if against else {}
    prepared = None
    if model is not None:
        from wattcast.cli.measure_bridges import estimate_power, prepare_estimate

        prepared = prepare_estimate(model, counters, launches, gpu, command)
    done = run_command(command, source, device, pass_output=not json)
    code = done.shell_code
    trouble = None
    verdict = from_launches = None
    try:  # whatever goes wrong from here on, the measurement is printed
        if save is not None:
            kept = write_somewhere(save, done.samples.to_bytes())
            env.say(
                f"samples saved: {kept}"
                + (f", because {save} could not be written" if kept != save else "")
            )
            code = code if kept == save else code or ExitCode.FAILED
        from_launches = None if prepared is None else estimate_power(*prepared, done)
        verdict = (
            compare_with_prediction(done.measurement, predicted, iterations, against)
            if against
            else None
        )
        if plot is not None:
            drawn = draw_run_power(done, predicted["predictions"][0] if predicted else None)
            save_figure(from_launches.figure(done) if from_launches else drawn, plot)
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
    notes = [] if json else [took]
    if done.identity.note:
        notes.append(done.identity.note)
    return CommandOutput(plain, "\n".join(lines), notes=notes, exit_code=code, fault=trouble)


def _load_prediction(against: str, gpu: str | None, options: dict[str, Any]) -> dict[str, Any]:
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
