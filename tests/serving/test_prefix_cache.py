"""The prefix cache by stretches against one that holds every block, as vLLM's does."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.serving.prefix_cache import PrefixCache, SharedPath

BLOCK = 4


class BlockByBlock:
    """Every block by itself: a free list, names of full blocks, least recently freed first."""

    def __init__(self, capacity: int) -> None:
        self.free: list[int] = list(range(capacity))
        self.name_of: dict[int, Hashable] = {}
        self.block_of: dict[Hashable, int] = {}
        self.users = [0] * capacity

    def count_found(self, names: list[Hashable], tokens: int) -> int:
        found = 0
        for name in names[: (tokens - 1) // BLOCK]:
            if name not in self.block_of:
                break
            found += 1
        return found

    def begin(self, names: list[Hashable], tokens: int) -> list[int] | None:
        found = self.count_found(names, tokens)
        blocks = [self.block_of[name] for name in names[:found]]
        needed = -(-tokens // BLOCK) - found
        resting = sum(self.users[block] == 0 for block in blocks)
        if needed > len(self.free) - resting:
            return None
        for block in blocks:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        for place in range(found, found + needed):
            block = self.free.pop(0)
            self.users[block] = 1
            old = self.name_of.pop(block, None)
            if old is not None:
                del self.block_of[old]
            if place < len(names) and names[place] not in self.block_of:
                self.name_of[block] = names[place]
                self.block_of[names[place]] = block
            blocks.append(block)
        return blocks

    def end(self, blocks: list[int]) -> None:
        named, nameless = [], []
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                (named if block in self.name_of else nameless).append(block)
        self.free = nameless + self.free + named


@given(
    st.integers(20, 60),
    st.integers(0, 3),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 20), st.booleans()), min_size=3, max_size=60
    ),
)
def test_what_is_found_is_what_single_blocks_hold(
    capacity: int, trunk: int, rows: list[tuple[int, int, bool]]
) -> None:
    """Conversations that grow, or give way to others, with at most two requests at once."""
    compare_caches(capacity, trunk, rows, is_same_text=False)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a request uses its whole stretch, and the rest is forgotten where it ends sooner",
)
def test_a_conversation_that_starts_again_finds_what_it_left() -> None:
    """Its first words are asked again, shorter than before, and then the longer text."""
    rows = [
        *((0, 1, False), (0, 1, False), (0, 9, False), (1, 17, False), (0, 20, True)),
        *((1, 12, True), (2, 9, False), (0, 6, False), (0, 1, False), (0, 4, False)),
    ]
    compare_caches(20, 0, rows, is_same_text=True)


def compare_caches(
    capacity: int, trunk: int, rows: list[tuple[int, int, bool]], is_same_text: bool
) -> None:
    """Serve requests by both caches, and compare what each finds of every prompt.

    A conversation that finds no room begins anew, with the same text or with another.
    """
    cache = PrefixCache(BLOCK)
    blocks = BlockByBlock(capacity)
    lengths: dict[int, int] = {}
    under_way: dict[int, tuple[SharedPath, int, list[int], int]] = {}
    restarts = dict.fromkeys(range(6), 0)
    private = 0

    def end_one(session: int) -> None:
        nonlocal private
        path, tokens, held, alone = under_way.pop(session)
        private -= alone
        cache.leave(path, tokens)
        blocks.end(held)
        cache.shrink(capacity - private - cache.used_blocks)

    for session, text, waits in rows:
        if session in under_way:
            end_one(session)
        tokens = lengths.get(session, trunk * BLOCK) + text
        names: list[Hashable] = [("trunk", place) for place in range(trunk)]
        text_name = (session, 0 if is_same_text else restarts[session])
        names += [(text_name, place) for place in range(trunk, tokens // BLOCK)]
        path = SharedPath((("trunk", trunk),) if trunk else (), text_name)
        prefix = cache.find_prefix(path, tokens)
        assert prefix.found_tokens == BLOCK * blocks.count_found(names, tokens)
        held = blocks.begin(names, tokens)
        if held is None:
            for other in list(under_way):
                end_one(other)
            lengths.pop(session, None)
            restarts[session] += 1
            continue
        cache.use(path)
        alone = -(-tokens // BLOCK) - prefix.shared_tokens // BLOCK
        private += alone
        cache.shrink(capacity - private - cache.used_blocks)
        lengths[session] = tokens
        under_way[session] = (path, tokens, held, alone)
        if not waits or len(under_way) > 2:
            end_one(next(iter(under_way)))


def test_the_end_of_what_was_left_first_is_evicted_first() -> None:
    cache = PrefixCache(BLOCK)
    for session in ("early", "late"):
        cache.use(SharedPath((), session))
        cache.leave(SharedPath((), session), 40)
    cache.shrink(14)
    assert cache.find_prefix(SharedPath((), "early"), 100).found_tokens == 4 * BLOCK
    assert cache.find_prefix(SharedPath((), "late"), 100).found_tokens == 10 * BLOCK
    assert cache.evicted_blocks == 6
