"""One idea has one form: an option that takes a quantity takes it in the same words in every
command that has it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wattcast.cli.main import walk_commands

# option -> the same amount in two forms, and forms that are refused in a sentence
FORMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "--clock": ("1500MHz", "1.5GHz", ("1500", "1500W")),
    "--power-limit": ("500W", "0.5kW", ("500", "500MHz")),
    "--site-power": ("2000W", "2kW", ("2000", "2s", "0W")),
    "--cap": ("180W", "0.18kW", ("180", "180MHz")),
    "--host-launch": ("12us", "0.012ms", ("12", "12W", "-12us")),
    "--duration": ("50ms", "0.05s", ("50", "50W", "0ms")),
    "--temperature": ("60C", "60 C", ("60", "60W")),
    "--latency": ("10s", "10000ms", ("10", "10W")),
    "--period": ("1s", "1000ms", ("1", "1W")),
    "--interval": ("5s", "5000ms", ("5", "5W")),
    "--idle-interval": ("60s", "1min", ("60", "60W")),
    "--limit": ("15s", "0.25min", ("15", "15W")),
    "--budget": ("60s", "1min", ("60", "60W")),
    "--ttft": ("500ms", "p99:0.5s", ("500", "p99", "p0:1s", "x:1s", "1W", "0ms")),
    "--tpot": ("50ms", "p99:0.05s", ("50", "p99", "p100:1s", "1W")),
    "--seconds": ("60", "1min", ("soon", "60W", "-1", "0")),
    "--traffic-seconds": ("12", "0.2min", ("soon", "12W")),
    "--rate": ("2/s", "120/min", ("2", "2W", "0/s")),
    "--slowdown": ("50%", "0.5", ("5", "half", "-5%")),
    "--noise": ("1%", "0.01", ("2", "some", "200%")),
    "--headroom": ("20%", "0.2", ("20", "some", "-5%")),
    "--memory-utilisation": ("80%", "0.8", ("80", "120%", "0%")),
    "--prefix-hit-rate": ("10%", "0.1", ("10", "120%")),
    "--acceptance-rate": ("60%", "0.6", ("60", "120%")),
    "--loss-share": ("5%", "0.05", ("5", "much")),
    "--host-share": ("30%", "0.3", ("30", "much")),
    "--padding": ("10%", "0.1", ("10", "100%")),
    "--pause-share": ("5%", "0.05", ("5", "much")),
    "--price": ("2.50/h", "h200=2.50USD/h", ("cheap", "2.50/kWh", "-1/h")),
    "--electricity": ("0.12/kWh", "0.12USD/kWh", ("0.12", "0.12/h")),
    "--carbon": ("400g/kWh", "us", ("400", "atlantis")),
    "--transfer": ("50GB/s", "50000MB/s", ("50", "50W")),
    "--network": ("50GB/s", "50000MB/s", ("50", "50W")),
    "--capacity": ("80GB", "80000MB", ("80", "80W")),
    "--voltage": ("0.9V", "900mV", ("0.9", "1W")),
    "--feature-size": ("28nm", "0.028um", ("28", "28W")),
    "--arrivals": ("poisson", "diurnal:peak=1.5,period=24h", ("posson", "diurnal:period=24")),
}
UNITS_OF_A_LIST = {
    "--clocks",
    "--limits",
    "--where",
    "--shortest",
    "--follow",
    "--offset",
}  # ranges; of one command
# Refused without the option they belong to; tested with it
BESIDE_ANOTHER = {
    "--begin",
    "--span",
    "--window",
    "--grid",
    "--power-span",
    "--checkpoint-time",
    "--think-time",
    "--turn-pause",
    "--gpu-power",
    "--event-cap",
    "--core-clock",
    "--memory-clock",
    "--lock",
    "--inlet",
}
LINES = {  # a quick call of each command, which the options are added to
    "predict": "predict gpt2 --gpu h200 --seq 64",
    "compare": "compare gpt2@h200 ,batch=2 --seq 64",
    "simulate": "simulate gpt2 --gpu h200 --rate 2/s --requests 3 --prompt 16 --output 4",
    "plan": "plan gpt2 --gpu h200 --rate 1/s --prompt 16 --output 4 --tp 1 --requests 20",
    "train": "train gpt2 --gpu h200 --gpus 1 --seq 128 --global-batch 1",
    "explore sweep": "explore sweep gpt2 --gpu h200 --seq 64 --vary batch=1,2",
    "explore designs": "explore designs gpt2 --gpu h200 --seq 64 --vary sm_count=64,128",
    "explore fleet": "explore fleet fleet.yaml",
    "manage knobs": "manage knobs gpt2 --gpu h200 --seq 64",
    "manage simulate": "manage simulate gpt2 --gpu h200 --seq 64",
    "manage rehearse": "manage rehearse gpt2 --rate 2/s --seconds 5 --prompt 16 --output 4",
    "models show": "models show gpt2 --seq 64",
    "gpus show": "gpus show h200 --energies",
    "lab kernel": "lab kernel linear 512x512x512 --gpu h200",
}
# what needs a GPU, a server or a file of measurements: wrong forms are refused before any is asked
# for
REFUSING = {
    "report": "report gpt2 --gpu h200 --seq 64 --out r.html",  # predict's options
    "manage watch": "manage watch",
    "manage run": "manage run --metrics http://localhost:1/metrics",
    "manage serve": "manage serve --metrics http://localhost:1/metrics",
    "manage site": "manage site nowhere.sock",
    "measure idle": "measure idle",
    "measure log": "measure log power.csv",
    "measure models": "measure models --out rows",
    "measure engine": "measure engine --out rows",
    "export otel": "export otel --source nvml --count 1",
    "export prometheus": "export prometheus --source nvml --once",
    "serve": "serve",
    "lab multimedia": "lab multimedia --out rows",
    "lab kernels": "lab kernels --out rows",
    "lab kit": "lab kit rows.kit.json.gz",
    "check": "check expected.json --metrics metrics.txt",
}
EXCLUDED = {("explore sweep", "--latency"), ("manage simulate", "--latency")}  # beside --slowdown
OPTIONS = {
    words: {o.opts[0] for o in command.params if o.opts[0] in FORMS}
    for words, command in walk_commands()
}
FLEET = "gpus: {h200: 1}\nworkloads:\n  - {workload: gpt2, rate: 1/s, options: {seq: 64}}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)


def test_every_option_with_a_unit_is_in_the_table() -> None:
    quantity = re.compile(
        r"\d ?(?:ms|us|s|min|h|k?W|[MG]Hz|%|/s|GB/s|GB|C|V|nm)(?![\w:])|/kWh|\d/h\b"
    )
    shown = {
        option.opts[0]
        for _, command in walk_commands()
        for option in command.params
        if option.param_type_name == "option" and quantity.search(f"{option.help} {option.default}")
    }
    assert shown - set(FORMS) - UNITS_OF_A_LIST - BESIDE_ANOTHER == set()
    assert {words for words, options in OPTIONS.items() if options} - set(LINES) - set(
        REFUSING
    ) <= {
        *("manage replay", "lab microbench", "lab counters"),  # the options of another command
        "manage hold",  # clocks and a limit before a program, parsed alike
        "hall",  # a slowdown, which belongs to --shed
        *(
            "lab power-trace",
            "lab power-meter",
            "lab estimate",
            "lab fit component",
        ),  # a core clock, parsed alike
    }


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("words", LINES)
def test_a_command_takes_both_forms(call, words: str, form: int) -> None:
    added = [
        f"{name}={FORMS[name][form]}"
        for name in sorted(OPTIONS[words])
        if (words, name) not in EXCLUDED
    ]
    done = call(*LINES[words].split(), *added)
    assert done.code == 0, (added, done.err)


def list_wrong_forms(words: str, is_thorough: bool) -> list[str]:
    """Return options of a command in wrong forms: one of each option, which differs from command
    to command, or all.
    """
    place = [*LINES, *REFUSING].index(words)
    listed = []
    for name in sorted(OPTIONS[words]):
        values = FORMS[name][2]
        chosen = values if is_thorough else [values[place % len(values)]]
        listed += [f"{name}={value}" for value in chosen]
    return listed


@pytest.mark.parametrize("is_thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", {**LINES, **REFUSING})
def test_wrong_forms_are_refused(call, words: str, is_thorough: bool) -> None:
    for added in list_wrong_forms(words, is_thorough):
        done = call(*{**LINES, **REFUSING}[words].split(), added)
        assert done.code == 2, (added, done.err)
        assert added.partition("=")[0].strip("-").replace("-", "_") in done.err.replace("-", "_"), (
            added,
            done.err,
        )
        assert done.err.count("\n") <= 2, (added, done.err)
