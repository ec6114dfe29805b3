"""The frozen models of the benchmark: made once, and how good they are."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from benchmarks.calibration_parts.encoder import train_encoder
from benchmarks.calibration_parts.states import DemonstratedState, demonstrated_states
from benchmarks.calibration_parts.summarizer import MAX_CHARACTERS, train_summarizer
from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.net.embeddings import OpenAIEmbedder, TeiEmbedder
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.rollout.frozen_summary import summary_messages, written_path

__all__ = ["SUMMARY_TOKENS", "Checks", "Training", "check", "train"]

SUMMARY_TOKENS = 64
_TRAINED = {"encoder": (train_encoder, 120), "summarizer": (train_summarizer, 500)}
"""By what is trained, and in how many batches."""
KEPT_BACK = 300
"""States, the last ones, that nothing is trained on."""


@dataclass(frozen=True, slots=True)
class Training:
    """How one of the models was trained.

    Attributes:
        steps: batches.
        result: over the last ten of them. Encoder: how often the right rendering was the nearest
            one; summariser: nats per token of the summary.
    """

    steps: int
    result: float


@dataclass(frozen=True, slots=True)
class Checks:
    """What was measured on states that were kept back.

    Attributes:
        states: how many.
        exact: share of them that the summariser describes without a mistake.
        example: one of its summaries.
        openai_difference: largest difference of a component of a vector of the OpenAI-compatible
            endpoint from the encoder's own.
        tei_difference: the same for the ``/embed`` endpoint.
    """

    states: int
    exact: float
    example: str
    openai_difference: float
    tei_difference: float


def train(world: Path, name: Literal["encoder", "summarizer"]) -> Training:
    """A model in the directory of that name in the world's, unless it is there already."""
    record = world / name / "training.json"
    if record.exists():
        return Training(**json.loads(record.read_text()))
    states = list(demonstrated_states(world))[:-KEPT_BACK]
    function, steps = _TRAINED[name]
    found = Training(steps, function(states, world / name, steps=steps))
    record.write_text(json.dumps(asdict(found)) + "\n")
    return found


def check(world: Path, chat: OpenAIChat, openai: OpenAIEmbedder, tei: TeiEmbedder) -> Checks:
    """Ask the servers about states that were kept back."""
    states = list(demonstrated_states(world))[-KEPT_BACK:]
    said = in_threads(lambda state: _said(chat, state), states, 16)
    vectors = EncoderEmbedder(world / "encoder").embed(said)
    right = [text == state.facts for text, state in zip(said, states, strict=True)]
    return Checks(
        states=len(states),
        exact=sum(right) / len(right),
        example=_example(said),
        openai_difference=float(abs(openai.embed(said) - vectors).max()),
        tei_difference=float(abs(tei.embed(said) - vectors).max()),
    )


def _said(chat: OpenAIChat, state: DemonstratedState) -> str:
    messages = summary_messages(written_path(state.path, MAX_CHARACTERS))
    return chat.reply(messages, SUMMARY_TOKENS).strip()


def _example(said: Sequence[str]) -> str:
    """A summary that knows something, but not all."""
    return next((text for text in said if "?" in text and "19" in text), said[0])
