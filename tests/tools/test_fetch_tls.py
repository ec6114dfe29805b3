"""Pages over TLS: the certificate's name, old servers, closed connections."""

import socket
import ssl
import threading
import warnings

import pytest
import trustme

from tests.tools.fetching import OAK, failure_of, reader_for
from tests.tools.web_server import LOCAL, serving
from tools.fetch import WebReader


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def _https(authority, name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    names = []
    context.sni_callback = lambda sock, name, context: names.append(name)
    return context, names


def test_https_checks_the_certificate_of_the_name(authority, tmp_path):
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context, names = _https(authority, "oak.example")
    with serving(context) as site:
        site.page("/", OAK)
        options = {"resolver": lambda host, port: ["127.0.0.1"]}
        reader = reader_for(site, ca_file=str(ca_file), **options)
        url = f"https://oak.example:{site.port}/"
        assert reader.read(url).text == "An oak is a tree."
        assert names == ["oak.example"]
        assert failure_of(reader, url.replace("oak", "fir")) == "no_result"
        assert failure_of(reader_for(site, **options), url) == "no_result"
        assert site.requests["/"] == 1


def test_a_server_of_outdated_tls_or_none_is_no_outage(authority):
    context, _ = _https(authority, "oak.example")
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.minimum_version = ssl.TLSVersion.TLSv1
    for tls in (context, None):
        with serving(tls) as site:
            url = f"https://127.0.0.1:{site.port}/"
            assert failure_of(reader_for(site, tries=2), url) == "no_result"


def test_a_tls_connection_that_is_closed_is_transient():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def close():
            connection, _ = server.accept()
            connection.recv(65536)
            connection.close()

        threading.Thread(target=close, daemon=True).start()
        reader = WebReader(
            allowed_ports=[port], allowed_networks=LOCAL, tries=1, respect_robots=False
        )
        assert failure_of(reader, f"https://127.0.0.1:{port}/") == "transient"


def test_a_tls_handshake_that_never_ends_meets_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        reader = WebReader(
            allowed_ports=[port], allowed_networks=LOCAL, deadline_s=0.5, respect_robots=False
        )
        assert failure_of(reader, f"https://127.0.0.1:{port}/") == "transient"
