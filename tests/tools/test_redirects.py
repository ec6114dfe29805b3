"""Where a page may lead, and where it may not."""

import socket

import pytest

from graphpo_agent.net.store import CallStore
from tests.tools.fetching import OAK, OAK_HTML, failure_of, reader_for
from tests.tools.web_server import HTML, LOCAL


def test_redirects_are_followed(site):
    for number in range(5):
        site.page(f"/{number}", b"", status=302, Location=f"{number + 1}?q#part")
        site.pages[f"/{number}?q"] = site.pages[f"/{number}"]
    site.page("/5?q", OAK)
    document = reader_for(site).read(site.url("/0"))
    assert document.text == "An oak is a tree."
    assert document.url == site.url("/0")
    site.page("/start", b"", status=301, Location="/0")
    assert failure_of(reader_for(site), site.url("/start")) == "no_result"
    site.page("/round", b"", status=307, Location="/round")
    assert failure_of(reader_for(site), site.url("/round")) == "no_result"
    assert site.requests["/round"] == 6


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (b"/wiki/\xe5\x8c\x97\xe4\xba\xac", "/wiki/%E5%8C%97%E4%BA%AC"),
        ("/公園?q=樹".encode(), "/%E5%85%AC%E5%9C%92?q=%E6%A8%B9"),
        ("/café".encode(), "/caf%C3%A9"),
        ("/à".encode(), "/%C3%A0"),
        ("/café".encode("latin-1"), "/caf%E9"),
        (b"/a b?c d ", "/a%20b?c%20d"),
        (b"/caf%C3%A9%20b", "/caf%C3%A9%20b"),
    ],
)
def test_redirects_are_read_as_a_browser_does(site, location, path):
    site.page(path, OAK)
    site.pages["/hop"] = lambda handler: handler.wfile.write(
        b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
    )
    assert reader_for(site).read(site.url("/hop")).text == "An oak is a tree."


def test_a_page_that_leads_on_at_once_is_a_redirect(site):
    def leading(to):
        return f'<meta http-equiv="refresh" content="0; url={to}"><p>Wait.'.encode()

    site.page("/", leading("/trees/moved"), HTML)
    site.page("/trees/moved", b"", status=302, Location="/trees/")
    site.page("/trees/", leading("the oak"), HTML)
    site.page("/trees/the%20oak", OAK_HTML, HTML)
    document = reader_for(site).read(site.url())
    assert document.contents == '"Oak"\nAn oak is a tree.'
    site.page("/loop", leading("/pool"), HTML)
    site.page("/pool", leading("/loop"), HTML)
    assert failure_of(reader_for(site), site.url("/loop")) == "no_result"
    site.page("/self", leading("/self"), HTML)
    assert reader_for(site).read(site.url("/self")).text == "Wait."
    site.page("/out", leading("http://127.0.0.2:1/"), HTML)
    assert failure_of(reader_for(site), site.url("/out")) == "bad_arguments"


def test_a_redirect_may_lead_to_a_name_in_any_script(site):
    site.page("/", b"", status=302, Location="http://b\xc3\xbccher.example/")
    asked = []

    def looking_up(host, port):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "look-up")

    ports = [80, site.port]
    assert failure_of(reader_for(site, allowed_ports=ports, resolver=looking_up), site.url())
    assert asked == ["xn--bcher-kva.example"]


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://2852039166/",
        "http://[::ffff:169.254.169.254]/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "http://127.0.0.1:22/",
        "http://user:pass@127.0.0.1/",
        "//localhost/",
        "javascript:alert(1)",
        "http://[",
        "http://a..b/",
        "http://blocked.example/page",
    ],
)
def test_no_redirect_leads_out_of_bounds(site, target):
    site.page("/", OAK, status=302, Location=target)
    reader = reader_for(
        site,
        allowed_ports=[80, site.port],
        allowed_networks=LOCAL,
        blocked_hosts=["blocked.example"],
        resolver=lambda host, port: ["10.0.0.1"],
    )
    assert failure_of(reader, site.url()) == "bad_arguments"


def test_a_blocked_page_is_not_asked_for(site):
    site.page("/answers", OAK)
    reader = reader_for(site, blocked_hosts=["127.0.0.1/answers"])
    assert failure_of(reader, site.url("/%61nswers")) == "bad_arguments"
    assert not site.requests


def test_a_recorded_page_behind_a_redirect_is_still_blocked(site, tmp_path):
    site.page("/innocent", b"", status=302, Location="/answers")
    site.page("/answers", OAK)
    path = tmp_path / "calls.sqlite"
    assert (
        reader_for(site, store=CallStore(path)).read(site.url("/innocent")).text
        == "An oak is a tree."
    )
    strict = CallStore(path, "strict")
    blocking = reader_for(site, store=strict, blocked_hosts=["127.0.0.1/answers"])
    assert failure_of(blocking, site.url("/innocent")) == "bad_arguments"
