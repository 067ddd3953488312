"""Draw docs/images/serving-traffic.png: measured and simulated times of requests of four dense
models.

python studies/serving_figure.py docs/images/serving-traffic.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from wattcast import hardware
from wattcast.core.arrays import Array
from wattcast.core.measured_rows import Plain
from wattcast.hardware import Gpu
from wattcast.lab.fit.engine_records import EngineRecords, load_engine_records
from wattcast.lab.validate.model_checks import is_held_out, tabulate_engine, trace_of
from wattcast.report.figure_style import SERIES_COLOURS, add_caption, new_figure, save_figure
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.simulate_serving import serve_trace

MODELS = ("llama-3.1-8b", "qwen2.5-7b", "gemma-3-12b", "qwen2.5-14b-fp8")


def draw_serving_check(records: EngineRecords, gpu: Gpu) -> Figure:
    """Draw times to first token and per output token of every traffic run: measured dots, simulated
    lines.
    """
    runs = [row for row in records.select_kind("traffic") if row["model"] in MODELS]
    models = list(dict.fromkeys(row["model"] for row in runs))
    engines = {row["model"]: row for row in records.select_kind("engine")}
    figure = new_figure(2.9 * len(models), 6.4)
    panels = figure.subplots(2, len(models), squeeze=False)
    share = np.linspace(2.0, 99.0, 25)
    for place, model in enumerate(models):
        settings = EngineSettings(
            int(engines[model]["max_batched_tokens"]), int(engines[model]["max_seqs"])
        )
        same = sorted(
            (row for row in runs if row["model"] == model), key=lambda row: float(row["load"])
        )
        costs = tabulate_engine(engines[model], gpu, [trace_of(row, records) for row in same])
        for row, colour in zip(same, SERIES_COLOURS, strict=False):
            result = serve_trace(trace_of(row, records), costs, settings)
            for axes, simulated, measured in zip(
                panels[:, place],
                (result.ttft_s, result.tpot_s),
                _measured_times(records, row),
                strict=True,
            ):
                label = f"load {row['load']:g}" + ("" if is_held_out(row) else ", fitted")
                axes.plot(
                    np.nanpercentile(simulated, share) * 1e3, share, color=colour, label=label
                )
                axes.plot(np.percentile(measured, share) * 1e3, share, "o", ms=3, color=colour)
        for axes, text in zip(
            panels[:, place],
            ("Time to first token (ms)", "Time per output token (ms)"),
            strict=True,
        ):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")
            axes.set(xlabel=text)
            axes.tick_params(labelleft=place == 0)
        panels[0, place].set_title(model)
        panels[0, place].legend(frameon=False, loc="lower right", handlelength=1.0, borderpad=0.0)
    for row in panels[:, 0]:
        row.set_ylabel("Requests (%)")
    note = (
        "dots measured: vLLM 0.25.1 on an H200; lines simulated; loads are held out unless fitted"
    )
    return add_caption(figure, note)


def _measured_times(records: EngineRecords, row: Plain) -> tuple[Array, Array]:
    requests = [request for request in records.requests_of(row["id"]) if request["finished"]]
    arrival, first, last, made = (
        np.array([request[name] for request in requests], dtype=np.float64)
        for name in ("arrival_s", "first_token_s", "last_token_s", "made_tokens")
    )
    return first - arrival, ((last - first) / np.maximum(made - 1, 1))[made > 1]


if __name__ == "__main__":
    save_figure(
        draw_serving_check(load_engine_records("h200"), hardware.load_gpu("h200")),
        Path(sys.argv[1]),
    )
