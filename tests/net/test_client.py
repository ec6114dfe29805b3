import contextlib
import gzip
import math
import socket
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.client import HttpService, Limits
from graphpo_agent.net.failures import CallFailed
from tests.net.servers import QUICK, always, answer, drip, in_turn, raw_server, serving, unused_port


def test_what_is_sent_and_what_comes_back():
    with serving(always({"found": 1}, X_Kind="t", Set_Cookie="a=b")) as server:
        service = HttpService("s", secret_headers={"X-API-KEY": "key-12345678"})
        url = f"{server.url}/search"
        reply = service.call(
            "post", url, params={"n": 2, "none": None}, body={"q": "Öl"}, headers={"X-L": "de"}
        )
        service.call("GET", url)
    first, second = server.requests
    assert (first.method, first.path, first.json()) == ("POST", "/search?n=2", {"q": "Öl"})
    assert first.headers["X-API-KEY"] == "key-12345678" and first.headers["X-L"] == "de"
    assert first.headers["Content-Type"] == "application/json"
    assert first.headers["User-Agent"] == "graphpo-agent"
    assert second.body == b"" and "Cookie" not in second.headers
    assert reply.json() == {"found": 1} and reply.headers["x-kind"] == "t"


def test_connections_are_kept_open():
    ports = set()
    with serving(always({})) as server:
        original = server.process_request

        def count(request, client_address):
            ports.add(client_address)
            original(request, client_address)

        server.process_request = count
        service = HttpService("s")
        for _ in range(5):
            thread = threading.Thread(target=service.call, args=("POST", server.url))
            thread.start()
            thread.join()
    assert len(server.requests) == 5 and len(ports) == 1


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
    ],
    ids=["status", "header", "body", "body to the end", "chunk"],
)
def test_dripping_server_is_stopped_at_the_deadline(first):
    limits = Limits(deadline_s=0.3, tries=9)
    with raw_server(drip(first)) as url, pytest.raises(CallFailed) as caught:
        HttpService("s", limits=limits).call("GET", url)
    assert caught.value.kind == "transient" and "no complete reply within" in str(caught.value)


def test_a_connection_that_was_kept_is_stopped_at_the_deadline_too():
    sent = []

    def talk(connection, over):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n")
        while len(sent) < 200 and not over.wait(0.02):
            sent.append(connection.send(b"x"))

    service = HttpService("s", limits=Limits(deadline_s=0.5, tries=1))
    with raw_server(talk) as url:
        assert service.call("GET", url).json() == {}
        with pytest.raises(CallFailed, match="no complete reply within"):
            service.call("GET", url)
        assert 0 < len(sent) < 199


def test_a_proxy_that_drips_before_it_connects_is_stopped_at_the_deadline(monkeypatch):
    sent = []

    def talk(connection, over):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while len(sent) < 500 and not over.wait(0.02):
            sent.append(connection.send(b"x"))

    with raw_server(talk) as url:
        monkeypatch.setenv("https_proxy", url)
        service = HttpService("s", limits=Limits(deadline_s=0.5, tries=1))
        with pytest.raises(CallFailed, match="no complete reply within"):
            service.call("GET", "https://service.test/")
        assert 0 < len(sent) < 499


