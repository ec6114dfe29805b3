"""Pages read from real servers: what is asked for, what comes back, who is asked and when."""

import gzip
import json
import socket
import threading
import time

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.store import CallStore
from graphpo_agent.protocols import PageReader
from tests.tools.fetching import OAK, OAK_HTML, failure_of, reader_for
from tests.tools.web_server import HTML, LOCAL
from tools.fetch import WebReader, resolve

FEED = b'<?xml version="1.0"?><rss><channel><item><title>The oak</title></item></channel></rss>'


def test_a_page_is_read_as_a_document(site):
    site.page("/oak", OAK_HTML, HTML)
    reader = reader_for(site)
    assert isinstance(reader, PageReader)
    document = reader.read(site.url("/oak"))
    assert (document.id, document.url) == (site.url("/oak"), site.url("/oak"))
    assert document.contents == '"Oak"\nAn oak is a tree.'


def test_only_honest_headers_are_sent(site, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    site.page("/oak", OAK, Set_Cookie="session=1; Path=/")
    reader = reader_for(site, user_agent="oak-reader/1 (test)")
    reader.read(site.url("/oak"))
    reader.read(site.url("/oak"))
    for headers in site.headers:
        assert headers.pop("Host") == f"127.0.0.1:{site.port}"
        assert headers.pop("User-Agent") == "oak-reader/1 (test)"
        assert set(headers) == {"Accept", "Accept-Encoding", "Connection"}


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        (b"plain \xe2\x80\x8btext\r\n", "text/plain; charset=utf-8", "plain text"),
        ("Grün".encode("latin-1"), 'Text/Plain; Charset="ISO-8859-1"', "Grün"),
        (b'{"a": 1}', "application/json", '{"a": 1}'),
        (b"tree,height\noak,40", "text/csv", "tree,height\noak,40"),
        (b"<trees><oak/></trees>", "text/xml", "<trees><oak/></trees>"),
        (b"<trees><oak/></trees>", "application/xml", "<trees><oak/></trees>"),
        (FEED, "application/rss+xml; charset=utf-8", "The oak"),
        (FEED, "application/xml", "The oak"),
        (FEED, "text/xml", "The oak"),
        (FEED, HTML, "The oak"),
        (b'<html xmlns="http://www.w3.org/1999/xhtml"><p>An oak</p></html>', "text/xml", "An oak"),
        (b"An oak", None, "An oak"),
        (b"An <b>oak</b>", None, "An <b>oak</b>"),
        (b"\n<!-- x --><!DOCTYPE html>\n<title>Oak</title><p>An oak", None, "An oak"),
        (b"An oak", "*/*", "An oak"),
        (FEED, None, "The oak"),
        (
            b'<?xml version="1.0"?><trees><oak/></trees>',
            None,
            '<?xml version="1.0"?><trees><oak/></trees>',
        ),
        ("<p>橡树是一种树".encode("gb18030"), "text/html; charset=gb2312", "橡树是一种树"),
        ("<meta charset=koi8-r><p>дуб".encode("koi8-r"), "text/html", "дуб"),
        (b"<html><p>An oak</html>", "application/xhtml+xml", "An oak"),
    ],
)
def test_content_types_and_charsets_that_are_read(site, body, content_type, expected):
    site.page("/", body, content_type)
    assert reader_for(site).read(site.url()).text == expected


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/pdf", b"%PDF-1.7"),
        ("image/png", b"\x89PNG"),
        ("application/octet-stream", b"text"),
        ("image/svg+xml", b"<svg><text>An oak</text></svg>"),
        (None, b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x01" + bytes(range(256))),
        (None, b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<< /Type /Catalog >>\n"),
        (HTML, b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<< /Type /Catalog >>\n"),
        (HTML, gzip.compress(OAK_HTML, mtime=0)),
        ("text/plain", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20),
        ("text/plain", b"PK\x03\x04\x14\x00\x08\x08\x08\x00" + bytes(range(256))),
        (HTML, b""),
        (HTML, b"<script>1</script>"),
        ("text/plain", b" \x00\xe2\x80\x8b "),
    ],
)
def test_pages_without_readable_text_are_no_result(site, content_type, body):
    site.page("/", body, content_type)
    assert failure_of(reader_for(site), site.url()) == "no_result"


@pytest.mark.parametrize(
    ("status", "asked", "passing"),
    [
        (301, 1, False),
        (400, 1, False),
        (403, 1, False),
        (404, 1, False),
        (410, 1, False),
        (408, 2, True),
        (429, 1, True),
        (500, 2, True),
        (503, 2, True),
        (999, 1, False),
    ],
)
def test_what_a_status_means(site, tmp_path, status, asked, passing):
    """A site that gives no page is no outage; what may pass is asked again, now or later."""
    site.page("/", OAK, status=status)
    store = CallStore(tmp_path / "calls.sqlite", "replay")
    reader = reader_for(site, tries=2, store=store)
    assert failure_of(reader, site.url()) == "no_result"
    assert site.requests["/"] == asked
    assert failure_of(reader, site.url()) == "no_result"
    assert site.requests["/"] == (2 * asked if passing else asked)


def test_a_passing_failure_is_tried_again(site):
    def recovering(handler):
        if site.requests["/"] == 1:
            handler.send_error(503)
        else:
            handler.send_response(200)
            handler.send_header("Content-Type", "text/plain")
            handler.end_headers()
            handler.wfile.write(OAK)

    site.pages["/"] = recovering
    assert reader_for(site, tries=2).read(site.url()).text == "An oak is a tree."


def test_nobody_there_is_transient():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader = WebReader(allowed_ports=[port], allowed_networks=LOCAL, tries=1)
    assert failure_of(reader, f"http://127.0.0.1:{port}/") == "transient"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"],
)
def test_this_machine_is_out_of_reach(site, host):
    site.page("/", OAK)
    reader = reader_for(site, allowed_networks=[])
    assert failure_of(reader, site.url(host=host)) == "bad_arguments"
    assert not site.requests


