import socketserver
import ssl
import threading
from contextlib import contextmanager

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.client import HttpService, Limits
from graphpo_agent.net.failures import CallFailed
from tests.net.servers import always, drip, serving

# Signed by itself for 127.0.0.1; made for these tests, it protects nothing.
KEY_AND_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgtI1+kyVDPGho3JMD
XLWimHohO9x1KSbLviWOu47YKr+hRANCAAQl/nvx25Jtt8P8RHej/xznRK26FWir
gazXBVh/wbmdZuihYLqeeWj37pWhpPWld/ULjqmb+BbHhR6pWMI4MxAr
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUMrvAG3mqEHfrbZKSK2C9/Hv0oHUwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMDE1NTkzNVoYDzIxMjYxMDI3
MTU1OTM1WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQl/nvx25Jtt8P8RHej/xznRK26FWirgazXBVh/wbmdZuihYLqeeWj3
7pWhpPWld/ULjqmb+BbHhR6pWMI4MxAro28wbTAdBgNVHQ4EFgQUsMmbveLE7CS1
xOY1Nkuxv9BnbMgwHwYDVR0jBBgwFoAUsMmbveLE7CS1xOY1Nkuxv9BnbMgwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSAAwRQIgRQZxVOMJGP3KbeDl3LhLkhSosl8WxsC4blCmtmEJO7MCIQD+
2q9aXWkRwcaVT8duNKbYpN6abY3uSmCBcCvgEIIUHQ==
-----END CERTIFICATE-----
"""


@contextmanager
def tls_server(pem, talk):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            connection = context.wrap_socket(self.request, server_side=True)
            connection.recv(65536)
            talk(connection, over)
            connection.unwrap()

    class Tcp(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            """A client that goes away early is part of the tests."""

    with Tcp(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"https://127.0.0.1:{server.server_address[1]}/x"
        finally:
            over.set()
            server.shutdown()


def hello(connection, over):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.fixture
def pem(tmp_path):
    path = tmp_path / "server.pem"
    path.write_text(KEY_AND_CERTIFICATE)
    return path


def test_certificate_that_is_not_trusted_stops_the_run(pem, monkeypatch):
    with tls_server(pem, hello) as url:
        with pytest.raises(ToolError, match="REQUESTS_CA_BUNDLE") as caught:
            HttpService("s").call("GET", url)
        assert "\n" not in str(caught.value)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
        assert HttpService("s").call("GET", url).text == "ok"


@pytest.mark.parametrize("name", ["missing.pem", "no.pem", "directory/missing"])
def test_certificates_that_cannot_be_read_are_one_clear_line(pem, monkeypatch, tmp_path, name):
    (tmp_path / "no.pem").write_text("no certificate")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / name))
    with (
        tls_server(pem, hello) as url,
        pytest.raises(ToolError, match=rf"CA_BUNDLE.*{name}: ") as e,
    ):
        HttpService("s").call("GET", url)
    assert "\n" not in str(e.value)


def test_https_to_a_server_without_tls_is_one_clear_line(monkeypatch):
    with serving(always({})) as server:
        url = server.url.replace("http:", "https:")
        with pytest.raises(ToolError, match=r"no TLS is spoken there; write http://"):
            HttpService("s").call("GET", url)
        monkeypatch.setenv("https_proxy", url)
        with pytest.raises(ToolError, match=r"no TLS is spoken there; .*in HTTPS_PROXY"):
            HttpService("s").call("GET", "https://service.test/")


@pytest.mark.parametrize(
    "first",
    [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"],
    ids=["status", "header", "body to the end"],
)
def test_dripping_server_is_stopped_at_the_deadline(pem, monkeypatch, first):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
    limits = Limits(deadline_s=0.5, tries=9)
    with tls_server(pem, drip(first)) as url, pytest.raises(CallFailed) as caught:
        HttpService("s", limits=limits).call("GET", url)
    assert caught.value.kind == "transient" and "no complete reply" in str(caught.value)
