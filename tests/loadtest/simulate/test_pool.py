from __future__ import annotations

from random import Random

from loadtest.simulate.pool import Block, BlockPool


def fill(pool: BlockPool, blocks: list[int], saving_s: float = 1.0) -> list[Block]:
    """Compute a chain, as its only holder."""
    pool.take(len(blocks))
    parents = [None, *blocks]
    return [
        pool.publish(block, parent, saving_s)
        for block, parent in zip(blocks, parents, strict=False)
    ]


def test_the_end_of_a_chain_goes_first() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, [1, 2, 3, 4]))
    pool.take(2)
    assert pool.match([1, 2, 3, 4]) == 2
    assert (pool.free, pool.cached, pool.evictions) == (0, 2, 2)


def test_what_was_hit_stays_longer() -> None:
    pool = BlockPool(4)
    used = fill(pool, [1, 2])
    pool.release(used)
    pool.release(fill(pool, [3, 4]))
    for block in used:
        pool.hold(block)
        block.hits += 1
    pool.release(used)
    pool.take(2)
    assert pool.match([1, 2]) == 2
    assert pool.match([3]) == 0


def test_what_is_held_does_not_go() -> None:
    pool = BlockPool(4)
    fill(pool, [1, 2])
    pool.release(fill(pool, [3, 4]))
    assert pool.available == 2
    pool.take(2)
    assert pool.match([1, 2]) == 2


def test_a_block_that_is_here_already_is_held_instead() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, [1])
    pool.take(1)
    assert pool.publish(1, None, 1.0) is blocks[0]
    assert blocks[0].holds == 2
    assert pool.free == 3


def test_the_rest_of_an_answer_goes_page_by_page_and_can_be_taken_back() -> None:
    pool = BlockPool(6)
    blocks = fill(pool, [1, 2])
    pool.take(3)
    rest = pool.leave_rest(3, blocks[-1], 1.0)
    pool.release(blocks)
    assert (pool.free, pool.cached) == (1, 5)
    pool.take(3)
    assert pool.take_rest(rest) == 1
    assert pool.take_rest(rest) == 0
    assert pool.cached == 2
    pool.check_integrity()


def test_a_copy_needs_room_and_is_held_by_nobody() -> None:
    pool = BlockPool(2)
    assert pool.drop_in(5, 4, 1.0, hits=3)
    assert not pool.drop_in(5, 4, 1.0, hits=0)
    assert pool.blocks[5].hits == 3
    assert (pool.free, pool.cached) == (1, 1)
    assert pool.drop_in(4, None, 1.0, hits=0)
    assert pool.drop_in(9, None, 1.0, hits=0)
    assert 4 in pool.blocks  # 5 has gone first, as it lies behind
    held = pool.blocks[9]
    pool.hold(held)
    pool.hold(pool.blocks[4])
    assert not pool.drop_in(8, None, 1.0, hits=0)


def test_whatever_happens_the_books_agree() -> None:
    random = Random(17)
    told: set[int] = set()
    pool = BlockPool(40, stored=told.add, lost=lambda block: told.remove(block.id))
    chains: list[list[int]] = [[]]
    running: list[tuple[list[Block], int]] = []
    next_block = 0
    for _ in range(600):
        before = random.choice(chains)
        before = before[: random.randint(0, len(before))]
        new = list(range(next_block, next_block + random.randint(1, 8)))
        next_block += len(new)
        found = pool.match(before)
        held = [pool.blocks[block] for block in before[:found]]
        revived = sum(not block.holds for block in held)
        missing = [*before[found:], *new]
        if len(missing) + revived + 2 > pool.available or len(running) > 6:
            if running:
                blocks, private = running.pop(random.randrange(len(running)))
                pool.leave_rest(private, blocks[-1], 1.0)
                pool.release(blocks)
        else:
            for block in held:
                pool.hold(block)
            pool.take(len(missing) + 2)
            chain = [*before, *new]
            for index in range(found, len(chain)):
                parent = chain[index - 1] if index else None
                held.append(pool.publish(chain[index], parent, random.uniform(0.1, 1.0)))
            chains.append(chain)
            running.append((held, 2))
        pool.check_integrity()
        assert told == {block for block in pool.blocks if block >= 0}
        shared = sum(block.pages for block in pool.blocks.values() if block.holds)
        private_pages = 2 * len(running)
        assert pool.free + pool.cached + shared + private_pages == pool.total
    assert pool.evictions > 500


def test_being_copied_up_is_a_use() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, [1, 2]))
    pool.release(fill(pool, [3, 4]))
    pool.use([1, 2, 9])
    pool.take(2)
    assert pool.match([1, 2]) == 2
    assert pool.cached == 2
    pool.check_integrity()


def test_a_chain_is_published_as_its_blocks_are_one_by_one() -> None:
    together, one_by_one = BlockPool(8), BlockPool(8)
    ids, savings_s = [1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]
    for pool in (together, one_by_one):
        pool.release(fill(pool, [1, 2]))
        pool.take(4)
    nodes: list[Block] = []
    together.publish_chain(ids, range(3), savings_s, nodes)
    together.publish_chain(ids, range(3, 4), savings_s, nodes)
    parents = [None, *ids]
    singly = [one_by_one.publish(ids[at], parents[at], savings_s[at]) for at in range(4)]
    assert [node.id for node in nodes] == ids
    for pool, blocks in ((together, nodes), (one_by_one, singly)):
        pool.check_integrity()
        pool.release(blocks)
        pool.check_integrity()
    assert (together.free, together.cached) == (one_by_one.free, one_by_one.cached) == (4, 4)
    assert [node.saving_s for node in nodes] == [block.saving_s for block in singly]
