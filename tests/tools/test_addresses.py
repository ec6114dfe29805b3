import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.net.failures import CallFailed
from tools.addresses import (
    WebAddress,
    is_public,
    literal_address,
    parse_address,
    public_addresses,
)

FORBIDDEN = """
    192.0.0.192 192.88.99.1 168.63.129.16 3fff::1 2001:1::1 2002:c000:c0:: ::ffff:192.0.0.192
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1
    192.0.0.1 192.0.2.1 192.168.1.1 198.18.0.1 198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.250
    240.0.0.1 255.255.255.255
    :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:0:127.0.0.1
    64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1
    2001:db8::1 2002:7f00:1:: 2002:a00:1::1 2002:a9fe:a9fe:: 2001:0:7f00:1::
    2001:0:808:808::80ff:fffe fc00::1 fd12:3456::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1
    4000::1 5f00::1
"""
PUBLIC = """
    1.1.1.1 8.8.8.8 93.184.216.34 198.17.255.255 2606:4700::1111 2a00:1450:4001::200e
    ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1
"""


@pytest.mark.parametrize("address", FORBIDDEN.split())
def test_addresses_off_the_public_internet(address):
    assert not is_public(address)
    with pytest.raises(CallFailed) as failed:
        public_addresses("host", ["8.8.8.8", address])
    assert failed.value.kind == "bad_arguments"


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_on_the_public_internet(address):
    assert is_public(address)
    assert public_addresses("host", [address, address]) == [address]


PRIVATE_V4 = st.one_of(
    *(
        st.ip_addresses(network=network)
        for network in ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.168.0.0/16")
    )
)


@given(PRIVATE_V4)
def test_no_wrapping_makes_a_private_address_public(inner):
    number = int(inner)
    wrapped = [
        (0xFFFF << 32) | number,
        (0x2002 << 112) | (number << 80),
        (0x0064FF9B << 96) | number,
        (0x20010000 << 96) | (number << 64) | 0xF7F7F7F7,
        (0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF),
    ]
    assert not any(is_public(str(ipaddress.IPv6Address(each))) for each in wrapped)


def test_an_allowed_network_opens_nothing_else():
    networks = [ipaddress.ip_network("10.1.0.0/16")]
    assert public_addresses("host", ["10.1.2.3"], networks) == ["10.1.2.3"]
    for other in ("10.2.0.1", "169.254.169.254", "::ffff:10.1.2.3"):
        with pytest.raises(CallFailed):
            public_addresses("host", ["10.1.2.3", other], networks)


def test_a_host_without_an_address_is_no_result():
    with pytest.raises(CallFailed) as failed:
        public_addresses("host", [])
    assert failed.value.kind == "no_result"


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "127.1", "127.0.0.1."]
)
def test_every_notation_of_a_number_is_recognised(host):
    assert literal_address(host) == "127.0.0.1"


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{}", "{:#x}", "0{:o}"]))
def test_whole_numbers_are_what_the_resolver_makes_of_them(number, notation):
    host = notation.format(number)
    resolved = socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)[0][4][0]
    assert literal_address(host) == resolved


@pytest.mark.parametrize("host", ["example.org", "a", "0x", "1.2.3.4.5", "256.1.1.1", "10.org"])
def test_names_are_no_literals(host):
    assert literal_address(host) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://Example.org", WebAddress("https", "example.org", 443, "/")),
        ("HTTP://example.org:80/a/../b?c=d#e", WebAddress("http", "example.org", 80, "/b?c=d")),
        ("http://[2606:4700::1111]/", WebAddress("http", "2606:4700::1111", 80, "/")),
        ("https://example.org?q=1", WebAddress("https", "example.org", 443, "/?q=1")),
        ("https://example.org/ü?", WebAddress("https", "example.org", 443, "/%C3%BC?")),
        ("https://bücher.example/", WebAddress("https", "xn--bcher-kva.example", 443, "/")),
    ],
)
def test_an_address_is_taken_apart(url, expected):
    assert parse_address(url) == expected
    assert parse_address(expected.url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org",
        "//example.org/",
        "file:///etc/passwd",
        "ftp://example.org/",
        "gopher://example.org/",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://user@example.org/",
        "http://user:pass@example.org/",
        "http://example.org@10.0.0.1/",
        "http://example.org\\@10.0.0.1/",
        "http://example.org:22/",
        "http://example.org:8080/",
        "http://example.org:99999/",
        "http://example.org:x/",
        "http://exa mple.org/",
        "http://example.org/a b",
        "http://example.org/\r\nHost: evil",
        "http://example.org/\x00",
        "http://[::1",
        "http://[fe80::1%25eth0]/",
        "http://127。0。0。1/",
        "http://１２７.0.0.1/",
        "http://-example.org/",
        "http://a..example.org/",
        f"http://{'a' * 64}.org/",
        "http://" + ".".join(["a" * 60] * 5) + "/",
        "http://example.org/" + "a" * 3000,
    ],
)
def test_addresses_that_are_refused(url):
    with pytest.raises(CallFailed) as failed:
        parse_address(url)
    assert failed.value.kind == "bad_arguments"
    assert "\n" not in str(failed.value)


@given(st.text(max_size=60).map(lambda text: "http://" + text) | st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse_address(text)
    except CallFailed as error:
        assert error.kind == "bad_arguments"
        return
    assert address.port in (80, 443)
    assert address.url.isascii() and not any(char.isspace() for char in address.url)
    assert parse_address(address.url) == address
