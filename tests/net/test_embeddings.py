import threading
from functools import partial

import numpy as np
import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.embeddings import OpenAIEmbedder, TeiEmbedder
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.net.store import CallStore
from tests.net.servers import always, answer, in_turn, serving


def vector(text):
    """What the test servers embed a text as."""
    return [float(len(text)), float(sum(map(ord, text)) % 97), 1.0]


@pytest.mark.parametrize("make", [partial(OpenAIEmbedder, model="m"), TeiEmbedder])
def test_a_batch_without_texts_is_refused(make):
    with pytest.raises(ToolError, match="batch_size must be a whole number of at least 1"):
        make("http://127.0.0.1:1", batch_size=0)


def openai_server(before, request):
    texts = request.json()["input"]
    entries = [{"index": i, "embedding": vector(text)} for i, text in enumerate(texts)]
    return answer({"object": "list", "data": entries[::-1]})


def tei_server(before, request):
    body = request.json()
    assert body["truncate"] is True
    return answer([vector(text) for text in body["inputs"]])


def make(kind, server, **options):
    if kind == "openai":
        return OpenAIEmbedder(f"{server.url}/v1", "m", **options)
    return TeiEmbedder(server.url, **options)


KINDS = pytest.mark.parametrize(
    ("kind", "script", "path"),
    [("openai", openai_server, "/v1/embeddings"), ("tei", tei_server, "/embed")],
)
TEXTS = ["karo", "", "venn", "karo", "  \n", "born 1987", "a", "b", "Ü"]


