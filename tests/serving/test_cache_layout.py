"""Caches of layers that keep different things, against what engines said when they started."""

from __future__ import annotations

import numpy as np
import pytest

import wattcast
from wattcast import hardware
from wattcast.core.row_tables import database_folder
from wattcast.lab.fit.engine_fit import load_measured_model, read_engine_options
from wattcast.lab.fit.engine_records import load_engine_records
from wattcast.serving.arrivals import make_trace
from wattcast.serving.cache_layout import (
    CacheGroups,
    LayerCache,
    group_layers,
    measure_layer_caches,
)
from wattcast.serving.cache_size import CacheSetting, measure_cache
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.model_options import ModelOptions

GIB = 2**30

# Started engines of vLLM 0.25.1: folder of the database and model.
STARTED = [("", "gemma-3-12b"), ("narrow", "gpt-oss-20b"), ("variants", "qwen3-next-12-layers")]


def load_engine(folder: str, model: str):
    database = database_folder("h200") / folder
    rows = load_engine_records(database).select_kind("engine")
    return next(row for row in rows if row["model"] == model)


@pytest.mark.parametrize(("folder", "model"), STARTED)
def test_sequences_that_fit_are_as_many_as_the_engine_says(folder: str, model: str) -> None:
    """Blocks of the started engine, and the tokens it says that they hold at its greatest length."""
    engine = load_engine(folder, model)
    caches = measure_layer_caches(load_measured_model(model), read_engine_options(engine))
    groups = group_layers(caches, 16, prefix_caching=False)
    assert groups.block_tokens == engine["block_tokens"]
    longest = int(engine["max_model_len"])
    byte = float(engine["cache_blocks"]) * groups.block_byte
    fit = groups.count_sequences(byte, longest, int(engine["max_batched_tokens"]))
    assert fit == pytest.approx(engine["cache_tokens"] / longest, rel=1e-5)


@pytest.mark.parametrize(("folder", "model"), STARTED)
def test_blocks_of_a_card_are_within_three_percent_of_the_engine(folder: str, model: str) -> None:
    engine = load_engine(folder, model)
    cache = measure_cache(
        load_measured_model(model),
        hardware.load_gpu("h200"),
        read_engine_options(engine),
        int(engine["max_batched_tokens"]),
        CacheSetting(16, 0.9, prefix_caching=False),
    )
    blocks = cache.tokens / cache.groups.block_tokens
    assert blocks == pytest.approx(float(engine["cache_blocks"]), rel=0.03)


@pytest.mark.parametrize(("folder", "model"), STARTED)
def test_a_cache_as_the_engine_prints_it_has_the_blocks_it_started_with(
    folder: str, model: str
) -> None:
    engine = load_engine(folder, model)
    caches = measure_layer_caches(load_measured_model(model), read_engine_options(engine))
    groups = group_layers(caches, 16, prefix_caching=False)
    tokens = groups.convert_engine_tokens(
        int(engine["cache_tokens"]), int(engine["max_model_len"]), int(engine["max_batched_tokens"])
    )
    assert tokens == int(engine["cache_blocks"]) * groups.block_tokens


def test_a_cache_as_the_engine_prints_it_holds_short_requests_of_a_window() -> None:
    """OLMo 3 7B on an H200, vLLM 0.25.1: 99,391 tokens at 20,480, in 17,408 blocks of 16.

    24 of its 32 layers see 4,096 tokens. 64 requests of some 830 tokens ran at once.
    """
    caches = [LayerCache(24, 16384, 0, 4096), LayerCache(8, 16384)]
    groups = group_layers(caches, 16)
    assert groups.convert_engine_tokens(99391, 20480, 8192) == 17408 * 16
    assert 64 * groups.count_slots(830) < 17408 * 16


def test_a_public_log_of_states_with_prefix_caching() -> None:
    """noonghunna/club-3090#612: Qwen3.6 35B-A3B, cache in fp8, vLLM 0.24.0.

    "Available KV cache memory: 5.98 GiB", "Maximum concurrency for 131,072 tokens per request:
    4.33x". 30 of 40 layers keep a state in fp32, 32 x 128 x 128, and 3 x 8192 values of bf16.
    """
    state = LayerCache(30, 0, 32 * 128 * 128 * 4 + 3 * 8192 * 2)
    groups = group_layers([state, LayerCache(10, 2 * 2 * 256)], 16)
    assert groups.count_sequences(5.98 * GIB, 131072, 8192) == pytest.approx(4.33, abs=0.005)


def test_states_of_mamba_are_kept_for_every_block_of_a_cached_prefix() -> None:
    """Granite 4.0 H Tiny on an H200, vLLM 0.25.1 with prefix caching: 6 GiB are 1,536 blocks of 512
    tokens, 78,643 tokens at 20,480.
    """
    options = ModelOptions.from_names(stack="engine")
    caches = measure_layer_caches(load_measured_model("granite-4.0-h-tiny"), options)
    groups = group_layers(caches, 16, prefix_caching=True)
    assert groups.block_tokens == 512
    assert 6 * GIB // groups.block_byte == 1536
    fit = groups.count_sequences(6 * GIB, 20480, 8192)
    assert fit * 20480 == pytest.approx(78643, abs=1)
    alone = group_layers(caches, 16, prefix_caching=False)
    assert alone.block_tokens < 512
    assert alone.states == 9


def test_an_engine_caches_no_prefixes_of_models_with_states() -> None:
    asked = {"rate": "2/s", "seconds": 5, "prompt": 64, "output": 8}
    asked |= {"max_seqs": 8, "max_batched_tokens": 512}
    said = wattcast.simulate("qwen3-next-80b-a3b", "h200", tp=2, **asked)
    kept = wattcast.simulate("qwen3-next-80b-a3b", "h200", tp=2, prefix_caching=True, **asked)
    assert any("without a cache of prefixes" in note for note in said.assumptions)
    assert not any("without a cache of prefixes" in note for note in kept.assumptions)


def test_layers_all_alike_make_one_group() -> None:
    caches = measure_layer_caches(load_model("llama3-8b"), ModelOptions.from_names(stack="engine"))
    assert caches == [LayerCache(32, 4096)]
    assert group_layers(caches, 16) == CacheGroups(16, 16 * 32 * 4096)
    window = group_layers([LayerCache(32, 4096, 0, 4096)], 16)
    assert window.count_slots(100_000) == 4096


def test_groups_are_padded_where_kinds_have_nearly_as_many_layers() -> None:
    few = group_layers([LayerCache(13, 512), LayerCache(12, 512, 0, 128)], 16)
    assert (few.full, few.windows, few.block_byte) == (1, (128,), 13 * 16 * 512)
    many = group_layers([LayerCache(10, 512), LayerCache(52, 512, 0, 1024)], 16)
    assert (many.full, len(many.windows)) == (1, 6)


def test_windows_leave_room_for_more_sequences_without_preemptions() -> None:
    """Regression: gpt-oss was simulated with a cache as if its windows kept everything."""
    trace = make_trace(np.zeros(256), np.full(256, 16_000), np.full(256, 1200))
    found = wattcast.simulate("gpt-oss-20b", "h200", trace=trace)
    full_s = 2 * 12 * 2048  # bytes a token of all layers, if windows kept everything
    kept = found.runs[0].segments["decodes"].max() * 16_000 * full_s
    assert kept > 0.9 * 141e9
    assert found.preemptions == 0
    assert found.runs[0].segments["cache_use"].max() <= 1.0
