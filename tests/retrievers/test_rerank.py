import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from graphpo_agent.errors import ModelError, ToolError
from graphpo_agent.net.failures import CallFailed
from retrievers.bm25 import Bm25Retriever, build_bm25
from retrievers.rerank import RerankRetriever
from retrievers.together import PartlyFailed, settle
from tests.retrievers.samples import make_encoder, passages, write_corpus

QUERIES = ["alder0 birch0", "", "cedar1 alder2", "nothingknown", "alder0 birch0", "oak0 elm1"]


@pytest.fixture(scope="module")
def bm25(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bm25")
    write_corpus(directory / "corpus.jsonl", passages(200, words=30))
    build_bm25(directory / "corpus.jsonl", directory / "index")
    return Bm25Retriever(directory / "index")


@pytest.fixture(scope="module", params=[1, 2])
def model(request, tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("cross"), request.param)


def alone(directory, query, text):
    """One pair through the model by itself: no padding, no batch."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokens = AutoTokenizer.from_pretrained(directory)(
        query, text, truncation=True, max_length=64, return_tensors="pt"
    )
    with torch.no_grad():
        [logits] = model(**tokens).logits
    return float(logits[0] if len(logits) == 1 else logits[1] - logits[0])


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_each_query_has_its_own_documents_in_the_order_of_the_pairs_scores(bm25, model, batch_size):
    found = RerankRetriever(bm25, model, depth=6, batch_size=batch_size).search(QUERIES, 4)
    for query, documents, first in zip(QUERIES, found, bm25.search(QUERIES, 6), strict=True):
        expected = {d.id: alone(model, query, d.contents) for d in first}
        best = sorted(expected.values(), reverse=True)[:4]
        assert [d.score for d in documents] == pytest.approx(best, abs=1e-4)
        assert {d.id: d.score for d in documents} == pytest.approx(
            {d.id: expected[d.id] for d in documents}, abs=1e-4
        )
    assert found[1] == found[3] == [] and found[0] == found[4]


def test_the_order_is_another_than_the_first_retrievers(bm25, model):
    """Of ten documents, though two are enough for the depth."""
    reranked = RerankRetriever(bm25, model, depth=2).search(QUERIES, 10)
    first = bm25.search(QUERIES, 10)
    assert [{d.id for d in each} for each in reranked] == [{d.id for d in each} for each in first]
    assert [[d.id for d in each] for each in reranked] != [[d.id for d in each] for each in first]


def test_threads_get_what_one_thread_gets(bm25, model):
    retriever = RerankRetriever(bm25, model, depth=4)
    expected = retriever.search(QUERIES, 3)
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: retriever.search(QUERIES, 3), range(16))
    assert all(
        [[d.id for d in each] for each in result] == [[d.id for d in each] for each in expected]
        for result in results
    )


def test_very_long_queries_and_broken_text_are_cut_not_refused(bm25, model, tmp_path):
    query = "alder0 " * 500 + "\ud800"
    found = RerankRetriever(bm25, model).search([query], 3)
    assert len(found[0]) == 3
    limitless = shutil.copytree(model, tmp_path / "limitless")
    settings = json.loads((limitless / "tokenizer_config.json").read_text())
    del settings["model_max_length"]
    (limitless / "tokenizer_config.json").write_text(json.dumps(settings))
    assert RerankRetriever(bm25, limitless).search([query], 3) == found


def test_a_query_that_the_first_retriever_fails_at_fails_alone(bm25, model):
    class Failing:
        def search(self, queries, topk):
            found = bm25.search(queries, topk)
            down = CallFailed("transient", "down")
            return settle([down if q == "down" else f for q, f in zip(queries, found, strict=True)])

    [expected] = RerankRetriever(bm25, model, depth=6).search([QUERIES[0]], 2)
    with pytest.raises(PartlyFailed, match="down") as caught:
        RerankRetriever(Failing(), model, depth=6).search(["down", QUERIES[0]], 2)
    failure, found = caught.value.answers
    assert isinstance(failure, CallFailed)
    assert [d.id for d in found] == [d.id for d in expected]


def test_models_that_are_no_cross_encoders_are_refused(bm25, tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        RerankRetriever(bm25, tmp_path / "nothing")
    with pytest.raises(ModelError, match="not hold a complete sequence classifier"):
        RerankRetriever(bm25, make_encoder(tmp_path / "plain"))
    with pytest.raises(ModelError, match="has 3 labels"):
        RerankRetriever(bm25, make_encoder(tmp_path / "three", 3))


def test_arguments_that_cannot_be_are_refused(bm25):
    with pytest.raises(ToolError, match="has no search method"):
        RerankRetriever("bm25", "model")  # pyright: ignore
    with pytest.raises(ToolError, match="depth must be a whole number of at least 1"):
        RerankRetriever(bm25, "model", depth=0)
    for device in ("cuda:77", "toaster"):
        with pytest.raises(ToolError, match=f"device '{device}' cannot be used"):
            RerankRetriever(bm25, "model", device=device)


def test_an_encoder_is_no_cross_encoder_and_nothing_but_the_error_says_so(
    bm25, tmp_path, capfd, caplog
):
    directory = make_encoder(tmp_path / "encoder")
    capfd.readouterr()
    with pytest.raises(ModelError, match="weights are missing"):
        RerankRetriever(bm25, directory)
    said = capfd.readouterr()
    assert (said.out, said.err, caplog.text) == ("", "", "")
