"""The servers as a policy, against a server that draws a known text."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.policy import Drawn, ServerPolicy
from graphpo_agent.errors import RunError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import Completion, SampleRequest, SamplingParams
from tests.engines.tiny import save_tokenizer

PROMPT = [7, 8, 9, 10]
LIMIT = 64


class ScriptedServer:
    """Draws the tokens of a script by their place behind the prompt, as vLLM would stop."""

    def __init__(self, tokenizer: HfTokenizer, script: list[int]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, token_ids: list[int], params: dict[str, Any]) -> Drawn:
        await asyncio.sleep(0)
        assert token_ids[: len(PROMPT)] == PROMPT
        assert params["max_tokens"] >= 1
        assert params["detokenize"] or not params["stop"]
        self.asked.append(params)
        start, drawn = len(token_ids) - len(PROMPT), []
        for token in self.script[start : start + params["max_tokens"]]:
            drawn.append(token)
            # It sees the text of this request only.
            text = self.tokenizer.decode(drawn)
            if token in params["stop_token_ids"] or any(s in text for s in params["stop"]):
                break
        return Drawn(drawn, [-0.5 - t for t in drawn], cached_tokens=len(token_ids) - 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return HfTokenizer.load(str(directory))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(5)


def draw(
    tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop, script: list[int], **request: Any
) -> tuple[Completion, ScriptedServer]:
    server = ScriptedServer(tokenizer, script)
    stops = StopFinder(tokenizer, tokenizer.vocab_size)
    policy = ServerPolicy(server, loop, tokenizer, stops, LIMIT)
    asked = SampleRequest(policy.open(PROMPT), seed=2**64 - 1, **request)
    (completion,) = complete(policy, [asked], SamplingParams(0.7, 0.9))
    return completion, server


def places(text: str, part: str) -> int:
    """Where ``part`` stands in ``text``; places may overlap."""
    return sum(text.startswith(part, start) for start in range(len(text)))


def expected(
    tokenizer: HfTokenizer, script: list[int], count: int, stop: tuple[str, ...], least: int
) -> tuple[list[int], str]:
    """Token by token, from the definition of ``SampleRequest``."""
    eos = tokenizer.eos_ids
    for n in range(1, count + 1):
        if script[n - 1] in eos:
            return script[:n], "eos"
        before, text = tokenizer.decode(script[: n - 1]), tokenizer.decode(script[:n])
        if n >= least and any(places(text, s) > places(before, s) for s in stop):
            return script[:n], "stop"
    return script[:count], "length"


@settings(max_examples=60)
@given(
    words=st.lists(st.sampled_from(["a", "b", ";", "\n", " the", "search"]), min_size=40),
    count=st.integers(1, 30),
    least=st.integers(0, 12),
    stop=st.sampled_from([(), (";",), ("\n\n",), ("a;", "b\n")]),
    ends=st.integers(0, 60),
)
def test_it_ends_where_the_definition_says(
    tokenizer: HfTokenizer,
    loop: asyncio.AbstractEventLoop,
    words: list[str],
    count: int,
    least: int,
    stop: tuple[str, ...],
    ends: int,
) -> None:
    script = [i for word in words for i in tokenizer.encode(word)]
    script = [*script[:ends], min(tokenizer.eos_ids), *script[ends:]]
    completion, _ = draw(
        tokenizer, loop, script, max_new_tokens=count, stop=stop, min_new_tokens=least
    )
    wanted, reason = expected(tokenizer, script, min(count, LIMIT - len(PROMPT)), stop, least)
    assert list(completion.token_ids) == wanted
    assert completion.finish_reason == reason
    assert list(completion.logprobs) == [-0.5 - t for t in wanted]
    assert completion.context.num_tokens == len(PROMPT) + len(wanted)


def test_a_context_that_is_full_is_not_sent(
    tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop
) -> None:
    server = ScriptedServer(tokenizer, [5] * 99)
    policy = ServerPolicy(server, loop, tokenizer, StopFinder(tokenizer, 400), LIMIT)
    full = policy.extend(policy.open(PROMPT), [5] * (LIMIT - len(PROMPT)))
    (completion,) = complete(policy, [SampleRequest(full, 1, 9)], SamplingParams())
    assert completion == Completion((), (), "length", full)
    assert not server.asked
    nearly = policy.cut(full, LIMIT - 3, last=5)
    (completion,) = complete(policy, [SampleRequest(nearly, 1, 9)], SamplingParams())
    assert len(completion.token_ids) == 3 and completion.finish_reason == "length"


def test_what_vllm_is_asked_for(tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop) -> None:
    script = [i for word in "ab" * 20 for i in tokenizer.encode(word)]
    _, server = draw(tokenizer, loop, script, max_new_tokens=10, stop=("zz",), min_new_tokens=4)
    first, second = server.asked
    assert (first["max_tokens"], first["stop"]) == (3, [])
    assert (second["max_tokens"], second["stop"]) == (7, ["zz"])
    assert first["seed"] == 2**63 - 1 and second["seed"] != first["seed"]
    assert (first["temperature"], first["top_p"], first["logprobs"]) == (0.7, 0.9, True)
    assert first["stop_token_ids"] == sorted(tokenizer.eos_ids) and first["ignore_eos"]


def test_prefilled_tokens_are_those_that_no_server_had(
    tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop
) -> None:
    server = ScriptedServer(tokenizer, [5] * 99)
    policy = ServerPolicy(server, loop, tokenizer, StopFinder(tokenizer, 400), LIMIT)
    requests = [SampleRequest(policy.open(PROMPT), seed, 6) for seed in range(3)]
    complete(policy, requests, SamplingParams())
    assert policy.take_prefilled_tokens() == 3
    assert policy.take_prefilled_tokens() == 0
    assert policy.advance() == []


def test_a_server_that_draws_nothing_ends_the_run(
    tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop
) -> None:
    with pytest.raises(RunError, match="without a token"):
        draw(tokenizer, loop, [], max_new_tokens=4)


def test_what_is_released_is_forgotten(
    tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop
) -> None:
    stuck = asyncio.Event()

    async def never(token_ids: list[int], params: dict[str, Any]) -> Drawn:
        await stuck.wait()
        return Drawn([5], [0.0])

    policy = ServerPolicy(never, loop, tokenizer, StopFinder(tokenizer, 400), LIMIT)
    policy.submit(SampleRequest(policy.open(PROMPT), 0, 4), SamplingParams())
    assert policy.advance() == []
    policy.release()
    assert policy.advance() == []
