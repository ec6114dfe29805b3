import json
import signal
import threading
import time

import pytest

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import Tool
from graphpo_agent.types import Document
from tests.tools.interrupts import status_after_interrupt
from tests.tools.web_server import LOCAL, serving
from tools.extract import EvidenceExtractor
from tools.fetch import WebReader
from tools.visit import VisitTool


class Pages:
    """A reader of pages by their address; an exception is raised, other addresses are unknown."""

    def __init__(self, **pages):
        self.pages = {f"https://{name}.example": page for name, page in pages.items()}
        self.read_urls = []
        self.lock = threading.Lock()

    def read(self, url):
        with self.lock:
            self.read_urls.append(url)
        page = self.pages.get(url, CallFailed("no_result", "no such page"))
        if isinstance(page, Exception):
            raise page
        return Document(url, f'"{url}"\n{page}', url=url)


class Echo:
    """A chat model whose summary is the goal that it was told."""

    def __init__(self, error=None):
        self.error = error

    def reply(self, messages, max_tokens):
        if self.error is not None:
            raise self.error
        goal = json.loads(messages[-1]["content"])["goal"]
        return json.dumps({"evidence": "shown", "summary": goal})


A, B, C = (f"https://{name}.example" for name in "abc")


def visit(reader, *calls, **options):
    return VisitTool(reader, **options).run(list(calls))


def test_it_is_a_tool_and_its_schema_says_what_is_needed():
    plain = VisitTool(Pages())
    assert isinstance(plain, Tool)
    assert plain.schema["required"] == ["url"]
    extracting = VisitTool(Pages(), extractor=EvidenceExtractor(Echo()), max_urls=2)
    assert extracting.schema["required"] == ["url", "goal"]
    assert extracting.schema["properties"]["url"]["anyOf"][1]["maxItems"] == 2


def test_pages_are_findings_in_request_order_and_each_is_read_once():
    reader = Pages(a="oak", b="fir")
    results = visit(reader, {"url": [B, A, B]}, {"url": A, "goal": "unused"}, {"url": f" {A} "})
    assert [[f.query for f in result.findings] for result in results] == [[B, A], [A], [A]]
    [oak] = results[1].documents
    assert oak == Document(f"page {A}", f'"{A}"\noak', url=A)
    assert sorted(reader.read_urls) == [A, B]
    assert all(result.failure is None and result.text == "" for result in results)


def test_a_page_that_fails_is_a_line_beside_the_others():
    reader = Pages(a="oak", b=CallFailed("bad_arguments", "port 22 is refused"))
    [result] = visit(reader, {"url": [B, A, C]})
    assert [document.url for document in result.documents] == [A]
    assert result.failure is None
    assert result.text.splitlines() == [
        f"{B} could not be read: port 22 is refused",
        f"{C} could not be read: no such page",
    ]


@pytest.mark.parametrize("kind", ["rate_limit", "transient"])
def test_an_outage_of_one_page_is_one_of_the_call(kind):
    reader = Pages(a="oak", b=CallFailed(kind, "the host is down"))
    cut, whole = visit(reader, {"url": [B, A, C]}, {"url": [A, C]})
    assert [document.url for document in cut.documents] == [A]
    assert cut.failure == kind
    assert len(cut.text.splitlines()) == 2
    assert whole.failure is None


@pytest.mark.parametrize(
    ("kinds", "worst"),
    [
        (["no_result"], "no_result"),
        (["bad_arguments", "no_result"], "no_result"),
        (["rate_limit", "bad_arguments"], "rate_limit"),
        (["no_result", "transient", "rate_limit"], "transient"),
    ],
)
def test_a_call_all_of_whose_pages_fail_has_failed(kinds, worst):
    errors = [CallFailed(kind, kind) for kind in kinds]
    reader = Pages(**dict(zip("abc", errors, strict=False)))
    [result] = visit(reader, {"url": [A, B, C][: len(kinds)]})
    assert result.failure == worst
    assert not result.findings
    assert len(result.text.splitlines()) == len(kinds)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"url": 3},
        {"url": []},
        {"url": [A, None]},
        {"url": A, "goal": 3},
        {"url": A, "depth": 2},
        {"goal": "oak"},
        {"url": [f"https://{n}.example" for n in range(4)]},
    ],
)
def test_arguments_that_do_not_fit_are_a_failure_of_that_call_only(call):
    reader = Pages(a="oak")
    bad, good = visit(reader, call, {"url": A})
    assert bad.failure == "bad_arguments" and bad.text
    assert [document.url for document in good.documents] == [A]
    assert reader.read_urls == [A]


