"""What waits, waits beside the sampling: real threads, a policy that counts its passes."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.rollout import scheduler as scheduler_module
from graphpo_agent.rollout.scheduler import PolicyScheduler, complete
from graphpo_agent.types import Document, Finding, SampleRequest, SamplingParams, ToolResult
from tests.rollout.scripted import EOS, ScriptedPolicy, TokenContext

SAMPLING = SamplingParams()
PATIENCE = 20.0
OAK = Finding("oak", (Document("1", "Oak"),))


def policy_of(script=lambda context, seed: (65 + seed, EOS)):
    return ScriptedPolicy(script)


def request(seed):
    return SampleRequest(TokenContext((1, 2)), seed, 5)


async def call(scheduler, tool, arguments):
    """The result of a tool, and whether a call was made for it."""
    result, made = scheduler.call(tool, arguments)
    return await result, made


class Tool:
    """Calls a function of the queries; keeps the batches it was given."""

    name = "tool"
    schema: Mapping[str, Any] = {}

    def __init__(self, answer) -> None:
        self._answer = answer
        self.batches: list[list[str]] = []

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        queries = [call["query"] for call in calls]
        self.batches.append(queries)
        return [self._answer(query) for query in queries]


def test_a_tool_that_waits_for_other_samples_gets_them():
    sampled = threading.Event()
    tool = Tool(lambda query: ToolResult(str(sampled.wait(PATIENCE))))
    scheduler = PolicyScheduler(policy_of(), overlap=True)

    async def searching():
        return (await call(scheduler, tool, {"query": "slow"}))[0].text

    async def sampling():
        for seed in range(50):
            await scheduler.sample([request(seed)], SAMPLING)
        sampled.set()
        return "sampled"

    assert scheduler.run([searching(), sampling()]) == ["True", "sampled"]


def test_work_beside_the_sampling_runs_in_a_thread_of_its_own_only_where_work_overlaps():
    for overlap in (True, False):
        scheduler = PolicyScheduler(policy_of(), overlap)
        ((name,),) = scheduler.run([scheduler.each(lambda _: threading.get_ident(), [0])])
        assert (name != threading.get_ident()) == overlap


def test_samples_come_together_and_in_the_order_of_their_requests():
    lengths = {0: 4, 1: 2, 2: 3}
    policy = policy_of(lambda context, seed: (65 + seed,) * lengths[seed] + (EOS,))
    told = []
    scheduler = PolicyScheduler(policy, overlap=False, drawn=told.append)
    requests = [request(seed) for seed in (2, 0, 1, 2)]
    both = [scheduler.sample(requests, SAMPLING), scheduler.sample([], SAMPLING)]
    drawn, nothing = scheduler.run(both)
    assert [completion.token_ids[0] - 65 for completion in drawn] == [2, 0, 1, 2]
    assert nothing == []
    assert sorted(told) == sorted(len(completion.token_ids) for completion in drawn)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_item_has_its_own_result(overlap):
    scheduler = PolicyScheduler(policy_of(), overlap)
    work = [scheduler.each(lambda n: n * n, range(count)) for count in (0, 1, 500)]
    assert scheduler.run(work) == [[n * n for n in range(count)] for count in (0, 1, 500)]


def test_quick_items_share_a_thread(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_LONG", PATIENCE)
    names = set()
    scheduler = PolicyScheduler(policy_of(), overlap=True)
    scheduler.run([scheduler.each(lambda _: names.add(threading.get_ident()), range(100))])
    assert len(names) == 1


def test_slow_items_do_not_wait_for_another():
    together = threading.Barrier(20)
    scheduler = PolicyScheduler(policy_of(), overlap=True)
    (ranks,) = scheduler.run([scheduler.each(lambda _: together.wait(PATIENCE), range(20))])
    assert sorted(ranks) == list(range(20))


@pytest.mark.parametrize("error", [IndexError("mine"), ToolError("mine"), StopIteration("mine")])
def test_an_error_of_one_item_ends_the_run_and_no_more_are_begun(error, monkeypatch):
    monkeypatch.setattr(scheduler_module, "_LONG", PATIENCE)
    begun = []

    def fail(item):
        begun.append(item)
        if item == 3:
            raise error
        return item

    for overlap in (True, False):
        scheduler = PolicyScheduler(policy_of(), overlap)
        with pytest.raises((type(error), RuntimeError), match=r"mine|StopIteration"):
            scheduler.run([scheduler.each(fail, range(1000))])
    assert begun == [0, 1, 2, 3] * 2


def test_nothing_that_threads_send_is_lost_while_the_loop_is_busy():
    """More of it than the loop's wake-up channel holds, and a last piece that it waits for."""
    scheduler = PolicyScheduler(policy_of(), overlap=True)

    async def sampling():
        for seed in range(300):
            await scheduler.sample([request(seed % 20)], SAMPLING)

    async def beside(number):
        for _ in range(60):
            (number,) = await scheduler.each(lambda n: n + 1, [number])
        return number

    async def late(work):
        await asyncio.gather(*work)
        await scheduler.each(time.sleep, [0.05])
        return await scheduler.each(str.upper, ["late"])

    work = [sampling(), *(beside(n) for n in range(40))]
    assert scheduler.run([late(work)]) == [["LATE"]]


