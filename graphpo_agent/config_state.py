"""Which states are the same: a key, or what is embedded and by what. A leaf, like ``config``."""

from typing import Annotated, Literal

from pydantic import Field

from graphpo_agent.config_base import CallableConfig, FilePath, ObjectConfig, Positive, Strict, Url

__all__ = [
    "DOCUMENTS_KEY",
    "EmbedderConfig",
    "EncoderEmbedderConfig",
    "FrozenSummaryState",
    "KeyState",
    "OpenAIEmbedderConfig",
    "StateConfig",
    "SummaryState",
    "TeiEmbedderConfig",
    "TextState",
]


DOCUMENTS_KEY = "graphpo_agent.rollout.summarize:documents_key"


class HashingEmbedderConfig(Strict):
    """Hashed character n-grams: finds near-exact duplicates only."""

    kind: Literal["hashing"]
    dimension: Annotated[Positive, Field(le=2**20)] = 1024


class EncoderEmbedderConfig(Strict):
    """A sentence encoder through transformers."""

    kind: Literal["encoder"]
    path: FilePath
    pooling: Literal["mean", "cls", "last"] = "mean"
    prefix: str = ""
    max_tokens: Positive = 512
    batch_size: Positive = 32
    device: str = "cpu"


class OpenAIEmbedderConfig(Strict):
    """An endpoint that speaks OpenAI's ``/embeddings``."""

    kind: Literal["openai"]
    base_url: Url
    model: str
    api_key_env: str | None = None
    """The environment variable that holds the key, where one is needed."""
    prefix: str = ""
    """Written before every text, ``"query: "`` for E5."""


class TeiEmbedderConfig(Strict):
    """A Text Embeddings Inference server."""

    kind: Literal["tei"]
    url: Url
    prefix: str = ""


EmbedderConfig = Annotated[
    HashingEmbedderConfig | EncoderEmbedderConfig | OpenAIEmbedderConfig | TeiEmbedderConfig,
    Field(discriminator="kind"),
]


class KeyState(Strict):
    """The environment knows its state: a function of the path gives the canonical key."""

    kind: Literal["key"]
    function: CallableConfig = DOCUMENTS_KEY
    """From a ``PathState`` to a string or None; the default is an agent's."""


class SummaryState(Strict):
    """The policy summarises its path (paper, section 3.2); an encoder embeds the summary."""

    kind: Literal["policy_summary"]
    embedder: EmbedderConfig
    max_summary_tokens: Positive = 128


class FrozenSummaryState(Strict):
    """A model other than the policy summarises the path; an encoder embeds the summary."""

    kind: Literal["frozen_summary"]
    chat: ObjectConfig
    """A ``ChatModel``, e.g. ``{class: graphpo_agent.net.chat:OpenAIChat, base_url: ...}``."""
    embedder: EmbedderConfig
    max_summary_tokens: Positive = 128
    max_characters: Positive = 12_000
    """Of the path that are shown to it: of its words the last ones, up to half; of what was
    found the beginnings."""


class TextState(Strict):
    """The end of the path's own text is embedded; cheap, for near-duplicates."""

    kind: Literal["text"]
    embedder: EmbedderConfig
    max_characters: Positive = 200


StateConfig = Annotated[
    KeyState | SummaryState | FrozenSummaryState | TextState, Field(discriminator="kind")
]
