"""Chains of different operators in one graph: their time from their members, with and without a law of caches."""

from __future__ import annotations

import numpy as np

from wattcast import hardware
from wattcast.fit.chains import chains_of, fit_chain_law, held_out_error
from wattcast.kernels import reference_of
from wattcast.records import CHAINS_FILE, ROWS_FILE, database_folder, read_table
from wattcast.validate.rows import Row, percent, row


def chain_rows(gpu: str) -> list[Row]:
    """Error of chains' times from a law that saw no chain of the same part of a layer; floor: their members' sum."""
    folder = database_folder(gpu)
    if not (folder / CHAINS_FILE).is_file():
        return []
    l2_byte = reference_of(hardware.load(gpu)).l2_byte
    chains = chains_of(read_table(folder / CHAINS_FILE), read_table(folder / ROWS_FILE), l2_byte)
    off, law = held_out_error(chains), fit_chain_law(chains)
    return [
        row(
            f"{gpu} chains of operators in one graph",
            "latency, part of a layer unseen",
            len(off),
            percent(1.0 + off, np.ones(len(off))),
            percent(chains.alone_s, chains.chain_s),
            floor_is="sum of the members alone",
            cold_operator_us=round(1e6 * law.cold_operator_s, 2),
            cold_reduction_us=round(1e6 * law.cold_reduction_s, 2),
        )
    ]
