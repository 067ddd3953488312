"""``wattcast lab kernel`` and ``lab carry-over``: look into one kernel, and judge chips of other
designs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from wattcast.cli.command_builder import PLOT, command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import GPU
from wattcast.core.errors import MissingTool
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import REFERENCE_VARIABLE, reference_folder
from wattcast.options.setting_options import POINT_SETTINGS, SettingOptions
from wattcast.options.verb_options import VerbOptions, part_of

_SETTINGS = VerbOptions("kernel", part_of(SettingOptions, *POINT_SETTINGS, "bundle"))


@command("lab kernel", _SETTINGS, PLOT)
def kernel(
    operator: Annotated[
        str, Option("Operator: linear|bmm|attention|softmax|layernorm|rmsnorm.", positional=True)
    ],
    sizes: Annotated[
        str, Option("Sizes of the operator, such as 4096x4096x4096: m, n, k.", positional=True)
    ],
    gpu: Annotated[str, GPU],
    dtype: Annotated[str, Option("Number format of operands.")] = "bf16",
    profile: Annotated[
        Path | None, Option("Nsight Compute CSV of one run of it, to show beside the prediction.")
    ] = None,
    **options: Any,
) -> CommandOutput:
    """Look into one kernel: tile and why, waves, bytes at every level, phases, watts over its life.

    Examples: wattcast lab kernel linear 4096x4096x4096 --gpu h200 --plot kernel.png
    ... lab kernel bmm 64x1024x1024x128 --gpu h200 --clock 1500MHz
    ... lab kernel linear 4096x4096x4096 --gpu h200 --profile ncu.csv
    """
    from wattcast.predictor import api
    from wattcast.report.kernel_report import (
        draw_kernel,
        kernel_to_plain,
        print_kernel,
        view_numbered_kernel,
    )
    from wattcast.workload.readers.one_operator import graph_of_operator

    options.setdefault("host_launch", "0us")  # back to back, as a benchmark runs a kernel
    prediction = api.predict(graph_of_operator(operator, sizes, dtype), gpu, **options)
    view = view_numbered_kernel(prediction, 1)
    output = CommandOutput.of(view, kernel_to_plain, print_kernel, draw_kernel)
    if profile is None:
        return output

    from wattcast.lab.validate import profiled_kernel

    counted = profiled_kernel.read_profiled_kernel(profile)
    rows = profiled_kernel.compare_with_profile(view, api.find_gpu(gpu), counted)

    def print_both(console: Console) -> None:
        print_kernel(console, view)
        profiled_kernel.print_profile(console, counted, rows)

    plain = kernel_to_plain(view) | {"profile": {"kernels": list(counted.names), "rows": rows}}
    return CommandOutput(plain, print_both, output.figures)


@command("lab carry-over")
def carry_over(env: Environment) -> CommandOutput:
    """Predict other chips from the H200 by their published architecture alone, and rank them.

    Kernel tables of WATTCAST_REFERENCE judge it: products and attention, nothing fitted.

    Example: WATTCAST_REFERENCE=reference wattcast lab carry-over
    """
    from wattcast.lab.validate.public_checks import carried_designs

    folder = reference_folder(env.variables)
    if folder is None:
        raise MissingTool(f"There is no reference data: set {REFERENCE_VARIABLE} to its folder.")
    judged = carried_designs.judge_carried_designs(folder, env.say)

    def print_text(console: Console) -> None:
        from wattcast.report.text_tables import print_notes, print_rows

        rows = []
        for row in judged.rows():
            least = "0.1 ms and longer" if row["least_s"] else "all"
            percents = {
                name: f"{row[name]:.1f} %"
                for name in ("error_percent", "median_percent", "bias_percent")
            }
            rows.append(
                {
                    **row,
                    **percents,
                    "least_s": least,
                }
            )
        headings = {
            "chip": "chip",
            "work": "kernels",
            "least_s": "length",
            "rows": "rows",
            "error_percent": "mean error",
            "median_percent": "median",
            "bias_percent": "bias",
        }
        print_rows(
            console,
            rows,
            headings,
            "Carried over from the H200",
            ["chip", "work"],
        )
        if judged.tau is not None:
            console.print(f"Ranking over {len(judged.pairs)} pairs: Kendall's tau {judged.tau:.2f}")
        print_notes(console, judged.missing, "Not judged")

    return CommandOutput(judged.to_plain, print_text)
