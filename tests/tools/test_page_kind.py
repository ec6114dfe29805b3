import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.page_kind import is_text, page_kind, parse_content_type


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", ("", None)),
        ("text/html", ("text/html", None)),
        (' Text/HTML ; a=b; Charset = "UTF-8" ', ("text/html", "UTF-8")),
        ("text/html; charset", ("text/html", "")),
    ],
)
def test_a_content_type_is_a_type_and_a_charset(header, expected):
    assert parse_content_type(header) == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("", True),
        ("unknown/unknown", True),
        ("application/unknown", True),
        ("text/x-anything", True),
        ("application/json", True),
        ("application/atom+xml", True),
        ("application/xhtml+xml", True),
        ("image/svg+xml", False),
        ("application/octet-stream", False),
        ("application/zip", False),
    ],
)
def test_which_types_may_be_text(content_type, expected):
    assert is_text(content_type) == expected


@pytest.mark.parametrize(
    ("content_type", "text", "expected"),
    [
        ("text/html", "no tag at all", "html"),
        ("text/html", "<?xml version='1.0'?>\n<p>", "html"),
        ("text/html", "<rss version='2.0'>", "feed"),
        ("text/plain", "<rss version='2.0'>", "text"),
        ("application/json", "<html>", "text"),
        ("application/atom+xml", "<feed xmlns='http://www.w3.org/2005/Atom'>", "feed"),
        ("text/xml", "<rdf:RDF>", "feed"),
        ("text/xml", "<!DOCTYPE rss [<!ENTITY a '>'>\n] >\n<rss>", "feed"),
        ("text/xml", "<rssx>", "text"),
        ("text/xml", "<html>", "html"),
        ("text/xml", "<p>", "text"),
        ("", "<p>", "html"),
        ("", "\n<!DOCTYPE HTML PUBLIC '-//W3C//DTD'>\n<!-- <rss> --><body>", "html"),
        ("", "\n<?xml version='1.0'?><urlset>", "text"),
        ("", "<?xml version='1.0'?><html>", "html"),
        ("", "<?xml version='1.0'?><?style x?><feed>", "feed"),
        ("", "<oak@example.org> wrote:", "text"),
        ("", "1 < 2", "text"),
        ("", "", "text"),
        ("", "<!-- " * 100_000, "text"),
        ("", "<? ?>" * 100_000, "text"),
    ],
)
def test_what_a_page_is_read_as(content_type, text, expected):
    assert page_kind(content_type, text) == expected


@given(st.text("<>!?-[]xmlrssfeed \n'\"/", max_size=60))
def test_any_beginning_is_of_some_kind(text):
    assert page_kind("", text) in ("html", "feed", "text")
