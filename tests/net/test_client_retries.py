"""What is tried again, how often, and how long that waits."""

import contextlib
import threading
import time
import warnings

import pytest

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.client import HttpService, Limits, Reply, classify_json, classify_status
from graphpo_agent.net.failures import CallFailed
from tests.net.servers import QUICK, always, answer, in_turn, raw_server, serving, unused_port


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_passing_failures_are_tried_again(method):
    script = in_turn(answer({}, 500), answer({}, 503, Retry_After="soon"), answer({"ok": 1}))
    with serving(script) as server:
        reply = HttpService("s", limits=QUICK).call(method, server.url)
    assert reply.json() == {"ok": 1} and len(server.requests) == 3


def test_a_service_that_never_answered_is_told_of_once_while_it_is_asked_again():
    script = in_turn(answer({}, 500), answer({}, 503), answer({"ok": 1}), answer({}, 500))
    with serving(script) as server:
        service = HttpService("s", limits=QUICK)
        with pytest.warns(UserWarning, match=r"s: GET http.*: HTTP 500: .*; asking again") as told:
            service.call("GET", server.url)
        assert len(told) == 1
        with warnings.catch_warnings(record=True) as told, contextlib.suppress(CallFailed):
            service.call("GET", server.url)
        assert not told


@pytest.mark.parametrize("hangs", [True, False])
def test_a_service_whose_first_call_is_not_tried_again_is_told_of_too(hangs):
    def script(before, request):
        gate.wait(10)
        return answer({}, 429, Retry_After="90")

    gate = threading.Event()
    if not hangs:
        gate.set()
    with serving(script) as server, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        service = HttpService("s", limits=Limits(deadline_s=0.5))
        with pytest.raises(CallFailed) as first:
            service.call("GET", server.url)
        with pytest.raises(CallFailed):
            service.call("GET", server.url)
        gate.set()
    assert [str(each.message) for each in told] == [str(first.value)]


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "transient"), (421, "transient"), (429, "rate_limit")]
)
def test_tries_end(status, kind):
    message = rf"s: GET .*HTTP {status}: .*busy.*3 tries"
    with (
        serving(always({"why": "busy"}, status)) as server,
        pytest.raises(CallFailed, match=message) as caught,
    ):
        HttpService("s", limits=QUICK).call("GET", server.url)
    assert caught.value.kind == kind and len(server.requests) == 3


@pytest.mark.parametrize("value", ["600", "Fri, 20 Nov 2099 10:00:00 GMT", "9" * 400])
def test_retry_after_is_capped(value, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    limits = Limits(deadline_s=60.0, tries=3, max_backoff_s=7.5)
    with serving(always({}, 429, Retry_After=value)) as server, pytest.raises(CallFailed):
        HttpService("s", limits=limits).call("GET", server.url)
    assert slept == [0, 7.5, 7.5] and len(server.requests) == 3


def test_retry_after_is_respected_below_the_cap_and_waits_grow(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    script = in_turn(answer({}, 500), answer({}, 429, Retry_After="5"), answer({}, 500))
    with serving(script) as server, pytest.raises(CallFailed):
        HttpService("s", limits=Limits(tries=5, deadline_s=500)).call("GET", server.url)
    start, first, asked, third, fourth = slept
    assert start == 0 and 0.25 <= first <= 0.5 and asked == 5.0
    assert 1.0 <= third <= 2.0 and 2.0 <= fourth <= 4.0


def test_waits_grow_no_longer_than_the_longest(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    limits = Limits(deadline_s=60.0, tries=6, max_backoff_s=1.5)
    with serving(always({}, 500)) as server, pytest.raises(CallFailed):
        HttpService("s", limits=limits).call("GET", server.url)
    assert max(slept) == 1.5 and slept[-2:] == [1.5, 1.5]


@pytest.mark.parametrize(
    "form", ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y"]
)
@pytest.mark.parametrize("zone", ["UTC-8", "UTC+8"])
def test_every_date_of_retry_after_is_in_gmt(form, zone, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    date = time.strftime(form, time.gmtime(time.time() + 1000))
    limits = Limits(deadline_s=50_000.0, tries=2, max_backoff_s=20_000.0)
    with serving(always({}, 429, Retry_After=date)) as server, pytest.raises(CallFailed):
        HttpService("s", limits=limits).call("GET", server.url)
    monkeypatch.undo()
    time.tzset()
    assert 900 < slept[1] <= 1000


def test_no_wait_leads_beyond_the_deadline():
    limits = Limits(deadline_s=5.0, tries=9, max_backoff_s=100.0)
    with (
        serving(always({}, 429, Retry_After="50")) as server,
        pytest.raises(CallFailed, match="1 try") as caught,
    ):
        HttpService("s", limits=limits).call("GET", server.url)
    assert caught.value.kind == "rate_limit"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\nhalf",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello",
    ],
    ids=["closed", "cut short", "bad gzip", "not http", "chunk of negative length"],
)
def test_broken_replies_are_transient(sent):
    tries = []

    def talk(connection, over):
        tries.append(1)
        connection.sendall(sent)

    with raw_server(talk) as url, pytest.raises(CallFailed, match="3 tries") as caught:
        HttpService("s", limits=QUICK).call("GET", url)
    assert caught.value.kind == "transient" and len(tries) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_unreachable_hosts_are_transient(host):
    with pytest.raises(CallFailed, match="tries") as caught:
        HttpService("s", limits=QUICK).call("GET", f"http://{host}:{unused_port()}/x")
    assert caught.value.kind == "transient" and "\n" not in str(caught.value)
    assert "Connection(" not in str(caught.value)  # a name that is no user's


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, ToolError, "check its address, key"),
        (403, ToolError, "check its address, key"),
        (404, ToolError, "check its address, key"),
        (407, ToolError, "HTTP 407: .*check its address, key"),
        (426, ToolError, "check its address, key"),
        (302, ToolError, "check its address, key"),
        (402, QuotaError, "used up"),
        (400, CallFailed, "HTTP 400"),
        (413, CallFailed, "HTTP 413"),
        (422, CallFailed, "HTTP 422"),
        (451, CallFailed, "HTTP 451"),
    ],
)
def test_refusals_are_not_tried_again(status, error, words):
    with (
        serving(always({}, status, Location="http://127.0.0.1:1/")) as server,
        pytest.raises(error, match=words) as caught,
    ):
        HttpService("s", limits=QUICK).call("GET", server.url)
    assert type(caught.value) is error and len(server.requests) == 1


def test_services_classify_by_their_own_rules():
    def classify(reply):
        return "quota" if "credits" in reply.text else classify_status(reply)

    with serving(in_turn(answer({}, 200), answer({"m": "Not enough credits"}, 400))) as server:
        service = HttpService("s", classify=classify)
        service.call("GET", server.url)
        with pytest.raises(QuotaError, match="Not enough credits"):
            service.call("GET", server.url)


def test_page_in_place_of_json_is_transient_where_json_is_expected():
    page = (200, {}, b"<html>\n gateway </html>")
    with serving(in_turn(page, page, answer([7]))) as server:
        assert HttpService("s").call("GET", server.url).text.startswith("<html>")
        service = HttpService("s", limits=QUICK, classify=classify_json)
        assert service.call("GET", server.url).json() == [7]
    with pytest.raises(CallFailed, match="not JSON: '<html> gateway </html>'"):
        Reply(*page).json()
    assert classify_json(Reply(200, {}, b"[" * 100_000)) == "transient"