def test_an_address_that_is_silent_leaves_time_for_the_next(monkeypatch):
    look_up = socket.getaddrinfo

    def two(host, port, *args, **options):
        hosts = ["127.0.0.2", "127.0.0.1"] if host == "service.test" else [host]
        return [found for each in hosts for found in look_up(each, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    with serving(always({"ok": 1})) as server, contextlib.ExitStack() as stack:
        port = server.server_address[1]
        silent = stack.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(4):  # more than wait in its queue: who comes later gets no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        service = HttpService("s", limits=Limits(deadline_s=4.0, tries=1))
        assert service.call("GET", f"http://service.test:{port}/").json() == {"ok": 1}


def test_nothing_is_sent_once_the_time_is_over(monkeypatch):
    look_up = socket.getaddrinfo

    def slow(*args, **options):
        time.sleep(0.3)
        return look_up(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with serving(always({})) as server, pytest.raises(CallFailed, match="no complete reply"):
        HttpService("s", limits=Limits(deadline_s=0.1, tries=1)).call("GET", server.url)
    assert server.requests == []


def test_silent_server_is_stopped_at_the_deadline():
    with (
        raw_server(lambda connection, over: over.wait() and None) as url,
        pytest.raises(CallFailed, match="no complete reply") as caught,
    ):
        HttpService("s", limits=Limits(deadline_s=0.2)).call("POST", url, body={})
    assert caught.value.kind == "transient"


def test_interim_replies_are_passed_over_on_a_connection_that_is_kept():
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" * 2
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n42"

    def talk(connection, over):
        connection.sendall(hints + final)
        connection.recv(65536)
        connection.sendall(final)

    with raw_server(talk) as url:
        service = HttpService("s", limits=QUICK)
        assert [service.call("GET", url).json() for _ in range(2)] == [42, 42]


def test_a_compression_that_was_not_asked_for_is_a_clear_line():
    packed = answer("oak", Content_Encoding="dcz")
    with serving(in_turn(packed, answer("oak"))) as server:
        assert HttpService("s", limits=QUICK).call("GET", server.url).json() == "oak"
    with serving(in_turn(packed)) as server, pytest.raises(CallFailed) as caught:
        HttpService("s", limits=QUICK).call("GET", server.url)
    assert caught.value.kind == "transient"
    assert "the reply is compressed as dcz, which was not asked for" in str(caught.value)


def test_decompressed_size_is_capped():
    bomb = gzip.compress(bytes(50 * 2**20))
    headers = {"Content-Encoding": "gzip"}
    with serving(lambda before, request: (200, headers, bomb)) as server:
        with pytest.raises(CallFailed, match="larger than 1048576 bytes") as caught:
            HttpService("s", limits=Limits(max_bytes=2**20)).call("GET", server.url)
        assert caught.value.kind == "no_result" and len(server.requests) == 1
        reply = HttpService("s", limits=Limits(max_bytes=50 * 2**20)).call("GET", server.url)
    assert len(reply.body) == 50 * 2**20


@pytest.mark.parametrize("chunks", [b"", b"5;", b"5\r\nhello\r\n0\r\nX-Trailer: "])
def test_a_line_between_chunks_that_never_ends_is_read_no_further(chunks):
    def talk(connection, over):
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        while not over.is_set():
            connection.sendall(b"1" * 65536)

    with raw_server(talk) as url, pytest.raises(CallFailed, match="exceeded maximum") as caught:
        HttpService("s", limits=Limits(deadline_s=5.0, tries=1)).call("GET", url)
    assert caught.value.kind == "transient"


@pytest.mark.parametrize("location", [b"http://[x", b"/caf\xe9", b"//", b"http://a:b/", b"\xff://"])
def test_wherever_a_redirect_leads_it_is_told_and_not_followed(location):
    sent = b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
    with (
        raw_server(lambda connection, over: connection.sendall(sent)) as url,
        pytest.raises(ToolError, match=r"HTTP 302 leads to .*check its address") as caught,
    ):
        HttpService("s", limits=QUICK).call("GET", url)
    assert ascii(location.decode("latin-1")) in str(caught.value)


def test_a_redirect_is_read_no_further_than_other_replies():
    bomb = gzip.compress(bytes(50 * 2**20))
    headers = {"Content-Encoding": "gzip", "Location": "/"}
    with serving(lambda before, request: (302, headers, bomb)) as server:
        service = HttpService("s", limits=Limits(max_bytes=2**20))
        tracemalloc.start()
        with pytest.raises(CallFailed, match="larger than 1048576 bytes"):
            service.call("GET", server.url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20 * 2**20


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000/x",
        "ftp://host/x",
        "/x",
        "http://",
        "http://[::1",
        "http://u:hunter2@host/",
        "",
    ],
)
def test_unusable_address_is_one_clear_line(url):
    with pytest.raises(ToolError, match="cannot be sent") as caught:
        HttpService("s").call("GET", url)
    assert "\n" not in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "limits",
    [
        {"tries": 0},
        {"tries": "3"},
        {"concurrency": 1.5},
        {"deadline_s": 0},
        {"deadline_s": math.inf},
        {"deadline_s": "30"},
        {"per_second": 0.0},
        {"max_backoff_s": -1},
    ],
)
def test_senseless_limits_are_refused(limits):
    with pytest.raises(ToolError, match=next(iter(limits))):
        Limits(**limits)


def test_no_credential_appears_in_any_message_or_reply():
    key, param = "sk/very+secret=12345", "other key & 98765"

    def echo(before, request):
        sent = {"auth": request.headers["Authorization"], "path": request.path}
        return answer(sent, 200 if before == 0 else 400, X_Echo=request.headers["Authorization"])

    with serving(echo) as server:
        service = HttpService(
            "s", secret_headers={"Authorization": f"Bearer {key}"}, secret_params={"k": param}
        )
        reply = service.call("GET", server.url)
        with pytest.raises(CallFailed) as refused:
            service.call("GET", server.url)
    closed = f"http://127.0.0.1:{unused_port()}/{key}"
    broken = HttpService(
        "s", limits=QUICK, secret_headers={"X": f"{key}"}, secret_params={"k": param}
    )
    with pytest.raises(CallFailed) as unreachable:
        broken.call("GET", closed)
    no_http = f"{key} is no key\r\n\r\n".encode()  # an error of Python's quotes it
    with (
        raw_server(lambda connection, over: connection.sendall(no_http)) as url,
        pytest.raises(CallFailed, match="is no key") as babbled,
    ):
        broken.call("GET", url)
    with pytest.raises(ToolError) as malformed:
        HttpService("s", secret_headers={"X": f"{key}\n"}).call("GET", server.url)
    assert key in server.requests[0].headers["Authorization"]
    assert reply.json() == {"auth": "***", "path": "/?k=***"}
    failures = (refused, unreachable, babbled, malformed)
    for text in (str(reply), *(str(failure.value) for failure in failures)):
        for spelled in ("very", "12345", "other", "98765"):
            assert spelled not in text
    for raised in failures:
        assert raised.value.__cause__ is None and raised.value.__context__ is None


def test_calls_under_way_are_limited():
    at_once, most, lock, gate = 0, 0, threading.Lock(), threading.Barrier(3)

    def script(before, request):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait(10)  # three at once are needed to go on
        with lock:
            at_once -= 1
        return answer({})

    with serving(script) as server:
        service = HttpService("s", limits=Limits(concurrency=3))
        threads = [
            threading.Thread(target=service.call, args=("GET", server.url)) for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 3 and len(server.requests) == 12


def test_requests_are_spaced_retries_included(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    for module in ("client", "pace"):  # not the alarm's thread, which others use later
        monkeypatch.setattr(f"graphpo_agent.net.{module}.time", clock)
    with serving(in_turn(answer({}), answer({}, 500), answer({}))) as server:
        service = HttpService("s", limits=Limits(per_second=0.1, max_backoff_s=0.001))
        service.call("GET", server.url)
        service.call("GET", server.url)
    assert slept == pytest.approx([0, 10, 10]) and len(server.requests) == 3


def test_environment_gives_proxies_but_no_passwords(monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with serving(always({"via": "proxy"})) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert HttpService("s").call("GET", "http://service.test/x").json() == {"via": "proxy"}
        HttpService("s").call("GET", f"{proxy.url}/direct")
    assert [request.path for request in proxy.requests] == ["http://service.test/x", "/direct"]
    assert not any("Authorization" in request.headers for request in proxy.requests)


def test_what_a_proxy_is_logged_into_with_appears_nowhere(monkeypatch):
    def echo(before, request):
        sent = {"asked": request.headers["Proxy-Authorization"], "password": "pass/word"}
        return answer(sent, 200 if before == 0 else 407)

    with serving(echo) as proxy:
        address = proxy.url.replace("//", "//me:pass%2Fword@")
        monkeypatch.setenv("http_proxy", address)
        service = HttpService("s", limits=QUICK)
        reply = service.call("GET", "http://service.test/x").json()
        assert reply == {"asked": "Basic ***", "password": "***"}
        with pytest.raises(ToolError, match=r'HTTP 407: .*"Basic \*\*\*"'):
            service.call("GET", "http://service.test/x")
    assert proxy.requests[0].headers["Proxy-Authorization"] == "Basic bWU6cGFzcy93b3Jk"


def test_a_proxy_that_does_not_know_who_asks_stops_the_run(monkeypatch):
    refusal = b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n"
    with raw_server(lambda connection, over: connection.sendall(refusal)) as url:
        monkeypatch.setenv("https_proxy", url)
        with pytest.raises(ToolError, match=r"407 Who are you: .*HTTPS_PROXY") as caught:
            HttpService("s", limits=QUICK).call("GET", "https://service.test/")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["http://user:word@", "http://", "http://host:port"])
def test_a_proxy_that_is_no_address_is_one_line_without_its_password(monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "127.0.0.1,.service.test")
    with pytest.raises(
        ToolError, match=r"HTTP_PROXY.* has no host; write http://host:port$"
    ) as told:
        HttpService("s").call("GET", "http://other.test/x")
    assert "word" not in str(told.value)
    with serving(always({})) as server:
        assert HttpService("s").call("GET", server.url).status == 200


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "ftp"])
def test_a_proxy_of_another_kind_is_one_clear_line(monkeypatch, scheme):
    monkeypatch.setenv("all_proxy", f"{scheme}://127.0.0.1:1")
    with pytest.raises(ToolError, match=rf"speaks {scheme}, want http or https; .*NO_PROXY$"):
        HttpService("s").call("GET", "http://service.test/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(always({})) as server:
        assert HttpService("s").call("GET", server.url).status == 200
