"""Configuration → what says which states are the same."""

from graphpo_agent.config_state import (
    EmbedderConfig,
    EncoderEmbedderConfig,
    FrozenSummaryState,
    KeyState,
    OpenAIEmbedderConfig,
    StateConfig,
    SummaryState,
    TeiEmbedderConfig,
    TextState,
)
from graphpo_agent.errors import ConfigError, errors_at
from graphpo_agent.named import callable_of, constructed
from graphpo_agent.net.embeddings import OpenAIEmbedder, TeiEmbedder
from graphpo_agent.protocols import ChatModel, Embedder, StateDescriber
from graphpo_agent.rollout.embed import HashingEmbedder
from graphpo_agent.rollout.frozen_summary import FrozenSummary
from graphpo_agent.rollout.summarize import KeyDescriber, PolicySummary, TextDescriber

__all__ = ["build_state"]


def build_state(state: StateConfig) -> tuple[StateDescriber, Embedder | None]:
    """What says what a state is, and what embeds it; None where keys are all there is."""
    embedder = None if isinstance(state, KeyState) else _embedder(state.embedder)
    return _describer(state), embedder


def _describer(state: StateConfig) -> StateDescriber:
    if isinstance(state, KeyState):
        with errors_at("state.function"):
            return KeyDescriber(callable_of(state.function, "state"))
    if isinstance(state, SummaryState):
        return PolicySummary(max_summary_tokens=state.max_summary_tokens)
    if isinstance(state, FrozenSummaryState):
        chat = constructed(state.chat)
        if not isinstance(chat, ChatModel):
            raise ConfigError(f"state.chat: {state.chat['class']} has no reply method")
        return FrozenSummary(
            chat,
            max_summary_tokens=state.max_summary_tokens,
            max_characters=state.max_characters,
        )
    assert isinstance(state, TextState)
    return TextDescriber(state.max_characters)


def _embedder(config: EmbedderConfig) -> Embedder:
    if isinstance(config, EncoderEmbedderConfig):
        from graphpo_agent.encoder import EncoderEmbedder

        return EncoderEmbedder(
            config.path,
            pooling=config.pooling,
            prefix=config.prefix,
            max_tokens=config.max_tokens,
            batch_size=config.batch_size,
            device=config.device,
        )
    if isinstance(config, OpenAIEmbedderConfig):
        return OpenAIEmbedder(
            config.base_url, config.model, api_key_env=config.api_key_env, prefix=config.prefix
        )
    if isinstance(config, TeiEmbedderConfig):
        return TeiEmbedder(config.url, prefix=config.prefix)
    return HashingEmbedder(config.dimension)
