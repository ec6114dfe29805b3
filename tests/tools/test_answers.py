"""Answers of a server: compressed, broken, slow or hostile."""

import gzip
import threading
import time
import tracemalloc
import zlib

import pytest

from graphpo_agent.net.failures import CallFailed
from tests.tools.fetching import OAK, OAK_HTML, failure_of, reader_for
from tests.tools.web_server import HTML

HOSTILE = b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">x</p>"


def test_a_page_is_cut_at_its_decompressed_size(site):
    bomb = gzip.compress(b"oak " * 50_000_000)
    site.page("/bomb", bomb, "text/plain", Content_Encoding="gzip")
    tracemalloc.start()
    text = reader_for(site, max_bytes=100_000).read(site.url("/bomb")).text
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 99_990 <= len(text) <= 100_000
    assert peak < 20_000_000
    site.page("/twice", gzip.compress(bomb), "text/plain", Content_Encoding="gzip, gzip")
    text = reader_for(site, max_bytes=100_000).read(site.url("/twice")).text
    assert len(text) <= 100_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_pages_are_read(site, encoding):
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    site.page("/", pack(OAK), Content_Encoding=encoding)
    assert reader_for(site).read(site.url()).text == "An oak is a tree."


def test_a_broken_compression_is_no_result(site):
    site.page("/", b"no gzip at all", Content_Encoding="gzip")
    assert failure_of(reader_for(site), site.url()) == "no_result"


@pytest.mark.parametrize("coding", ["compress", "DCZ", "gzip, compress"])
def test_a_compression_that_was_not_asked_for_is_no_text(site, coding):
    site.page("/", b"\x0b\x02\x80hello\x03", Content_Encoding=coding)
    with pytest.raises(CallFailed, match="which was not asked for") as caught:
        reader_for(site).read(site.url())
    assert caught.value.kind == "no_result"
    site.page("/moved", b"\x0b\x02", status=301, Content_Encoding=coding, Location="/oak")
    site.page("/oak", OAK)
    assert reader_for(site).read(site.url("/moved")).text == "An oak is a tree."


@pytest.mark.parametrize("coding", ["", "identity", "utf-8", "none", "aws-chunked"])
def test_a_coding_that_is_no_compression_says_nothing(site, coding):
    site.page("/", OAK, Content_Encoding=coding)
    assert reader_for(site).read(site.url()).text == "An oak is a tree."


def _hint(handler, times):
    for _ in range(times):
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n")


def test_interim_responses_are_passed_over(site):
    site.page("/oak", OAK)
    final = site.pages["/oak"]
    site.pages["/"] = lambda handler: (_hint(handler, 3), final(handler))
    assert reader_for(site).read(site.url()).text == "An oak is a tree."


def _drip_hints(handler):
    while True:
        _hint(handler, 1)
        time.sleep(0.05)


def _drip_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
    _drip(handler)


def _drip_body(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    _drip(handler)


def _drip_chunks(handler):
    handler.wfile.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    _drip(handler, b"1\r\na\r\n")


def _drip_nothing(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello")
    handler.wfile.flush()
    handler.rfile.read(1)


def _drip(handler, piece=b"a"):
    """A byte now and then for as long as somebody listens."""
    while True:
        handler.wfile.write(piece)
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.mark.parametrize(
    "answer", [_drip_head, _drip_body, _drip_chunks, _drip_nothing, _drip_hints]
)
def test_a_server_that_never_ends_meets_the_deadline(site, answer):
    site.pages["/"] = answer
    assert failure_of(reader_for(site, deadline_s=0.5, tries=2), site.url()) == "transient"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello",
    ],
)
def test_a_broken_answer_is_transient(site, answer):
    site.pages["/"] = lambda handler: handler.wfile.write(answer)
    assert failure_of(reader_for(site), site.url()) == "transient"


def test_a_hostile_page_does_not_stop_the_others(site):
    site.page("/hostile", HOSTILE, HTML)
    site.page("/oak", OAK_HTML, HTML)
    reader = reader_for(site, extraction_s=3.0, extractors=2)
    kinds = []
    hostile = threading.Thread(
        target=lambda: kinds.append(failure_of(reader, site.url("/hostile")))
    )
    hostile.start()
    assert reader.read(site.url("/oak")).text == "An oak is a tree."
    hostile.join()
    assert kinds == ["no_result"]
    assert reader.read(site.url("/oak")).text == "An oak is a tree."


def test_a_page_that_came_in_time_but_cannot_be_read_is_no_outage(site):
    site.page("/hostile", HOSTILE, HTML)
    reader = reader_for(site, deadline_s=2.0, extraction_s=3.0, tries=2)
    assert failure_of(reader, site.url("/hostile")) == "no_result"
    assert site.requests["/hostile"] == 1
