"""What becomes of searches whose neighbours are given up."""

import asyncio
from queue import SimpleQueue

from graphpo_agent.types import Document
from retrievers.batching import Batcher


def test_a_search_that_is_given_up_while_it_is_made_costs_those_beside_it_nothing():
    turns: SimpleQueue[None] = SimpleQueue()
    batches: list[int] = []

    def search(queries, topk):
        turns.get(timeout=60)
        return [[Document(query, query)] for query in queries]

    async def until_batch(number):
        while len(batches) < number:
            await asyncio.sleep(0.001)

    async def ask():
        batcher = Batcher(search, workers=1, max_batch=8, observe=batches.append)
        first = asyncio.create_task(batcher.search(["first"], 1))
        await until_batch(1)
        given_up, kept = (asyncio.create_task(batcher.search([name], 1)) for name in ("a", "b"))
        await asyncio.sleep(0)  # both wait now, for the one worker
        turns.put(None)
        await until_batch(2)
        given_up.cancel()
        await asyncio.sleep(0)
        turns.put(None)
        found = [await asyncio.wait_for(each, 60) for each in (first, kept)]
        batcher.close()
        return found

    found = asyncio.run(ask())
    assert found == [[[Document("first", "first")]], [[Document("b", "b")]]]
    assert batches == [1, 2]