def test_calls_of_one_moment_are_one_batch_and_equal_calls_are_made_once():
    tool = Tool(lambda query: ToolResult(query.upper()))
    scheduler = PolicyScheduler(policy_of(), overlap=False)

    async def ask(query, passes):
        for seed in range(passes):
            await scheduler.sample([request(seed)], SAMPLING)
        return await call(scheduler, tool, {"query": query})

    answers = scheduler.run([ask("a", 1), ask("b", 1), ask("a", 1), ask("a", 3), ask("c", 3)])
    assert [(result.text, made) for result, made in answers] == [
        ("A", True),
        ("B", True),
        ("A", False),
        ("A", False),
        ("C", True),
    ]
    assert tool.batches == [["a", "b"], ["c"]]


def test_a_failed_call_is_shared_while_it_is_made_and_made_again_later():
    results = iter([ToolResult("", failure="transient"), ToolResult("up")])
    tool = Tool(lambda query: next(results))
    scheduler = PolicyScheduler(policy_of(), overlap=False)

    async def twice():
        first = await call(scheduler, tool, {"query": "q"})
        return first, await call(scheduler, tool, {"query": "q"})

    async def once():
        return await call(scheduler, tool, {"query": "q"})

    ((failed, made), (result, made_again)), (shared, made_shared) = scheduler.run([twice(), once()])
    assert (failed.failure, made, made_shared, made_again) == ("transient", True, False, True)
    assert shared is failed and result.text == "up"


def test_calls_gather_while_a_tool_is_busy():
    gate = threading.Event()
    tool = Tool(lambda query: ToolResult(str(gate.wait(PATIENCE))))
    scheduler = PolicyScheduler(policy_of(), overlap=True)

    async def ask(i):
        for seed in range(i):
            await scheduler.sample([request(seed)], SAMPLING)
        if i == 29:
            gate.set()
        return (await call(scheduler, tool, {"query": str(i)}))[0].text

    assert scheduler.run([ask(i) for i in range(30)]) == ["True"] * 30
    assert sorted(int(query) for batch in tool.batches for query in batch) == list(range(30))
    assert len(tool.batches) == 9 and len(max(tool.batches, key=len)) == 22


@pytest.mark.parametrize("overlap", [True, False])
def test_a_tool_that_cannot_go_on_ends_the_run_with_its_own_error(overlap):
    def fail(query):
        raise ToolError(f"no server for {query}")

    scheduler = PolicyScheduler(policy_of(), overlap)

    async def ask():
        await call(scheduler, Tool(fail), {"query": "q"})

    async def endless():
        while True:
            await scheduler.sample([request(0)], SAMPLING)

    with pytest.raises(ToolError, match="no server for q"):
        scheduler.run([endless(), ask(), ask()])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_tool_with_too_few_or_too_many_results_is_named(overlap, change):
    class Miscounts(Tool):
        def run(self, calls):
            return [ToolResult("x")] * (len(calls) + change)

    tool = Miscounts(None)
    scheduler = PolicyScheduler(policy_of(), overlap)
    calls = [call(scheduler, tool, {"query": str(i)}) for i in range(3)]
    with pytest.raises(ToolError, match=rf"Miscounts.run returned {3 + change} results for 3"):
        scheduler.run(calls)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("given", [None, iter([ToolResult("x")]), {"x": 1}, "x"])
