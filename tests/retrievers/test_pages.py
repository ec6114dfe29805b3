import json

import pytest

from graphpo_agent.errors import DataError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import PageReader
from graphpo_agent.types import Document
from retrievers.pages import PageFile


def test_a_page_of_the_file_is_a_document_and_another_is_no_result(tmp_path):
    rows = [{"url": "http://wiki/index.php?title=Oak", "contents": "Oak\nA tree."}]
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pages = PageFile(tmp_path / "pages.jsonl")
    assert isinstance(pages, PageReader) and len(pages) == 1
    for url in ("http://wiki/index.php?title=Oak", "http://wiki/index.php/Oak"):
        assert pages.read(url) == Document(id=url, contents="Oak\nA tree.", url=url)
    with pytest.raises(CallFailed, match="there is no page http://wiki/Elm") as caught:
        pages.read("http://wiki/Elm")
    assert caught.value.kind == "no_result"


def test_a_file_without_a_page_is_refused(tmp_path):
    (tmp_path / "pages.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"pages\.jsonl: holds no pages$"):
        PageFile(tmp_path / "pages.jsonl")
