"""Frozen models learn from the right texts, servers serve, and the page tells the numbers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import calibration
from benchmarks.calibration_parts.encoder import TEMPERATURE, contrast, train_encoder
from benchmarks.calibration_parts.findings import differing_cells, findings, served_alike
from benchmarks.calibration_parts.frozen import SUMMARY_TOKENS, Checks, Training, train
from benchmarks.calibration_parts.servers import running, running_tei
from benchmarks.calibration_parts.states import demonstrated_states, facts_found
from benchmarks.calibration_parts.summarizer import train_summarizer
from graphpo_agent.build_state import build_state
from graphpo_agent.calibrate import load_states
from graphpo_agent.config_state import FrozenSummaryState
from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.local_chat import LocalChat
from graphpo_agent.net.embeddings import TeiEmbedder
from graphpo_agent.rollout.summarize import documents_key
from graphpo_agent.types import Document
from tests.worlds import ROOT

CONFIG = str(ROOT / "configs/toy/kb.yaml")
STATES = ROOT / "benchmarks/states_kb.yaml"


@pytest.fixture(scope="module")
def states(kb: Path):
    return list(demonstrated_states(kb))


@pytest.fixture(scope="module")
def encoder(states, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "encoder"
    assert 0 <= train_encoder(states, directory, steps=2) <= 1
    return directory


def document(text: str) -> Document:
    return Document(text, f'"title"\n{text}')


def test_facts_follow_the_chains_and_nothing_else():
    question = "when: first Karo Venner mentor born , second Domi Wornal rival wed"
    found = [
        document("Lita Bosdal born : 1987"),
        document("Domi Wornal cousin : Karo Venner"),  # not asked for
        document("Karo Venner mentor : Lita Bosdal"),
        document("Gul Harner wed : 1971"),  # not known yet that this is the rival
    ]
    assert facts_found(question, found, None) == (
        "first Karo Venner mentor Lita Bosdal born 1987 . second Domi Wornal rival ? wed ? . "
        "answer ?"
    )
    assert facts_found(question, [], "1987 1971").endswith(" . answer 1987 1971")


def test_a_state_of_a_demonstration_is_what_a_path_would_be(kb: Path, states):
    rows = [json.loads(line) for line in (kb / "demonstrations.jsonl").open()]
    assert len(states) == sum(piece["trained"] for row in rows for piece in row["pieces"])
    ids = {
        row["contents"].split("\n")[1]: row["id"]
        for row in map(json.loads, (kb / "corpus.jsonl").open())
    }
    for number, row in enumerate(rows):
        own = [state for state in states if state.demonstration == number]
        said = "".join(piece["text"] for piece in row["pieces"] if piece["trained"])
        assert own[-1].path.response == said
        answer = re.search(r"<answer> (.*?)</answer>", said)
        assert answer is not None and own[-1].path.answer == answer[1]
        assert all(state.path.answer is None for state in own[:-1])
        shown = [p["text"] for p in row["pieces"] if not p["trained"]]
        found = {text: id_ for text, id_ in ids.items() if any(f") {text}<" in s for s in shown)}
        _, documents, _ = json.loads(documents_key(own[-1].path))
        assert documents == sorted(found.values())


def test_twins_are_not_told_apart():
    """Two of three states have equal facts: each row leaves the other twin out."""
    cosines = torch.tensor([[0.9, 1.0, 0.1], [0.3, 0.8, 0.7], [0.2, 0.6, 0.5]])
    loss, right = contrast(cosines, ["a", "a", "b"])

    def entropy(own: float, *others: float) -> float:
        return float(np.log1p(sum(np.exp((other - own) / TEMPERATURE) for other in others)))

    rows = [entropy(0.9, 0.1), entropy(0.8, 0.7), entropy(0.5, 0.2, 0.6)]
    columns = [entropy(0.9, 0.2), entropy(0.8, 0.6), entropy(0.5, 0.1, 0.7)]
    assert loss.item() == pytest.approx((sum(rows) + sum(columns)) / 6, rel=1e-5)
    assert right == pytest.approx(2 / 3)  # the third is nearest to the second


def test_the_encoder_is_one_that_every_embedder_can_load(encoder: Path, states):
    texts = [state.facts for state in states[:5]]
    vectors = EncoderEmbedder(encoder).embed(texts)
    assert vectors.shape == (5, 96) and np.allclose(np.linalg.norm(vectors, axis=1), 1)
    modules = json.loads((encoder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    pooling = json.loads((encoder / "1_Pooling/config.json").read_text())
    assert pooling == {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True}


def test_the_summarizer_learns_and_chats(states, tmp_path: Path):
    first = train_summarizer(states, tmp_path / "a", steps=1, batch_size=4)
    later = train_summarizer(states, tmp_path / "b", steps=12, batch_size=4)
    assert later < first
    chat = LocalChat(tmp_path / "b", max_context_tokens=1024)
    assert isinstance(chat.reply([{"role": "user", "content": "Who?"}], 3), str)
    words = chat._tokenizer  # pyright: ignore[reportPrivateUsage]
    lengths = [len(words(f" {state.facts}")["input_ids"]) for state in states]
    assert max(lengths) < SUMMARY_TOKENS  # the end of the summary fits, too


def test_a_model_is_trained_once(tmp_path: Path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/training.json").write_text('{"steps": 7, "result": 0.5}')
    assert train(tmp_path, "encoder") == Training(7, 0.5)  # there is no world to learn from


@pytest.mark.slow
def test_tei_gives_the_vectors_of_the_encoder(encoder: Path, states, tmp_path: Path):
    texts = [*dict.fromkeys(state.facts for state in states)][:40]  # more than one request
    with running_tei(encoder, tmp_path) as address:
        served = TeiEmbedder(address).embed([*texts, " "])
    assert np.allclose(served[:-1], EncoderEmbedder(encoder).embed(texts), atol=1e-6)
    assert not served[-1].any()


def test_a_server_that_does_not_start_shows_what_it_said(tmp_path: Path):
    command = ["-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(SystemExit, match="no such model"), running("a", command, tmp_path, []):
        pass


def test_every_choice_is_a_state_and_the_endpoints_serve_the_encoder(tmp_path: Path):
    choices = load_states(CONFIG, [], [str(STATES)])
    text = STATES.read_text()
    assert all(f" {address}\n" in text.replace("}", "\n").replace(",", "\n") for address in (
        calibration.CHAT, calibration.EMBEDDINGS, calibration.TEI
    ))  # fmt: skip
    for state in choices.values():
        if isinstance(state, FrozenSummaryState):
            assert state.max_summary_tokens == SUMMARY_TOKENS
            assert state.chat["base_url"] == calibration.CHAT
    kinds = {name: state.embedder.kind for name, state in choices.items() if state.kind != "key"}
    assert {"encoder", "openai", "tei", "hashing"} == set(kinds.values())
    build_state(choices["frozen_tei"])  # connects to nothing yet


def row(threshold, pairs, right, spread, upper, error, recall: float | None = 0.1):
    return {
        "threshold": threshold,
        "merged_pairs": pairs,
        "right": right,
        "spread": spread,
        "spread_upper": upper,
        "score_error": error,
        "recall": recall,
    }


def record():
    key = row(None, 2000, 0.9, 0.25, 0.29, 0.04)
    good, better = row(0.92, 500, 0.8, 0.4, 0.5, 0.06), row(0.99, 400, 0.95, 0.1, 0.2, 0.07)
    fine = row(0.92, 1500, 0.98, 0.1, 0.15, 0.05, recall=0.35)
    bad = row(0.92, 9000, 0.6, 0.9, 0.95, 0.03)
    fine_rows = [fine, row(0.99, 300, 1.0, 0.0, 0.1, 0.08)]
    return {
        "options": {"tolerance": 0.3},
        "score_error": 0.09,
        "choices": {
            "run": {"recommended": key, "rows": [key]},
            "text": {"recommended": better, "rows": [good, better]},
            "hash": {"recommended": None, "rows": [bad]},
            "frozen_encoder": {"recommended": fine, "rows": fine_rows},
            "frozen_openai": {"recommended": fine, "rows": fine_rows},
            "frozen_tei": {"recommended": fine, "rows": [{**fine, "right": 0.97}, fine_rows[1]]},
        },
    }


def test_the_findings_are_the_numbers():
    found = record()
    assert findings(found["choices"], 0.3, found["score_error"]) == (
        "Of the keys, `run` merges 2,000 pairs, 90.0% of them right (spread inside classes 0.25, "
        "with its bound within 0.3; error of S 0.040); with nothing merged the error of S is "
        "0.090. "
        "With vectors, the recommended κ and the merges that are right there are: "
        "`frozen_encoder` 0.92, 1,470 of 1,500 (error of S 0.050); "
        "`text` 0.99, 380 of 400 (error of S 0.070). They merge 10.0% to 35.0% of the pairs that "
        "are one state by the run's own key, `frozen_encoder` most of them. "
        "For `hash` no κ keeps the spread within 0.3. "
        "At the paper's κ of 0.92 only `frozen_encoder` would do: the spread inside the classes of "
        "the others is 0.40 to 0.90 of that between any two states."
    )
    choices = {name: found["choices"][name] for name in ("run", "hash")}
    choices["run"] = {"recommended": None, "rows": [row(None, 9, 0.5, 0.4, 0.6, 0.04)]}
    said = findings(choices, 0.3, 0.09)
    assert "with its bound beyond 0.3" in said and "recommended κ" not in said
    assert said.endswith(
        "none of them would do: the spread inside their classes is 0.90 to 0.90 of that between "
        "any two states."
    )


def test_what_was_not_measured_is_not_told():
    nothing = row(None, 0, None, None, None, None, recall=None)
    unknown = row(0.92, 0, None, None, None, None, recall=None)
    choices = {
        "run": {"recommended": None, "rows": [nothing]},
        "text": {"recommended": None, "rows": [unknown]},
    }
    assert findings(choices, 0.3, 0.09) == (
        "No pair that merges by its keys was measured. "
        "For `text` no κ keeps the spread within 0.3. "
        "At the paper's κ of 0.92 nothing was measured."
    )


def test_endpoints_that_differ_are_counted():
    choices = record()["choices"]
    assert differing_cells(choices, "frozen_openai") == (0, 14)
    assert differing_cells(choices, "frozen_tei") == (1, 14)
    assert served_alike(choices) == (
        "Equal to those of `frozen_encoder` are 14 of the 14 numbers of `frozen_openai` and 13 of "
        "the 14 numbers of `frozen_tei`."
    )


def test_the_page_is_written_for_this_run(tmp_path: Path):
    found = tmp_path / "found"
    found.mkdir()
    own = {"worlds/kb": str(tmp_path / "kb"), calibration.TEI: "http://127.0.0.1:4321"}
    state = {"path": f"{tmp_path}/kb/encoder", "url": "http://127.0.0.1:4321"}
    choices = record()["choices"]
    choices["run"]["state"] = state
    (found / "calibration.json").write_text(
        json.dumps(record() | {"choices": choices, "command": "graphpo calibrate"})
    )
    (found / "calibration.md").write_text("the tables\n")
    (found / "calibration.png").write_bytes(b"figure")
    training = {"encoder": Training(120, 0.75), "summarizer": Training(500, 0.125)}
    checks = Checks(300, 0.5, "first Karo ? . answer ?", 6e-8, 0.0)
    calibration.write(tmp_path / "calibration-kb", found, training, checks, own)
    page = (tmp_path / "calibration-kb.md").read_text()
    assert page.endswith("the tables\n") and "in 75% of all cases" in page
    assert "Of 300 states" in page and "50.0% without a mistake" in page
    assert all(len(line) <= 100 for line in page.splitlines())
    numbers = json.loads((tmp_path / "calibration-kb.json").read_text())
    assert numbers["choices"]["run"]["state"] == {
        "path": "worlds/kb/encoder",
        "url": calibration.TEI,
    }
    assert numbers["training"]["summarizer"] == {"steps": 500, "result": 0.125}
    assert "command" not in numbers