def test_a_tool_whose_results_are_no_list_is_named(overlap, given):
    class Strange(Tool):
        def run(self, calls):
            return given

    scheduler = PolicyScheduler(policy_of(), overlap)
    kind = type(given).__name__
    with pytest.raises(ToolError, match=rf"Strange.run returned {kind}, no list .* for 1 inputs"):
        scheduler.run([call(scheduler, Strange(None), {"query": "q"})])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("x", "Strange.run returned 'x' for a call, want a ToolResult"),
        (ToolResult("x", failure="oops"), "Strange.run: failure 'oops' is none of bad_arguments,"),
        (ToolResult(42), "Strange.run: text 42 is no string"),
        (ToolResult(findings=OAK), "Strange.run: findings Finding.* are no list"),
        (ToolResult(findings=OAK.documents), "Strange.run found Document.*, which is no Finding"),
        (ToolResult(findings=(Finding("oak", ("Oak",)),)), "Strange.run found 'Oak', which is no"),
    ],
)
def test_a_result_that_is_none_is_told(overlap, result, says):
    class Strange(Tool):
        def run(self, calls):
            return [result] * len(calls)

    scheduler = PolicyScheduler(policy_of(), overlap)
    with pytest.raises(ToolError, match=says):
        scheduler.run([call(scheduler, Strange(None), {"query": "q"})])


@pytest.mark.parametrize("overlap", [True, False])
def test_whatever_a_tool_raises_ends_the_run(overlap):
    def fail(query):
        raise StopIteration

    scheduler = PolicyScheduler(policy_of(), overlap)
    with pytest.raises(RuntimeError, match="StopIteration"):
        scheduler.run([call(scheduler, Tool(fail), {"query": "q"})])


@pytest.mark.parametrize("overlap", [True, False])
def test_items_of_one_moment_are_given_to_a_function_together_and_never_twice_at_once(overlap):
    batches, inside = [], threading.Lock()

    def lengths(texts):
        assert inside.acquire(blocking=False)
        batches.append(len(texts))
        inside.release()
        return [len(text) for text in texts]

    scheduler = PolicyScheduler(policy_of(), overlap)

    async def ask(i):
        for seed in range(i % 3):
            await scheduler.sample([request(seed)], SAMPLING)
        return list(await scheduler.together(lengths, ["x" * i, "yy"]))

    assert scheduler.run([ask(i) for i in range(20)]) == [[i, 2] for i in range(20)]
    assert sum(batches) == 40 and len(batches) <= 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_call_takes_no_more_items_than_it_may_and_gives_its_results_before_the_next(overlap):
    calls, went_on = [], []

    def lengths(texts):
        calls.append((texts, list(went_on)))
        return [len(text) for text in texts]

    async def ask(name, count):
        found = await scheduler.together(lengths, [name] * count, most=5)
        went_on.append(name)
        return list(found)

    scheduler = PolicyScheduler(policy_of(), overlap)
    asked = {"a": 2, "b": 0, "c": 3, "d": 9, "e": 4, "f": 2}
    found = scheduler.run([ask(name, count) for name, count in asked.items()])
    assert found == [[1] * count for count in asked.values()]
    assert ["".join(texts) for texts, _ in calls] == ["aaccc", "d" * 9, "eeee", "ff"]
    assert [before for _, before in calls] == [["b"], [*"bac"], [*"bacd"], [*"bacde"]]


def test_inside_an_event_loop_it_runs_in_a_thread():
    async def notebook():
        scheduler = PolicyScheduler(policy_of(), overlap=True)
        return scheduler.run([scheduler.sample([request(1)], SAMPLING)])

    ((completion,),) = asyncio.run(notebook())
    assert completion.token_ids == (66, EOS)


