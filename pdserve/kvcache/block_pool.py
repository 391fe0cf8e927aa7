"""Which block is free, cached or owned. Pure; owned by one thread.

::

    free ──allocate──► owned ──last release──► free            (content unknown)
                        ▲                  └─► evictable        (published: content reusable)
                  share └───────────────────── evictable

Every block but the null block is in exactly one place. A full pool is an answer (None).
Evictable blocks are taken, least recently released first, only when no free one is left. Blocks
that something may still write into simply stay owned: see the decode worker's reservations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` counts the null block, which is never handed out."""
        assert num_blocks >= 2, f"{num_blocks} blocks leave none beside the null block"
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_usable_blocks(self) -> int:
        return self._num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can give: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._evictable)

    @property
    def num_owned_blocks(self) -> int:
        return len(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None with nothing changed."""
        if count > self.num_free_blocks:
            return None
        block_ids = [self._take() for _ in range(count)]
        self._references.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def match(self, block_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. Takes no reference: ``share`` does."""
        block_ids = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id in self._references:
                self._references[block_id] += 1
            else:
                assert block_id in self._evictable, f"block {block_id} is not cached and cannot be shared"
                del self._evictable[block_id]
                self._references[block_id] = 1

    def release(self, block_ids: Sequence[int]) -> None:
        """The tail first, so that eviction shortens a cached prefix from its end."""
        for block_id in reversed(block_ids):
            references = self._references.get(block_id)
            assert references, f"block {block_id} is released more often than it was taken"
            if references > 1:
                self._references[block_id] = references - 1
                continue
            del self._references[block_id]
            if block_id in self._hash_of:
                self._evictable[block_id] = None
            else:
                self._free.append(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Makes a full, computed block reusable; where two hold the same, the first is kept."""
        assert block_id in self._references, f"block {block_id} is not owned and cannot be published"
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless every block is in exactly one place."""
        places = [*self._free, *self._evictable, *self._references]
        assert sorted(places) == list(range(1, self._num_blocks)), f"blocks lost or doubled: {sorted(places)}"
        assert all(count > 0 for count in self._references.values()), self._references
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of
        assert self._hash_of.keys() <= self._evictable.keys() | self._references.keys(), self._hash_of.keys()
        assert self._evictable.keys() <= self._hash_of.keys(), self._evictable.keys()

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block_id, _ = self._evictable.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
