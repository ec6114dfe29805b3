import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.rollout.embed import HashingEmbedder


def cosine(embedder, a, b):
    u, v = embedder.embed([a, b])
    return float(u @ v)


def exact_cosine(a, b, ngram):
    """Cosine of plain n-gram counts; with 2**20 buckets hashing hardly ever pools two of them."""

    def counts(text):
        text = f" {' '.join(text.casefold().split())} "
        grams = [text[i : i + ngram] for i in range(max(1, len(text) - ngram + 1))]
        return {gram: grams.count(gram) for gram in grams}

    x, y = counts(a), counts(b)
    dot = sum(n * y.get(gram, 0) for gram, n in x.items())
    return dot / (sum(n * n for n in x.values()) * sum(n * n for n in y.values())) ** 0.5


WORDS = st.lists(st.sampled_from(["known", "mentor", "7", "8", "é", "🙂", "karo"]), min_size=1)


@settings(deadline=None, derandomize=True)
@given(WORDS, WORDS, st.integers(1, 5))
def test_cosine_is_that_of_the_ngram_counts(a, b, ngram):
    a, b = " ".join(a), " ".join(b)
    embedder = HashingEmbedder(dimension=1 << 20, ngram=ngram)
    assert cosine(embedder, a, b) == pytest.approx(exact_cosine(a, b, ngram), abs=2e-2)


def test_rows_have_length_one_and_blank_text_is_zero():
    vectors = HashingEmbedder(dimension=64).embed(["known: 3 4", "", "  \n", "x", "\ud800"])
    assert vectors.shape == (5, 64) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 0, 1, 1], atol=1e-6)
    assert HashingEmbedder(dimension=8).embed([]).shape == (0, 8)


def test_case_and_spacing_do_not_count_but_one_number_does():
    embedder = HashingEmbedder()
    assert cosine(embedder, "left: 3 4", " LEFT:\n3  4 ") == pytest.approx(1)
    assert cosine(embedder, "left: 3 4", "left: 3 5") < 0.999
    assert abs(cosine(embedder, "the mentor is known", "born in 1987?")) < 0.5


def test_texts_with_nothing_in_common_are_far_apart_where_buckets_are_few():
    rng = np.random.default_rng(0)
    texts = [
        "".join(chr(x) for x in rng.integers(97 + 13 * half, 110 + 13 * half, 400))
        for half in (0, 1)
    ]
    assert abs(cosine(HashingEmbedder(dimension=64), *texts)) < 0.5


def test_vectors_do_not_depend_on_the_process():
    program = (
        "from graphpo_agent.rollout.embed import HashingEmbedder;"
        "print(HashingEmbedder(dimension=32).embed(['known: 3 é'])[0].tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = HashingEmbedder(dimension=32).embed(["known: 3 é"])[0].tobytes().hex()
    assert outputs == {here}


def test_no_torch_is_needed():
    program = "import sys, graphpo_agent.rollout.embed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
