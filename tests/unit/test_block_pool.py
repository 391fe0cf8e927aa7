"""Every block is in exactly one place, whatever is done in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.kvcache.block_pool import NULL_BLOCK, BlockPool
from pdserve.kvcache.block_table import block_hashes

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """The model: what each holder has, and which content was published."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.num_published = 0

    def owners(self, block_id: int) -> int:
        return sum(blocks.count(block_id) for blocks in self.held)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free_before = self.pool.num_free_blocks
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free_before)
        if blocks is None:
            assert self.pool.num_free_blocks == free_before
            return
        assert NULL_BLOCK not in blocks
        assert not any(self.owners(block_id) for block_id in blocks), "a block was given twice"
        for block_id in blocks:
            self.content.pop(block_id, None)
        self.held.append(blocks)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        owned = sorted({block_id for blocks in self.held for block_id in blocks} - self.content.keys())
        if owned:
            block_id = data.draw(st.sampled_from(owned))
            self.num_published += 1
            self.content[block_id] = f"content {self.num_published}".encode()
            self.pool.publish(block_id, self.content[block_id])

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.content:
            block_id = data.draw(st.sampled_from(sorted(self.content)))
            found = self.pool.match([self.content[block_id]])
            if found:
                assert found == [block_id]
                self.pool.share(found)
                self.held.append(found)
            else:
                assert not self.owners(block_id), "a block in use lost its content"
                del self.content[block_id]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check_integrity()
        owned = {block_id for blocks in self.held for block_id in blocks}
        assert self.pool.num_owned_blocks == len(owned)
        assert self.pool.num_free_blocks == NUM_BLOCKS - 1 - len(owned)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_block_that_is_free_cannot_be_released_again() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_eviction_takes_the_least_recently_released_and_never_what_is_in_use() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    for index, block_id in enumerate(blocks):
        pool.publish(block_id, bytes([index]))
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]
    assert pool.match([b"\0"]) == [blocks[0]]
    assert pool.match([b"\2"]) == [blocks[2]]


def test_hashes_name_a_block_and_all_before_it() -> None:
    one = block_hashes([1, 2, 3, 4, 5], 2)
    other = block_hashes([9, 2, 3, 4], 2)
    assert len(one) == 2
    assert one[1] != other[1], "equal tokens after another beginning are another content"
    assert block_hashes([3, 4], 2, parent=one[0]) == one[1:]