def test_an_interrupt_inside_an_event_loop_ends_the_thread_soon(caplog):
    passes, most = 0, 2000

    def interrupted(context, seed):
        nonlocal passes
        passes += 1
        if passes == 100:  # the main thread has long been waiting
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.001)
        return (65, EOS)

    scheduler = PolicyScheduler(policy_of(interrupted), overlap=True)

    async def long():
        while passes < most:
            await scheduler.sample([request(0)], SAMPLING)

    async def notebook():
        return scheduler.run([long()])

    # asyncio.run would take the interrupt for itself, which a notebook does not.
    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(notebook())
    loop.close()
    assert passes < most / 2
    gc.collect()
    assert not caplog.records


def test_an_error_inside_an_event_loop_comes_out():
    async def notebook():
        scheduler = PolicyScheduler(policy_of(), overlap=True)

        async def fails():
            raise ToolError("no server")

        return scheduler.run([fails()])

    with pytest.raises(ToolError, match="no server"):
        asyncio.run(notebook())


def test_an_interrupt_does_not_wait_for_a_tool_that_hangs():
    gate = threading.Event()
    passes = 0

    def interrupted(context, seed):
        nonlocal passes
        passes += 1
        if passes == 5:
            raise KeyboardInterrupt
        return (65, EOS)

    scheduler = PolicyScheduler(policy_of(interrupted), overlap=True)

    async def endless():
        while True:
            await scheduler.sample([request(0)], SAMPLING)

    hanging = call(scheduler, Tool(lambda query: ToolResult(str(gate.wait()))), {"query": "q"})
    with pytest.raises(KeyboardInterrupt):
        scheduler.run([endless(), hanging])
    gate.set()


def test_an_interrupt_does_not_wait_for_a_task_that_does_not_end(caplog):
    async def never_ends():
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    def interrupted(items):
        raise KeyboardInterrupt

    scheduler = PolicyScheduler(policy_of(), overlap=False)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run([never_ends(), scheduler.together(interrupted, [1])])
    del scheduler
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_in_work_beside_the_sampling_logs_nothing(overlap, caplog):
    def interrupted(items):
        raise KeyboardInterrupt

    scheduler = PolicyScheduler(policy_of(), overlap)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run(
            [
                scheduler.together(interrupted, [1]),
                scheduler.sample([request(0)], SAMPLING),
                call(scheduler, Tool(lambda query: ToolResult(query)), {"query": "q"}),
            ]
        )
    del scheduler
    gc.collect()
    assert not caplog.records


def test_complete_keeps_the_order_of_the_requests():
    completions = complete(policy_of(), [request(seed) for seed in (3, 1, 2)], SAMPLING)
    assert [completion.token_ids for completion in completions] == [(68, EOS), (66, EOS), (67, EOS)]


@pytest.mark.parametrize(
    ("failure", "calls"), [("rate_limit", 2), ("transient", 2), ("no_result", 1)]
)
def test_only_a_call_that_met_an_outage_is_made_again(failure, calls):
    tool = Tool(lambda query: ToolResult("", failure=failure))
    scheduler = PolicyScheduler(policy_of(), overlap=False)

    async def twice():
        return [(await call(scheduler, tool, {"query": "q"}))[1] for _ in range(2)]

    assert scheduler.run([twice()]) == [[True, calls == 2]]
    assert len(tool.batches) == calls


def test_the_order_of_a_calls_arguments_does_not_make_it_another():
    tool = Tool(lambda query: ToolResult(query))
    scheduler = PolicyScheduler(policy_of(), overlap=False)

    async def twice():
        await call(scheduler, tool, {"query": "q", "topk": 3})
        return (await call(scheduler, tool, {"topk": 3, "query": "q"}))[1]

    assert scheduler.run([twice()]) == [False]


def test_a_function_is_not_called_again_while_it_works():
    inside = threading.Lock()

    def slow(texts):
        assert inside.acquire(blocking=False)
        time.sleep(0.05)
        inside.release()
        return texts

    scheduler = PolicyScheduler(policy_of(), overlap=True)

    async def ask(i):
        for seed in range(20 * i):
            await scheduler.sample([request(seed)], SAMPLING)
        return list(await scheduler.together(slow, [i]))

    assert scheduler.run([ask(i) for i in range(4)]) == [[i] for i in range(4)]