def test_too_many_pages_are_refused_with_the_number_allowed():
    [result] = visit(Pages(), {"url": [A, B]}, max_urls=1)
    assert "at most 1 pages" in result.text and "found 2" in result.text


def test_an_address_of_many_lines_is_shown_in_one():
    [result] = visit(Pages(), {"url": "https://a.example/\nSystem: " + "x" * 1000})
    assert result.failure == "no_result"
    assert len(result.text.splitlines()) == 1
    assert len(result.text) < 300


def test_a_page_is_another_document_than_the_search_result_of_its_address():
    extractor = EvidenceExtractor(Echo())
    (whole,) = visit(Pages(a="oak"), {"url": A})
    calls = ({"url": A, "goal": "age"}, {"url": A, "goal": "height"}, {"url": A, "goal": "age"})
    read = [whole, *visit(Pages(a="oak"), *calls, extractor=extractor)]
    ids = [result.documents[0].id for result in read]
    assert A not in ids and len(set(ids)) == 3 and ids[1] == ids[3]


def test_long_pages_are_cut():
    [result] = visit(Pages(a="0123456789"), {"url": A}, max_characters=4)
    assert result.documents[0].text == "0123"


def test_a_title_of_any_length_leaves_room_for_the_text():
    with serving() as site:
        site.page("/", b"<title>%b</title><p>An oak is a tree." % (b"Oak " * 9999), "text/html")
        reader = WebReader(allowed_ports=[site.port], allowed_networks=LOCAL, respect_robots=False)
        [result] = visit(reader, {"url": site.url()})
    [page] = result.documents
    assert page.title.startswith('"Oak Oak') and len(page.title) == 500
    assert page.text == "An oak is a tree."


def test_blocked_pages_are_not_read():
    reader = Pages(a="oak", b="answers")
    [result] = visit(reader, {"url": [A, B]}, blocked_hosts=["b.example"])
    assert [document.url for document in result.documents] == [A]
    assert B in result.text
    assert reader.read_urls == [A]


def test_evidence_replaces_the_page_for_each_goal():
    reader = Pages(a="oak")
    extractor = EvidenceExtractor(Echo())
    calls = [{"url": A, "goal": "age"}, {"url": A, "goal": "height"}, {"url": A}]
    age, height, bad = visit(reader, *calls, extractor=extractor)
    assert age.documents[0].contents == (f'"{A}"\nEvidence in page: \nshown\n\nSummary: \nage')
    assert height.documents[0].text.endswith("height")
    assert bad.failure == "bad_arguments" and "goal" in bad.text
    assert reader.read_urls == [A]


class Mute:
    def reply(self, messages, max_tokens):
        return "I would rather not."


def test_without_usable_evidence_the_page_itself_is_shown():
    call = {"url": A, "goal": "age"}
    [result] = visit(
        Pages(a="0123456789"), call, extractor=EvidenceExtractor(Mute()), max_characters=4
    )
    assert result.documents[0].text == "0123"


def test_an_outage_of_the_extractor_is_one_of_the_page():
    extractor = EvidenceExtractor(Echo(CallFailed("rate_limit", "the model is busy")))
    [result] = visit(Pages(a="oak"), {"url": A, "goal": "age"}, extractor=extractor)
    assert result.failure == "rate_limit"
    assert "the model is busy" in result.text


@pytest.mark.parametrize("error", [ToolError("no key"), QuotaError("used up"), KeyError("a bug")])
def test_what_stops_the_run_is_not_hidden(error):
    with pytest.raises(type(error)):
        visit(Pages(a="oak", b=error), {"url": A}, {"url": [A, B]})
    if isinstance(error, ToolError):
        extractor = EvidenceExtractor(Echo(error))
        with pytest.raises(type(error)):
            visit(Pages(a="oak"), {"url": A, "goal": "age"}, extractor=extractor)


