"""Demonstrations as training samples: chains of pieces behind a prompt."""

from collections.abc import Sequence

import numpy as np

from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import DataError
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.look_over import refused
from graphpo_agent.types import Demonstration, Piece

__all__ = ["check_demonstrations", "demonstration_sample"]


def check_demonstrations(
    demonstrations: Sequence[Demonstration], tokenizer: HfTokenizer, max_context_tokens: int
) -> None:
    """Raise DataError where one makes no sample, before any is learned."""

    def learn(demonstration: Demonstration) -> None:
        demonstration_sample(demonstration, tokenizer, max_context_tokens)

    mistakes = list(refused(demonstrations, learn, "demonstrations").values())
    if mistakes:
        count = f" ({len(mistakes):,} such of {len(demonstrations):,})" if len(mistakes) > 1 else ""
        raise DataError(f"{mistakes[0]}{count}")


def demonstration_sample(
    demonstration: Demonstration, tokenizer: HfTokenizer, max_context_tokens: int
) -> TrainingSample:
    """A chain with one node per piece; each piece is tokenised on its own, as in a rollout.

    Example: the pieces ``<search> karo </search>``, `` 1987`` (not trained) and
    ``<answer> 1987 </answer>`` become three edges, of which the first and the last are trained,
    the last one with the end-of-sequence token.

    Raises:
        DataError: no prompt, nothing to train on, or longer than the model's context.
    """
    prompt = tokenizer.render(demonstration.messages)
    if not prompt:
        raise DataError(
            f"demonstration {demonstration.id}: the tokenizer makes no tokens of its prompt; give "
            "it one or leave it out"
        )
    pieces = [_encode(piece, tokenizer) for piece in demonstration.pieces]
    trained = [piece.trained for piece in demonstration.pieces]
    if not any(piece for piece, flag in zip(pieces, trained, strict=True) if flag):
        raise DataError(f"demonstration {demonstration.id}: no trained piece")
    if demonstration.ends and trained[-1]:
        pieces[-1].append(tokenizer.eos_id)
    lengths = [len(prompt), *map(len, pieces)]
    num_tokens = sum(lengths)
    if num_tokens > max_context_tokens:
        raise DataError(
            f"demonstration {demonstration.id}: {num_tokens} tokens, but the model's context "
            f"holds {max_context_tokens}; shorten it or leave it out"
        )
    return TrainingSample(
        graph_id=demonstration.id,
        parent=np.arange(-1, len(pieces)),
        offsets=np.cumsum([0, *lengths]),
        token_ids=np.array([*prompt, *(i for piece in pieces for i in piece)], np.int64),
        loss_mask=np.repeat([False, *trained], lengths),
        logprobs=np.full(num_tokens, np.nan, np.float32),
        advantages=np.zeros((1, len(lengths))),
    )


def _encode(piece: Piece, tokenizer: HfTokenizer) -> list[int]:
    token_ids = tokenizer.encode(piece.text)
    if piece.role is None:
        return token_ids
    around = tokenizer.turn_break(piece.role)
    return [*around.opening, *token_ids, *around.closing]
