"""Ledger rows of public kernel tables of cards that no table calibrated, and of another engine.

The even halves of NVIDIA's tables of H100, GB200, GB300, B300 and RTX Pro 6000 came after the
forecast rule, and SGLang's tables of H100, H200 and B200 time another engine's kernels than a
bundle means. Nothing was fitted to or chosen on any of them.
Run: ``wattcast lab validate --ablations`` (WATTCAST_REFERENCE names the measurements).
"""

from __future__ import annotations

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from wattcast import hardware
from wattcast.calibrate.scoring import (
    LedgerRow,
    Tell,
    make_absent_row,
    make_ledger_row,
)
from wattcast.calibrate.table_rows import read_tables
from wattcast.core.errors import BadInput
from wattcast.lab.validate.public_checks.collective_checks import (
    as_operators,
    newest_table,
    percent_errors,
    read_collective_table,
)
from wattcast.lab.validate.public_checks.other_gpu_checks import judge_kernels
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.link_laws import collective_s

WHERE = "newer kernel tables"
_TABLES = ("gemm", "context_attention", "generation_attention", "moe")
# GPU of the catalogue -> the name of its tables, and the engines whose kernels a bundle means
_NEW_CARDS = {
    "h100-sxm": "h100_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "b300": "b300_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
_SGLANG_CARDS = {
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
}
_LAYER_CARD = "rtx-pro-6000"
_ALL_ROWS = 1_000_000  # of a table: none is thinned


def newer_table_rows(reference: Path | None, tell: Tell) -> list[LedgerRow]:
    """Return errors on every table that came after the fits; takes minutes."""
    if reference is None or not (reference / "aiconfigurator").is_dir():
        return [make_absent_row(WHERE, "latency", "no reference data")]
    folder = reference / "aiconfigurator"
    rows = []
    for gpu, system in _NEW_CARDS.items():
        tell(f"{WHERE}: {gpu}")
        rows += _judge_tables(
            folder,
            gpu,
            system,
            ("vllm", "trtllm"),
            "",
        )
    for gpu, system in _SGLANG_CARDS.items():
        tell(f"{WHERE}: {gpu}, SGLang")
        rows += _judge_tables(
            folder,
            gpu,
            system,
            ("sglang",),
            " of SGLang, as vLLM's",
        )
    rows += layer_rows(reference)
    return rows + collective_card_rows(folder)


def layer_rows(reference: Path) -> list[LedgerRow]:
    """Return errors on layers of models inside vLLM on a card that other tables calibrated.

    LLMServingSim's rows time linear layers, and one layer's attention of prompts, of sequences that
    decode, or of both together.
    """
    chip = hardware.load_gpu(_LAYER_CARD)
    bundle = bundle_for(chip)
    where = f"{_LAYER_CARD} layers of vLLM, LLMServingSim's, {bundle.status}, nothing fitted"
    folder = reference / "llmservingsim"
    if not folder.is_dir():
        return [make_absent_row(where, "latency", "no reference data")]
    table = read_tables([folder], chip, _ALL_ROWS)
    # goals are those of cards whose tables were fitted
    return [row | {"must": None} for row in judge_kernels(where, table, chip, bundle)]


def _judge_tables(
    folder: Path,
    gpu: str,
    system: str,
    engines: tuple[str, ...],
    words: str,
) -> list[LedgerRow]:
    chip = hardware.load_gpu(gpu)
    bundle = bundle_for(chip)
    where = f"{gpu} kernel tables{words}, all rows, {bundle.status}, nothing fitted"
    with TemporaryDirectory() as unpacked:
        for path in sorted(folder.glob(f"{system}.*.csv.gz")):
            engine = path.name.split(".")[1]
            table = path.name.split(".")[-3]
            if table in _TABLES and engine.startswith(engines):
                name = path.name.removesuffix(".gz").replace(system, gpu, 1)
                (Path(unpacked) / name).write_bytes(gzip.decompress(path.read_bytes()))
        try:
            rows_of_tables = read_tables([Path(unpacked)], chip, _ALL_ROWS)
        except BadInput as error:
            return [make_absent_row(where, "latency", str(error))]
    bursts = rows_of_tables.select_rows(rows_of_tables.rows.is_kind("burst"))
    # goals are those of cards whose tables were fitted
    return [row | {"must": None} for row in judge_kernels(where, bursts, chip, bundle)]


def collective_card_rows(folder: Path) -> list[LedgerRow]:
    """Return errors of collectives on the cards whose tables came after the laws."""
    rows = []
    for gpu, system in _COLLECTIVE_CARDS.items():
        rows += _judge_collectives(folder, gpu, system)
    return rows


def _judge_collectives(
    folder: Path,
    gpu: str,
    system: str,
) -> list[LedgerRow]:
    """Judge collectives as the law of the card's architecture has them."""
    table = newest_table(folder, system)
    if table is None:
        return []
    timings = [row for row in read_collective_table(table) if row.judged]
    measured_s = np.array([row.latency_s for row in timings])
    predicted_s = np.asarray(collective_s(as_operators(timings), hardware.load_gpu(gpu)))
    error = percent_errors(predicted_s, measured_s)
    return [
        make_ledger_row(
            "collectives, newer tables, nothing fitted",
            f"{gpu}, all shapes, median",
            len(timings),
            float(np.median(error)),
            p90=round(float(np.quantile(error, 0.9)), 1),
            bias=round(100.0 * float(np.median(predicted_s / measured_s - 1.0)), 1),
        )
    ]


_COLLECTIVE_CARDS = {"h100-sxm": "h100_sxm", "gb200": "gb200"}