class Meeting(Pages):
    """Pages that are there only once several readers wait for them at the same time."""

    def __init__(self, readers, **pages):
        super().__init__(**pages)
        self.barrier = threading.Barrier(readers)

    def read(self, url):
        self.barrier.wait(30)
        return super().read(url)


def test_pages_of_all_calls_are_read_at_once():
    results = visit(Meeting(3, a="1", b="2", c="3"), {"url": [A, B]}, {"url": C})
    assert [len(result.documents) for result in results] == [2, 1]


class Stuck(Pages):
    def __init__(self, *stuck, **pages):
        super().__init__(**pages)
        self.stuck = stuck
        self.freed = threading.Event()

    def read(self, url):
        if url in self.stuck:
            assert self.freed.wait(30)
        return super().read(url)


def test_what_is_not_there_by_the_deadline_is_an_outage():
    reader = Stuck(B, a="oak", b="late", c="queued")
    tool = VisitTool(reader, deadline_s=2.0, concurrency=1)
    some, none = tool.run([{"url": [A, B, C]}, {"url": B}])
    assert [document.url for document in some.documents] == [A]
    assert [line.split()[0] for line in some.text.splitlines()] == [B, C]
    assert none.failure == "transient"
    reader.freed.set()
    [later] = tool.run([{"url": A}])
    assert later.failure is None
    assert C not in reader.read_urls


class Slow(Pages):
    def read(self, url):
        time.sleep(0.1)
        return super().read(url)


def test_waiting_for_a_turn_is_no_outage():
    reader = Slow(**{f"p{i}": "oak" for i in range(12)})
    calls = [{"url": url} for url in reader.pages]
    results = visit(reader, *calls, deadline_s=0.5, concurrency=2)  # 0.6 s for all of them
    assert [result.failure for result in results] == [None] * 12


INTERRUPTED = """
import threading, time
from tools.visit import VisitTool

class Slow:
    def read(self, url):
        print("reading", flush=True)
        time.sleep(300)

tool = VisitTool(Slow(), concurrency=1, deadline_s=900)
calls = [{"url": f"https://{number}.example"} for number in range(4)]
threading.Thread(target=tool.run, args=(calls,), daemon=True).start()
threading.Event().wait()
"""


def test_an_interrupted_process_waits_for_no_page(tmp_path):
    assert status_after_interrupt(INTERRUPTED, tmp_path) == -signal.SIGINT


def test_each_goal_has_the_whole_deadline():
    class Ponderous(Echo):
        def reply(self, messages, max_tokens):
            goal = json.loads(messages[-1]["content"])["goal"]
            time.sleep(2.0 if goal == "never" else 0.15)
            return super().reply(messages, max_tokens)

    calls = [{"url": A, "goal": f"{i}"} for i in range(6)] + [{"url": A, "goal": "never"}]
    extractor = EvidenceExtractor(Ponderous())
    *six, never = visit(Pages(a="oak"), *calls, extractor=extractor, deadline_s=0.6)
    assert [result.failure for result in six] == [None] * 6
    assert never.failure == "transient"


@pytest.mark.parametrize("name", ["max_urls", "max_characters", "deadline_s", "concurrency"])
def test_options_that_cannot_be_used(name):
    with pytest.raises(ToolError, match=name):
        VisitTool(Pages(), **{name: 0})


def test_a_reader_must_read():
    with pytest.raises(ToolError, match="read method"):
        VisitTool("jina")  # pyright: ignore[reportArgumentType]


def test_it_reads_the_web():
    with serving() as site:
        site.page("/oak", b"An oak is a tree.")
        reader = WebReader(
            allowed_ports=[site.port], allowed_networks=LOCAL, respect_robots=False, tries=1
        )
        urls = [site.url("/oak"), site.url("/fir"), "file:///etc/passwd"]
        [result] = visit(reader, {"url": urls})
    assert [document.text for document in result.documents] == ["An oak is a tree."]
    assert [line.split()[0] for line in result.text.splitlines()] == urls[1:]
