"""The rules of RFC 9309, sections 2.2.1 to 2.2.3, with its examples."""

import pytest

from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.reply import Reply
from tools.addresses import parse_address
from tools.robots import RobotRules


def allows(text, path, user_agent="Oak-Bot/1.0 (reads single pages)"):
    """Whether a site that says so lets a page be read."""
    body = text if isinstance(text, bytes) else text.encode()
    try:
        RobotRules(user_agent).check(
            parse_address("https://example.org" + path), lambda address: Reply(200, {}, body)
        )
    except CallFailed as error:
        assert error.kind == "no_result"
        return False
    return True


def rules(*lines):
    return "\n".join(["User-agent: *", *lines])


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", True),
        ("Disallow: /", True),
        ("User-agent: *\nDisallow: /", False),
        (b"\xef\xbb\xbfUser-agent: *\nDisallow: /", False),
        ("user-AGENT : *\r\nDISALLOW:/ # all of it", False),
        ("User-agent: *\rDisallow: /", False),
        ("User-agent: *\n\n\nDisallow: /", False),
        ("User-agent: *\nCrawl-delay: 1\n\nDisallow: /", False),
        ("User-agent: *\nDisallow:", True),
        ("User-agent: *\nDisallow: /\nDisallow:", False),
        ("User-agent: OAK-bot\nDisallow: /", False),
        ("User-agent: Oak-Bot/2.0\nDisallow: /", False),
        ("User-agent: Oak\nDisallow: /", True),
        ("User-agent: Oak-Bot-News\nDisallow: /", True),
        ("User-agent: *\nDisallow: /\n\nUser-agent: oak-bot\nDisallow: /other", True),
        ("User-agent: *\nDisallow: /\n\nUser-agent: oak-bot\nDisallow:", True),
        ("User-agent: *\nDisallow: /\n\nUser-agent: oak-bot", True),
        ("User-agent: oak-bot\nUser-agent: fir\nDisallow: /", False),
        ("User-agent: oak-bot\nSitemap: /map\nUser-agent: fir\nDisallow: /", False),
        ("User-agent: oak-bot\nAllow: /b\nUser-agent: fir\nDisallow: /", True),
        (
            "User-agent: oak-bot\nDisallow: /b\n\nUser-agent: *\nAllow: /page"
            "\n\nUser-agent: oak-bot\nDisallow: /page",
            False,
        ),
    ],
)
def test_the_groups_that_name_an_agent_hold_for_it(text, allowed):
    assert allows(text, "/page") == allowed


@pytest.mark.parametrize(
    ("lines", "path", "allowed"),
    [
        (["Allow: /", "Disallow: /private"], "/private/oak", False),
        (["Disallow: /", "Allow: /pub"], "/pub/oak", True),
        (["Disallow: /", "Allow: /pub"], "/private", False),
        (["Allow: /page", "Disallow: /page"], "/page", True),
        (["Disallow: /page", "Allow: /page"], "/page", True),
        (["Allow: /page", "Disallow: /*.htm"], "/page.htm", False),
        (
            ["Allow: /example/page/", "Disallow: /example/page/disallowed.gif"],
            "/example/page/disallowed.gif",
            False,
        ),
        (["Disallow: /private"], "/Private", True),
    ],
)
def test_the_longest_rule_wins_and_an_allow_before_a_disallow(lines, path, allowed):
    assert allows(rules(*lines), path) == allowed


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("/foo/bar?baz=quz", "/foo/bar?baz=quz", True),
        ("/foo/bar?baz=https://foo.bar", "/foo/bar?baz=https://foo.bar", True),
        ("/foo/bar/ツ", "/foo/bar/%E3%83%84", True),
        ("/foo/bar/%e3%83%84", "/foo/bar/ツ", True),
        ("/foo/bar/%62%61%7A", "/foo/bar/baz", True),
        ("/foo/bar/baz", "/foo/bar/%62%61%7A", True),
        ("/a%2Fb", "/a/b", False),
        ("/path/file-with-a-%2A.html", "/path/file-with-a-*.html", True),
        ("/path/file-with-a-%2A.html", "/path/file-with-a-b.html", False),
        ("/path/foo-%24", "/path/foo-$", True),
        ("/a$b", "/a$b", True),
        ("/*.pdf$", "/oak.pdf", True),
        ("/*.pdf$", "/oak.pdf.pdf", True),
        ("/*.pdf$", "/oak.pdf?page=1", False),
        ("/*?q=", "/oak?q=1", True),
        ("/a*b*c", "/a--c--b--c", True),
        ("/a*b*c", "/a--c--b", False),
        ("/fish$", "/fish", True),
        ("/fish$", "/fishes", False),
        ("*/private", "/a/private", True),
        ("/" + "*a" * 1000 + "b", "/" + "a" * 1500, False),
    ],
)
def test_what_a_pattern_covers(pattern, path, covered):
    assert allows(rules(f"Disallow: {pattern}"), path) != covered
