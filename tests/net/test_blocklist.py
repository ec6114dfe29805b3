import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ToolError
from graphpo_agent.net.blocklist import BlockList
from tests.worlds import ROOT

MIRRORS = BlockList(["benchmark-mirrors"])


@pytest.mark.parametrize(
    "url",
    [
        "https://huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://HuggingFace.co:443/datasets/gaia-benchmark/GAIA/resolve/main/2023/x.parquet",
        "https://huggingface.co./datasets/x/../gaia-benchmark/GAIA",
        "https://huggingface.co//datasets//%67aia-benchmark/GAIA",
        "https://huggingface.co/datasets/%2567aia-benchmark/GAIA",
        "https://user@huggingface.co/datasets/callanwu/WebWalkerQA",
        "https://huggingface.co/datasets/xbench/DeepSearch",
        "https://datasets-server.huggingface.co/rows?dataset=gaia-benchmark%2FGAIA",
        "https://gaia-benchmark-leaderboard.hf.space/",
        "https://hf-mirror.com/datasets/smolagents/browse_comp",
        "https://web.archive.org/web/2025/https://huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://web.archive.org/web/2025/huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://r.jina.ai/https://huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://example.org/get?u=https%3A%2F%2Fhuggingface.co%2Fdatasets%2Fgaia-benchmark%2FGAIA",
        "https://example.org/get?u=huggingface.co/datasets/gaia-benchmark/GAIA",
        "https:\\\\huggingface.co\\datasets\\gaia-benchmark\\GAIA",
        "https://openaipublic.blob.core.windows.net/simple-evals/browse_comp_test_set.csv",
        "https://raw.githubusercontent.com/RUC-NLPIR/WebThinker/main/data/GAIA/dev.json",
        "https://cdn.jsdelivr.net/gh/RUC-NLPIR/WebThinker@main/data/GAIA/dev.json",
        "https://rawcdn.githack.com/openai/simple-evals/main/browsecomp_eval.py",
        "https://huggingface.co/datasets/inclusionAI/ASearcher-test-data",
        "https://huggingface.co/datasets/inclusionAI/ASearcher-test-data/resolve/main/GAIA/test.jsonl",
    ],
)
def test_mirrors_of_benchmarks_are_covered(url):
    assert MIRRORS.covers(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://huggingface.co/Qwen/Qwen2.5-7B-Instruct",
        "https://www.esa.int/Science_Exploration/Space_Science/Gaia",
        "https://en.wikipedia.org/wiki/Gaia",
        "https://github.com/python/cpython",
        "https://huggingface.co/datasets/inclusionAI/ASearcher-train-data",
        "https://cdn.jsdelivr.net/npm/bootstrap@5/dist/css/bootstrap.min.css",
        "https://nothuggingface.co/datasets/gaia-benchmark/GAIA",
        "",
    ],
)
def test_other_pages_are_not(url):
    assert not MIRRORS.covers(url)


@pytest.mark.parametrize("name", ["qwen2.5-7b.yaml", "qwen2.5-7b-verl.yaml"])
def test_the_shipped_web_configurations_block_them(name):
    tools = yaml.safe_load((ROOT / "configs/search" / name).read_text())["mode"]["tools"]
    for part in (tools["search"]["retriever"], tools["visit"]["reader"]):
        assert "benchmark-mirrors" in part["blocked_hosts"]


def test_a_pattern_covers_subdomains_and_what_its_path_begins():
    blocked = BlockList(["Example.org/private/", "*.test"])
    covered = [
        "http://example.org/private",
        "https://a.example.org:8443/private/x?y",
        "http://a.test",
    ]
    assert all(blocked.covers(url) for url in covered)
    passed = ["http://example.org/", "http://example.org/public", "http://example.com/private"]
    assert not any(blocked.covers(url) for url in passed)


def test_no_patterns_cover_nothing():
    assert not BlockList().covers("https://huggingface.co/datasets/gaia-benchmark/GAIA")


@pytest.mark.parametrize("patterns", ["example.org", ["https://example.org"], [""], ["/path"]])
def test_bad_patterns(patterns):
    with pytest.raises(ToolError, match="blocked_hosts"):
        BlockList(patterns)


@given(st.text(st.characters(exclude_characters=".%")))
def test_nothing_behind_a_covered_path_uncovers_it(text):
    assert MIRRORS.covers(f"https://huggingface.co/gaia-benchmark/{text}")
    assert not MIRRORS.covers(f"https://example.org/{text.replace('/', '')}")


def test_a_long_address_made_to_be_slow_is_answered():
    assert not MIRRORS.covers("https://" + "gaia." * 20000 + "/=" * 20000)