@KINDS
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_every_text_gets_its_own_vector(kind, script, path, batch_size):
    with serving(script) as server:
        found = make(kind, server, batch_size=batch_size).embed(TEXTS)
    expected = [vector(text) if text.strip() else [0, 0, 0] for text in TEXTS]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert found.dtype == np.float32
    assert {(request.method, request.path) for request in server.requests} == {("POST", path)}
    sent = [
        text
        for request in server.requests
        for text in request.json()["input" if kind == "openai" else "inputs"]
    ]
    assert sorted(sent) == sorted({text for text in TEXTS if text.strip()})
    assert len(server.requests) == -(-len(sent) // batch_size)


@KINDS
def test_prefix_is_sent_with_every_text(kind, script, path):
    with serving(script) as server:
        found = make(kind, server, prefix="query: ").embed(["karo"])
    np.testing.assert_array_equal(found, [vector("query: karo")])


def test_key_and_model_are_sent(monkeypatch):
    monkeypatch.setenv("EMBED_KEY", "sk-12345678")
    with serving(openai_server) as server:
        OpenAIEmbedder(server.url, "e5", api_key_env="EMBED_KEY").embed(["a"])
    assert server.requests[0].headers["Authorization"] == "Bearer sk-12345678"
    assert server.requests[0].json() == {"model": "e5", "input": ["a"]}


@KINDS
def test_blank_texts_have_the_dimension_of_the_others(kind, script, path):
    with serving(script) as server:
        embedder = make(kind, server)
        np.testing.assert_array_equal(embedder.embed(["", " "]), np.zeros((2, 3)))
        assert embedder.embed([]).shape == (0, 3)
        assert embedder.embed(["a"]).shape == (1, 3)


@KINDS
def test_replay_does_not_depend_on_which_texts_came_together(tmp_path, kind, script, path):
    store = CallStore(tmp_path / "calls.sqlite")
    with serving(script) as server:
        make(kind, server, store=store).embed(["a", "b", "c"])
        replayed = make(kind, server, store=CallStore(tmp_path / "calls.sqlite", "strict"))
    for texts in (["c", "a"], ["b"], ["a", "b", "c"]):
        np.testing.assert_array_equal(replayed.embed(texts), [vector(text) for text in texts])
    with pytest.raises(ToolError, match="no answer is stored"):
        replayed.embed(["d"])


@KINDS
def test_outage_gives_rows_of_zeros_that_are_counted(kind, script, path):
    def failing(before, request):
        return (
            answer({"error": "down"}, 503) if b"venn" in request.body else script(before, request)
        )

    with serving(failing) as server:
        embedder = make(kind, server, batch_size=1, tries=1)
        found = embedder.embed(["karo", "venn", "venn", "mentor"])
    np.testing.assert_array_equal(found, [vector("karo"), [0] * 3, [0] * 3, vector("mentor")])
    assert embedder.counts == {"embedder/failed": 1}


@KINDS
@pytest.mark.parametrize("status", [413, 422, 400])
def test_refused_text_does_not_take_its_batch_with_it(kind, script, path, status):
    def refusing(before, request):
        return answer({}, status) if b"x" * 50 in request.body else script(before, request)

    with serving(refusing) as server:
        embedder = make(kind, server)
        found = embedder.embed(["karo", "x" * 60, "venn"])
    np.testing.assert_array_equal(found, [vector("karo"), [0] * 3, vector("venn")])
    assert embedder.counts == {"embedder/failed": 1}


@KINDS
def test_vector_of_no_number_does_not_take_its_batch_with_it(kind, script, path):
    def overflowing(before, request):
        status, headers, body = script(before, request)
        return status, headers, body.replace(b"[3.0, ", b"[NaN, ").replace(b"[2.0, ", b"[1e99, ")

    with serving(overflowing) as server:
        embedder = make(kind, server)
        found = embedder.embed(["a", "two", "c", "zu"])
    expected = [vector("a"), [0, 0, 0], vector("c"), [0, 0, 0]]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert dict(embedder.counts) == {"embedder/failed": 2}
    assert len(server.requests) == 1


def test_vectors_of_zeros_are_none():
    answers = in_turn(answer([[0.0, 0.0], [1.0, 2.0]]), answer([[0.0, 0.0]]))
    with serving(answers) as server:
        embedder = TeiEmbedder(server.url)
        np.testing.assert_array_equal(embedder.embed(["a", "b"]), [[0, 0], [1, 2]])
        assert embedder.counts == {"embedder/failed": 1}
        with pytest.raises(ToolError, match=r"no text could be embedded: .*/embed returned"):
            TeiEmbedder(server.url).embed(["a"])


@KINDS
def test_server_that_never_gave_a_vector_is_one_clear_line(kind, script, path):
    with (
        serving(always({"error": "starting up"}, 503)) as server,
        pytest.raises(ToolError, match=r"no text could be embedded: .*starting up") as caught,
    ):
        make(kind, server, tries=1).embed(["a"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "strange",
    [
        {"data": [{"index": 0, "embedding": [1, float("nan")]}]},
        {"data": [{"index": 0, "embedding": "AAAA"}]},
        {"data": [{"index": 0, "embedding": []}]},
        [[]],
        {"data": [{"index": 0, "embedding": [10**400]}]},
        [[10**400]],
        {"data": [{"embedding": [1.0]}]},
        {"data": "none"},
        {"error": "no"},
        [[1.0], [1.0, 2.0]],
        [1.0],
        "text",
        None,
    ],
)
@pytest.mark.parametrize("kind", ["openai", "tei"])
def test_answer_without_vectors_is_an_outage(kind, strange):
    with (
        serving(always(strange)) as server,
        pytest.raises(ToolError, match="no text could be embedded"),
    ):
        make(kind, server, tries=1).embed(["a"])


@pytest.mark.parametrize(
    ("vectors", "later"), [([[1.0, 2.0]], [[1.0]]), ([[1.0]], [[1.0], [2.0]]), ([[1.0]], [])]
)
def test_wrong_number_of_vectors_or_another_dimension_is_an_error(vectors, later):
    with serving(lambda before, request: answer(later if before else vectors)) as server:
        embedder = TeiEmbedder(server.url, tries=1)
        embedder.embed(["a"])
        if later:
            with pytest.raises(ToolError, match=f"returned {len(later)} vectors"):
                embedder.embed(["b"])
        else:
            np.testing.assert_array_equal(embedder.embed(["b"]), [[0.0]])


def test_in_threads_keeps_the_order_the_limit_and_the_first_error():
    at_once, most, lock, gate = 0, 0, threading.Lock(), threading.Barrier(4)

    def work(item):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait(10)
        with lock:
            at_once -= 1
        return item * item

    assert in_threads(work, range(12), 4) == [item * item for item in range(12)]
    assert most == 4
    assert in_threads(work, [], 4) == []
    begun = []

    def fail(item):
        begun.append(item)
        raise ToolError(f"no {item}")

    with pytest.raises(ToolError, match="no 0"):
        in_threads(fail, range(100), 1)
    assert begun == [0]
