"""The files and options from which power is computed: what ``lab power-trace`` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattcast.core.option_declaration import Option
from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect


@dataclass(frozen=True)
class TraceRequest:
    """The files and options of a user; None leaves a choice to the files."""

    trace: Annotated[
        Path,
        Option(
            "Metric trace of GPUWattch or AccelWattch, plain or .gz; power report, log, "
            "gem5's stats.txt.",
            positional=True,
        ),
    ]
    architecture: Annotated[
        Path,
        Option(
            "Architecture file: GPUWattch or AccelWattch XML; or a GPU with "
            "energies: h200 (measured), a100-sxm-80gb, h100-sxm, h100-nvl, gh200, b200, t4, "
            "rtx-3070, rtx-3090, rtx-4090 (carried over).",
            "config",
        ),
    ]
    energies: Annotated[
        Path | None,
        Option("Energies per count: dumped CSV or our YAML; default: from the architecture."),
    ] = None  # None: built bottom-up from the architecture
    out: Annotated[Path, Option("Folder for the results.")] = Path("power")
    compat: Annotated[
        SimulatorDialect | None,
        Option("Compute as the original does, with its quirks: gpuwattch|accelwattch."),
    ] = None
    simulator_config: Annotated[
        Path | None,
        Option(
            "The file gpgpusim.config, if it is not beside the XML.",
            panel="The simulated run, where no file says",
        ),
    ] = None
    kernels: Annotated[
        Path | None,
        Option(
            "Kernel names, one a line; CSV name,uid,samples|cycles,ipc,threads; or a power "
            "report or log."
        ),
    ] = None
    components: Annotated[
        tuple[Path, ...], Option("YAML with further components.", panel="The chip")
    ] = ()
    dvfs: Annotated[
        Path | None,
        Option("CSV with sample,clock,voltage, which hold from that sample on.", panel="The chip"),
    ] = None
    leakage: Annotated[
        Path | None, Option("McPAT's area and leakage listing.", panel="The chip")
    ] = None
    gate_idle_sms: Annotated[bool, Option("Count no leakage of idle SMs.", panel="The chip")] = (
        False
    )
    threads_per_warp: Annotated[
        float | None,
        Option("Active threads of a warp.", panel="The simulated run, where no file says"),
    ] = None
    sm_count: Annotated[
        int | None, Option("Number of SMs.", "sms", panel="The simulated run, where no file says")
    ] = None
    clock_hz: Annotated[
        float | None,
        Option(
            "Core clock, such as 700MHz.", unit="Hz", panel="The simulated run, where no file says"
        ),
    ] = None
    sample_cycle: Annotated[
        int | None,
        Option(
            "Core cycles of a sample.",
            "sample-cycles",
            panel="The simulated run, where no file says",
        ),
    ] = None
    steady: Annotated[
        str | None, Option("What counts as a steady state: watts:samples, such as 8:4.")
    ] = None
    compress: Annotated[
        bool | None,
        Option(
            "Compress the results; default: if the trace is compressed.",
            "gzip/plain",
            panel="Files",
        ),
    ] = None
    parquet: Annotated[bool, Option("Write every sample to samples.parquet.", panel="Files")] = True
    figure: Annotated[bool, Option("Draw components.png.", panel="Files")] = True
    follow_s: Annotated[
        float, Option("Read a growing trace until nothing has come for so long: 10s.", unit="s")
    ] = 0.0  # read a growing trace until so long nothing has come
    stamped: Annotated[
        bool, Option("Name files as the manual does, with the date.", "date-stamp", panel="Files")
    ] = False  # names of files as in the manual, with date and time
    ran_with: Annotated[
        Path | None,
        Option(
            "AccelWattch XML the simulator ran with, if another one.",
            panel="The simulated run, where no file says",
        ),
    ] = None  # architecture file the simulator ran with, whose factors its unit counters hold
