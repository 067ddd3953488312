"""Keep the prompts that an engine computed, as vLLM's prefix cache does.

The cache holds full blocks of tokens. A block is found by the hash of all tokens up to its end, so
what is found of a prompt is a run of blocks from its start. Blocks that no request uses stay until
their room is needed; those that were freed first are evicted first, and of one request the last
block before the first. A block that is not full is never found and is used again at once.

Blocks that are always used together make a *stretch*: the text before all conversations, one
conversation, a block of a trace's hashes. A request is a path of stretches, the last of which is
its own and grows by what it computes. Since the end of a stretch is evicted before its start, it is
enough to count the blocks of each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

Stretch = tuple[Hashable, int]  # its name, and its full blocks


class SharedPath(NamedTuple):
    """What a prompt shares with others: stretches from its start, and the one that it goes on with.

    ``trunk`` are whole stretches. ``branch`` names the last stretch, which holds all that follows:
    that of a conversation, or of the request alone.
    """

    trunk: tuple[Stretch, ...]
    branch: Hashable


class FoundPrefix(NamedTuple):
    """What the cache holds of a prompt."""

    found_tokens: int
    # of the prompt that lie in stretches others use too, found or not; they are counted apart
    shared_tokens: int
    new_blocks: int  # of these stretches, which nobody uses at the moment


_NOTHING_FOUND = FoundPrefix(0, 0, 0)


@dataclass(slots=True)
class _CachedStretch:
    """How many blocks of a stretch are there, and how many requests use it."""

    blocks: int
    users: int = 0


class PrefixCache:
    """The blocks of one engine that a later prompt may find."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.used_blocks = 0  # of stretches that requests use, each counted once
        self.free_blocks = 0  # that nobody uses and a prompt may find
        self.evicted_blocks = 0
        self._stretches: dict[Hashable, _CachedStretch] = {}
        self._free: OrderedDict[Hashable, None] = OrderedDict()  # in order of eviction

    def find_prefix(
        self,
        path: SharedPath,
        tokens: int,
    ) -> FoundPrefix:
        """Return what is there of a prompt of so many tokens.

        The last token is computed in any case, since its logits are needed.
        """
        stretches = self._stretches
        if not path.trunk and path.branch not in stretches:
            return _NOTHING_FOUND
        blocks = 0
        new_blocks = 0
        shared_blocks = 0
        is_whole = True
        for name, size in path.trunk:
            cached = stretches.get(name)
            if is_whole:
                there = min(cached.blocks, size) if cached is not None else 0
                shared_blocks += there
                is_whole = there == size
            blocks += size
            if cached is None or not cached.users:
                new_blocks += size
        branch = stretches.get(path.branch)
        if branch is not None and is_whole:
            shared_blocks += branch.blocks
            blocks += branch.blocks
            new_blocks += branch.blocks
        most = (tokens - 1) // self.block_tokens
        tokens_a_block = self.block_tokens
        return FoundPrefix(
            min(shared_blocks, most) * tokens_a_block,
            min(blocks, most) * tokens_a_block,
            new_blocks,
        )

    def use(self, path: SharedPath) -> None:
        """Note that a request uses the stretches of its path, whose absent blocks it computes."""
        is_whole = True
        for name, size in path.trunk:
            cached = self._stretches.get(name)
            is_whole = is_whole and cached is not None and cached.blocks >= size
            self._take(name, size)
        branch = self._stretches.get(path.branch)
        if branch is None:
            return
        if is_whole or branch.users:
            self._take(path.branch, branch.blocks)
        else:  # what lies behind a gap is found no more
            self.free_blocks -= branch.blocks
            del self._free[path.branch]
            del self._stretches[path.branch]

    def leave(
        self,
        path: SharedPath,
        tokens: int,
    ) -> None:
        """Note that a request has ended or was preempted, with so many tokens in the cache."""
        blocks = tokens // self.block_tokens
        if not path.trunk and path.branch not in self._stretches:
            self._keep_alone(path.branch, blocks)
            return
        for _, size in path.trunk:
            blocks -= size
        branch = self._stretches.setdefault(path.branch, _CachedStretch(0, users=1))
        self.used_blocks += max(blocks, 0) - branch.blocks
        branch.blocks = max(blocks, 0)
        self._free_stretch(path.branch, branch)
        for name, _ in reversed(path.trunk):
            self._free_stretch(name, self._stretches[name])

    def shrink(self, room_blocks: float) -> None:
        """Evict what lies longest unused until no more than ``room_blocks`` remain unused."""
        kept_blocks = int(max(room_blocks, 0))
        while self.free_blocks > room_blocks and self._free:
            name = next(iter(self._free))
            cached = self._stretches[name]
            evicted = min(cached.blocks, self.free_blocks - kept_blocks)
            cached.blocks -= evicted
            self.free_blocks -= evicted
            self.evicted_blocks += evicted
            if cached.blocks == 0:
                del self._free[name]
                del self._stretches[name]

    def _keep_alone(
        self,
        name: Hashable,
        blocks: int,
    ) -> None:
        """Keep the blocks of a request that shared none while it ran."""
        if blocks > 0:
            self._stretches[name] = _CachedStretch(blocks)
            self._free[name] = None
            self.free_blocks += blocks

    def _take(
        self,
        name: Hashable,
        blocks: int,
    ) -> None:
        """Count one more user of a stretch, which then has at least so many blocks."""
        cached = self._stretches.get(name)
        if cached is None:
            cached = self._stretches[name] = _CachedStretch(0)
        if cached.users:
            self.used_blocks += max(blocks - cached.blocks, 0)
        else:
            if name in self._free:
                del self._free[name]
                self.free_blocks -= cached.blocks
            self.used_blocks += max(blocks, cached.blocks)
        cached.blocks = max(cached.blocks, blocks)
        cached.users += 1

    def _free_stretch(
        self,
        name: Hashable,
        cached: _CachedStretch,
    ) -> None:
        """Count one user less; the blocks of a stretch without any may be evicted."""
        cached.users -= 1
        if cached.users:
            return
        self.used_blocks -= cached.blocks
        if not cached.blocks:
            del self._stretches[name]
            return
        self.free_blocks += cached.blocks
        self._free[name] = None
