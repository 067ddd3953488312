"""What an engine does by default, beside engines that were started so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from wattcast import hardware
from wattcast.core.row_tables import database_folder
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.serving.cache_size import CacheSetting, measure_cache
from wattcast.serving.engine_simulator import EngineReplica


def test_an_engine_that_was_told_nothing_has_the_blocks_of_one_that_was_started_so() -> None:
    """gemma-3-12b in vLLM 0.25.1 on an H200, started with 0.9 of its memory."""
    records = load_engine_records(database_folder("h200")).select_kind("engine")
    engine = next(row for row in records if row["model"] == "gemma-3-12b")
    cache = measure_cache(
        load_measured_model("gemma-3-12b"),
        hardware.load_gpu("h200"),
        read_engine_options(engine),
        int(engine["max_batched_tokens"]),
        CacheSetting(prefix_caching=False),
    )
    assert cache.groups.block_tokens == engine["block_tokens"]
    blocks = cache.tokens / cache.groups.block_tokens
    assert blocks == pytest.approx(float(engine["cache_blocks"]), rel=0.03)


def weigh_requests(waiting: int, running: int) -> int:
    requests = {
        "_arriving": [],
        "queue": [None] * waiting,
        "prompts": [],
        "decoding": dict.fromkeys(range(running)),
    }
    return EngineReplica.load.fget(cast(EngineReplica, SimpleNamespace(**requests)))


def test_a_router_would_rather_decode_beside_three_than_wait_behind_one() -> None:
    """vLLM's router counts a request that waits as four that run, and so sends it past five."""
    assert weigh_requests(0, 3) < weigh_requests(1, 0) < weigh_requests(0, 5)