@pytest.mark.parametrize("answers", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::1", "8.8.8.8"]])
def test_a_name_that_leads_here_is_out_of_reach(site, answers):
    reader = reader_for(site, allowed_networks=[], resolver=lambda host, port: answers)
    assert failure_of(reader, site.url(host="oak.example")) == "bad_arguments"
    assert not site.requests


def test_the_address_that_was_checked_is_the_one_connected_to(site):
    """DNS rebinding: the second answer would be another host; it is never asked for."""
    site.page("/", OAK)
    asked = []

    def rebinding(host, port):
        asked.append((host, port))
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    reader = reader_for(site, resolver=rebinding)
    assert reader.read(site.url(host="oak.example")).text == "An oak is a tree."
    assert asked == [("oak.example", site.port)]
    assert site.headers[0]["Host"] == f"oak.example:{site.port}"
    assert failure_of(reader, site.url(host="oak.example")) == "bad_arguments"
    assert site.requests["/"] == 1


def test_the_next_address_is_tried_when_one_does_not_answer(site):
    site.page("/", OAK)
    networks = ["127.0.0.0/8"]
    reader = reader_for(
        site, allowed_networks=networks, resolver=lambda host, port: ["127.9.9.9", "127.0.0.1"]
    )
    assert reader.read(site.url(host="oak.example")).text == "An oak is a tree."


@pytest.mark.parametrize(
    ("error", "kind"), [(socket.EAI_NONAME, "no_result"), (socket.EAI_AGAIN, "transient")]
)
def test_a_failed_look_up(error, kind):
    def failing(host, port):
        raise socket.gaierror(error, "look-up")

    assert failure_of(WebReader(resolver=failing, tries=1), "http://oak.example/") == kind


def test_a_look_up_that_hangs_ends_with_the_deadline():
    hanging = threading.Event()
    reader = WebReader(resolver=lambda host, port: hanging.wait() and [], deadline_s=0.3)
    assert failure_of(reader, "http://oak.example/") == "transient"
    hanging.set()


def test_the_system_looks_names_up():
    assert "127.0.0.1" in resolve("127.0.0.1", 80)
    assert {"127.0.0.1", "::1"} & set(resolve("localhost", 80))


def test_requests_to_one_host_take_turns(site):
    running, most = [], []
    lock = threading.Lock()

    def counted(handler):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.pop()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.end_headers()
        handler.wfile.write(b"oak")

    site.pages["/"] = counted
    reader = reader_for(site, per_host=2)
    threads = [threading.Thread(target=reader.read, args=(site.url(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 8
    assert max(most) <= 2


def test_robots_are_respected(site):
    rules = b"User-agent: graphpo-agent\nDisallow: /private\n\nUser-agent: *\nDisallow: /\n"
    site.page("/robots.txt", rules, "text/plain")
    site.page("/oak", OAK)
    site.page("/private/oak", OAK)
    site.page("/hop", b"", status=302, Location="/private/oak")
    reader = reader_for(site, respect_robots=True)
    assert reader.read(site.url("/oak")).text == "An oak is a tree."
    assert failure_of(reader, site.url("/private/oak")) == "no_result"
    assert failure_of(reader, site.url("/hop")) == "no_result"
    assert site.requests == {"/robots.txt": 1, "/oak": 1, "/hop": 1}
    other = reader_for(site, respect_robots=True, user_agent="another/1")
    assert failure_of(other, site.url("/oak")) == "no_result"
    assert reader_for(site).read(site.url("/private/oak")).text == "An oak is a tree."


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, None), (403, None), (999, None), (500, "no_result"), (429, "no_result")],
)
def test_robots_that_cannot_be_read(site, status, kind):
    site.page("/robots.txt", b"User-agent: *\nDisallow: /", "text/plain", status=status)
    site.page("/", OAK)
    reader = reader_for(site, respect_robots=True)
    if kind is None:
        assert reader.read(site.url()).text == "An oak is a tree."
    else:
        assert failure_of(reader, site.url()) == kind
        assert site.requests["/"] == 0


def test_robots_are_fetched_as_carefully_as_pages(site):
    site.page("/robots.txt", b"", status=302, Location="http://169.254.169.254/")
    reader = reader_for(site, respect_robots=True, allowed_ports=[80, site.port])
    assert failure_of(reader, site.url()) == "bad_arguments"


def test_pages_are_paced_without_becoming_late(site):
    site.page("/oak", OAK)
    # The last one's turn comes after 2 s.
    reader = reader_for(site, per_second=2, deadline_s=1.5)
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(reader.read(site.url("/oak")).text))
        for _ in range(5)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 2.0
    assert texts == ["An oak is a tree."] * 5


def test_pages_and_failures_are_recorded(site, tmp_path):
    site.page("/oak", OAK_HTML, HTML)
    site.page("/busy", b"", status=503)
    reader = reader_for(site, store=CallStore(tmp_path / "calls.sqlite", "replay"))
    first = reader.read(site.url("/oak"))
    assert failure_of(reader, site.url("/gone")) == "no_result"
    assert failure_of(reader, site.url("/busy")) == "no_result"
    asked = dict(site.requests)
    again = reader_for(site, store=CallStore(tmp_path / "calls.sqlite", "strict"))
    assert again.read(site.url("/oak")) == first
    assert failure_of(again, site.url("/gone")) == "no_result"
    assert failure_of(again, site.url("/busy")) == "no_result"
    with pytest.raises(ToolError, match="no answer is stored"):
        again.read(site.url("/never"))
    assert site.requests == asked


@pytest.mark.parametrize(
    "options",
    [
        {"deadline_s": 0},
        {"deadline_s": "30"},
        {"tries": 0},
        {"max_bytes": -1},
        {"per_host": 1.5},
        {"per_second": 0},
        {"extractors": 0},
        {"extraction_s": float("nan")},
        {"allowed_ports": 80},
        {"allowed_ports": "80"},
        {"allowed_ports": ["80"]},
        {"allowed_networks": "10.0.0.0/8"},
        {"allowed_networks": ["10.0.0.1/8"]},
        {"allowed_networks": ["intranet"]},
        {"blocked_hosts": ["https://example.org"]},
        {"ca_file": "/no/such/file.pem"},
    ],
)
def test_options_that_cannot_be_used(options):
    with pytest.raises(ToolError) as failed:
        WebReader(**options)
    assert "\n" not in str(failed.value)
    assert next(iter(options)) in str(failed.value)


def test_a_record_is_plain_json(site, tmp_path):
    site.page("/oak", OAK_HTML, HTML)
    kept = {}

    class Memory:
        def fetch(self, key, call):
            return kept.setdefault(key, call())

    reader_for(site, store=Memory()).read(site.url("/oak"))
    [record] = kept.values()
    assert json.loads(record)["title"] == "Oak"
