"""``wattcast lab kernel``: look into one kernel."""

from __future__ import annotations

from typing import Annotated, Any

from wattcast.cli.command_builder import PLOT, command
from wattcast.cli.command_output import CommandOutput
from wattcast.cli.common_options import GPU
from wattcast.core.option_declaration import Option
from wattcast.options.setting_options import POINT_SETTINGS, SettingOptions
from wattcast.options.verb_options import VerbOptions, part_of

_SETTINGS = VerbOptions("kernel", part_of(SettingOptions, *POINT_SETTINGS, "bundle"))


@command("lab kernel", _SETTINGS, PLOT)
def kernel(
    operator: Annotated[
        str, Option("linear|bmm|attention|softmax|layernorm|rmsnorm.", positional=True)
    ],
    sizes: Annotated[str, Option("Its sizes, such as 4096x4096x4096: m, n, k.", positional=True)],
    gpu: Annotated[str, GPU],
    dtype: Annotated[str, Option("Number format of operands.")] = "bf16",
    **options: Any,
) -> CommandOutput:
    """Look into one kernel: tile and why, waves, bytes at every level, phases, watts over its life.

    Examples: wattcast lab kernel linear 4096x4096x4096 --gpu h200 --plot kernel.png
    ... lab kernel bmm 64x1024x1024x128 --gpu h200 --clock 1500MHz
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
    return CommandOutput.of(view, kernel_to_plain, print_kernel, draw_kernel)
