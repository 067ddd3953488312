"""Fit the laws of collectives to the fitted half of public NCCL tables and print them as YAML.

Run: python -m wattcast.lab.validate.public_checks.collective_laws
../shared/reference/aiconfigurator Figure of the held-out rows: python -m
wattcast.lab.validate.public_checks.collective_laws ../shared/reference/aiconfigurator docs/images

Rows whose hash is odd are left out here (``public_checks/collective_checks.py``): they judge. Least
squares in logs with a soft loss; the library's choice of the fastest protocol is softened, and
hardened in four rounds. A weak prior holds coefficients that the rows say little about at the start
values below. Four folds within the fitted half say what a fold left out costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu, load_gpu
from wattcast.lab.module_commands import require_measurements, run_module
from wattcast.lab.validate.public_checks.collective_checks import (
    CARDS,
    CollectiveTiming,
    as_rows,
    newest_table,
    read_collective_table,
)
from wattcast.predictor.link_laws import (
    LinkLaw,
    load_laws,
    nccl_protocol_s,
)
from wattcast.report.figure_style import add_caption, new_figure

START = LinkLaw(
    launch_s=5e-6,
    ll_step_s=0.9e-6,
    ll_byte_per_s=10e9,
    ll128_step_s=1.2e-6,
    ll128_share=0.3,
    ll128_local=1.0,
    simple_start_s=10e-6,
    simple_step_s=1e-6,
    simple_share=0.8,
    simple_local=3.0,
    peer_step_s=0.3e-6,
    peer_ll_start_s=1e-6,
    peer_ll_byte_per_s=8e9,
    peer_simple_start_s=8e-6,
    peer_simple_share=0.7,
    peer_simple_local=3.0,
    nvls_start_s=40e-6,
    nvls_share=0.6,
    crowding=1.8,
)
PRIOR = 0.03


def fit_law(
    timings: Sequence[CollectiveTiming],
    link_byte_per_s: float,
    free: list[str],
    fixed: dict[str, object],
) -> LinkLaw:
    """Return the law that fits these timings best."""
    rows = as_rows(timings)
    true_s = np.array([row.latency_s for row in timings])
    start = np.log([getattr(START, name) for name in free])

    def law(x: np.ndarray) -> LinkLaw:
        return LinkLaw(**(dict(zip(free, np.exp(x).tolist(), strict=True)) | fixed))

    def residual(x: np.ndarray, hardness: float) -> np.ndarray:
        log_s = np.log(nccl_protocol_s(law(x), rows, link_byte_per_s))
        best = log_s.min(axis=0)
        weight = np.exp(-hardness * (log_s - best))
        mean = (weight * np.where(np.isfinite(log_s), log_s, 0.0)).sum(axis=0) / weight.sum(axis=0)
        return np.append(mean - np.log(true_s), PRIOR * (x - start))

    x = start
    for hardness in (4.0, 8.0, 16.0, 32.0):
        x = least_squares(
            residual,
            x,
            args=(hardness,),
            loss="soft_l1",
            f_scale=0.1,
            max_nfev=80,
        ).x
    return law(x)


def link_byte_per_s(gpu: Gpu) -> float:
    """Return the bandwidth of a card's NVLink, of PCIe where it has none, both ways together."""
    byte_per_s = gpu.links.nvlink_byte_per_s or gpu.links.pcie_byte_per_s
    assert byte_per_s is not None
    return float(np.mean(byte_per_s))


def find_table(folder: Path, stem: str) -> Path:
    """Return the newest table of a card; refuse a folder that has none."""
    table = newest_table(folder, stem)
    return require_measurements(folder / f"{stem}.nccl-VERSION.csv") if table is None else table


def main() -> None:
    """Fit the laws to the tables of a folder, or draw the held-out rows into a second folder."""
    folder, *drawn = map(Path, sys.argv[1:])
    if drawn:
        figure = draw_held_out(folder)
        figure.savefig(drawn[0] / "collectives.png", dpi=110, bbox_inches="tight")
    else:
        print_laws(folder)


