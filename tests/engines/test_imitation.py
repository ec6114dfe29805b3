"""Supervised steps of the local engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.demonstrations import demonstration_sample
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions
from graphpo_agent.errors import DataError
from graphpo_agent.types import Piece
from tests.engines.learners import DEMONSTRATIONS, IMITATION, make_engine


def test_imitation_trains_the_trained_pieces_and_the_end(make_model, tokenizer):
    model = make_model()
    pieces = [tokenizer.encode(piece.text) for piece in DEMONSTRATIONS[0].pieces]
    prompt = tokenizer.render(DEMONSTRATIONS[0].messages)
    row = [*prompt, *pieces[0], *pieces[1], *pieces[2], tokenizer.eos_id]
    with torch.no_grad():
        logprobs = model(torch.tensor([row], device=model.device)).logits[0, :-1].log_softmax(-1)
    nll = -logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])]
    start = len(prompt) - 1
    trained = [
        *range(len(pieces[0])),
        *range(len(pieces[0]) + len(pieces[1]), len(row) - 1 - start),
    ]
    expected = nll[[start + i for i in trained]].mean().item()
    engine = make_engine(model, tokenizer)
    metrics = engine.imitate(DEMONSTRATIONS[:1])
    assert metrics["imitate/loss"] == pytest.approx(expected, abs=1e-6)
    losses = [engine.imitate(DEMONSTRATIONS)["imitate/loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_demonstration_is_the_tokens_of_its_rollout_and_ends_where_it_is_said(tokenizer):
    said, seen, last = (tokenizer.encode(text) for text in ("karo", "1987", "orla"))
    pieces = (Piece("karo", True), Piece("1987", False, role="tool"), Piece("orla", True))
    cut_off = replace(DEMONSTRATIONS[0], pieces=pieces, ends=False)
    prompt, around = tokenizer.render(cut_off.messages), tokenizer.turn_break("tool")
    expected = [*prompt, *said, *around.opening, *seen, *around.closing, *last]
    sample = demonstration_sample(cut_off, tokenizer, len(expected))
    assert sample.token_ids.tolist() == expected
    whole = demonstration_sample(replace(cut_off, ends=True), tokenizer, len(expected) + 1)
    assert whole.token_ids.tolist() == [*expected, tokenizer.eos_id]
    assert whole.loss_mask.sum() == len(said) + len(last) + 1
    with pytest.raises(DataError, match=f"{len(expected) + 1} tokens, but the model's context"):
        demonstration_sample(replace(cut_off, ends=True), tokenizer, len(expected))


def test_the_imitation_rate_rises_and_falls_linearly():
    rates = [ImitationOptions(1.0, total_steps=6, warmup_steps=2).rate(i) for i in range(8)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": (Piece("seen", trained=False),)}, "d0: no trained piece"),
        ({"pieces": (Piece("x " * 200, trained=True),)}, "d0: .* context holds 128"),
    ],
)
def test_a_useless_demonstration_is_one_line(make_model, tokenizer, change, message):
    engine = make_engine(make_model(), tokenizer)
    with pytest.raises(DataError, match=message):
        engine.imitate([replace(DEMONSTRATIONS[0], **change)])


def test_every_trained_token_of_a_batch_of_demonstrations_weighs_the_same(make_model, tokenizer):
    long = replace(DEMONSTRATIONS[0], pieces=(*DEMONSTRATIONS[0].pieces, Piece("x" * 30, True)))
    still = replace(IMITATION, learning_rate=0.0)
    engine = LocalEngine(make_model().train(), tokenizer, OptimizerOptions(), imitation=still)
    assert not engine.model.training
    samples = [demonstration_sample(d, tokenizer, 128) for d in (DEMONSTRATIONS[1], long)]
    losses = [engine.imitate([d])["imitate/loss"] for d in (DEMONSTRATIONS[1], long)]
    together = engine.imitate([DEMONSTRATIONS[1], long])["imitate/loss"]
    expected = np.average(losses, weights=[sample.loss_mask.sum() for sample in samples])
    assert together == pytest.approx(expected, rel=1e-9)


def test_a_demonstration_whose_prompt_has_no_tokens_is_one_line(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    empty = replace(DEMONSTRATIONS[0], messages=({"role": "user", "content": ""},))
    with pytest.raises(DataError, match="d0: the tokenizer makes no tokens of its prompt"):
        make_engine(make_model(), tokenizer).imitate([DEMONSTRATIONS[1], empty])
