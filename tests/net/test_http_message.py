import http.client
from urllib.parse import urlsplit

import pytest

from graphpo_agent.net.http_message import FinalResponse, unreadable_coding
from tests.net.servers import raw_server


def test_an_answer_that_speaks_another_protocol_from_now_on_is_the_last_one():
    def talk(connection, over):
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")

    with raw_server(talk) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.response_class = FinalResponse
        connection.request("GET", "/")
        reply = connection.getresponse()
    assert (reply.status, reply.headers["Upgrade"]) == (101, "x")


@pytest.mark.parametrize(
    ("stated", "unreadable"),
    [("gzip, DCZ", "dcz"), (" dcb", "dcb"), ("gzip", None), ("utf-8", None), ("", None)],
)
def test_codings_that_cannot_be_undone_are_told_apart(stated, unreadable):
    assert unreadable_coding({"content-encoding": stated}) == unreadable
    assert unreadable_coding({}) is None