def print_laws(folder: Path) -> None:
    """Print the law of each card as YAML, and how far it is from the rows it was fitted to."""
    for stem, name in CARDS.items():
        gpu = load_gpu(name)
        linked = gpu.links.nvlink_byte_per_s is not None
        path = find_table(folder, stem)
        timings = [row for row in read_collective_table(path) if not row.held_out and row.judged]
        law, left_out = _fit_with_folds(gpu, timings)
        error = _relative_errors(law, timings, link_byte_per_s(gpu) / 2)
        print(f"  {gpu.architecture if linked else 'pcie'}:")
        print(f"    source: {path.name}, {len(timings)} rows of the fitted half")
        for item in fields(LinkLaw):
            value = getattr(law, item.name)
            if value is not None and not (item.name == "crowding" and linked):
                print(f"    {item.name}: {float(f'{value:.4g}')!r}")
        inside = f"median {100 * np.median(error):.1f} %, p90 {100 * np.quantile(error, 0.9):.1f} %"
        outside = f"{100 * np.median(left_out):.1f} %, {100 * np.quantile(left_out, 0.9):.1f} %"
        print(f"# {name}: {inside}; fold left out {outside}", file=sys.stderr)


def _fit_with_folds(gpu: Gpu, timings: Sequence[CollectiveTiming]) -> tuple[LinkLaw, Array]:
    """Return the law of all rows, and the relative error of each from a fit without its fold."""
    fixed: dict[str, object] = {}
    if gpu.links.nvlink_byte_per_s is not None:
        fixed["crowding"] = 0.0
    if gpu.architecture not in ("hopper", "blackwell"):
        fixed |= {"nvls_start_s": None, "nvls_share": None}
    free = [item.name for item in fields(LinkLaw) if item.name not in fixed]
    byte_per_s = link_byte_per_s(gpu) / 2
    fold = np.array([row.crc(salt="fold ") % 4 for row in timings])
    left_out = np.zeros(len(timings))
    for number in range(4):
        training = [timings[i] for i in np.flatnonzero(fold != number).tolist()]
        law = fit_law(training, byte_per_s, free, fixed)
        test = fold == number
        left_out[test] = _relative_errors(law, timings, byte_per_s)[test]
    return fit_law(timings, byte_per_s, free, fixed), left_out


def _relative_errors(
    law: LinkLaw,
    timings: Sequence[CollectiveTiming],
    byte_per_s: float,
) -> Array:
    predicted_s = nccl_protocol_s(law, as_rows(timings), byte_per_s).min(axis=0)
    measured_s = np.array([timing.latency_s for timing in timings])
    return np.asarray(np.abs(predicted_s / measured_s - 1.0))


def draw_held_out(folder: Path) -> Figure:
    """Draw held-out all-reduces of four cards, measured as dots and predicted as lines, by number
    of GPUs.
    """
    figure = new_figure(13.0, 3.8)
    panels = figure.subplots(1, len(CARDS), sharey=True)
    for panel, (stem, name) in zip(panels.flat, CARDS.items(), strict=True):
        gpu = load_gpu(name)
        laws = load_laws()
        law = laws.links.get(gpu.architecture, laws.pcie)
        both_ways = link_byte_per_s(gpu)
        timings = read_collective_table(find_table(folder, stem))
        for colour, gpus in zip(("C0", "C1", "C2"), (2, 4, 8), strict=True):
            rows = [
                t
                for t in timings
                if (t.kind, t.gpus, t.dtype) == ("all_reduce", gpus, Dtype.FP16) and t.judged
            ]
            held_out = [t for t in rows if t.held_out]
            panel.loglog(
                [t.byte for t in held_out],
                [t.latency_s * 1e6 for t in held_out],
                "o",
                color=colour,
                ms=4,
            )
            line = [
                CollectiveTiming(
                    "all_reduce",
                    1 << k,
                    gpus,
                    Dtype.FP16,
                    0.0,
                )
                for k in range(10, 31)
            ]
            found_s = nccl_protocol_s(law, as_rows(line), both_ways / 2).min(axis=0)
            panel.loglog([t.byte for t in line], found_s * 1e6, color=colour, label=f"{gpus} GPUs")
        panel.set_title(name)
        panel.set_xlabel("Buffer (bytes)")
    panels.flat[0].set_ylabel("All-reduce (us)")
    panels.flat[0].legend()
    return add_caption(
        figure,
        "NCCL 2.27 and 2.29, aiconfigurator at 095f58a, fp16, out of place; dots: held out "
        "of the fit",
    )


if __name__ == "__main__":
    run_module(main)
