"""A small real model for a toy world: a byte-level BPE tokenizer and a Qwen2 causal LM, untrained.

Both are saved in the Hugging Face layout and load offline with ``AutoTokenizer`` and
``AutoModelForCausalLM``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from graphpo_agent.errors import ConfigError, ModelError
from graphpo_agent.pretrained import save_pretrained

__all__ = ["make_toy_model", "make_toy_tokenizer"]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_toy_tokenizer(texts: Iterable[str], phrases: Sequence[str] = ()) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer that makes every word one token; words are split as Qwen2's are.

    Merging goes on until no two neighbours are left to merge, so the texts should hold each word
    in the forms in which it occurs, with and without a leading space, and few words altogether.
    Qwen2 splits numbers into digits: numbers that shall be one token belong into the phrases. Any
    other text is spelled in bytes.

    Args:
        texts: what the model will read and write.
        phrases: strings that become one token each wherever they stand: tags, numbers.
    """
    words = dict.fromkeys(word for text in texts for word in _plain(text, phrases))
    blank = Qwen2Tokenizer(eos_token=END, pad_token=PAD, additional_special_tokens=[START])
    tokenizer = blank.train_new_from_iterator(
        [*words, "system\nuser\nassistant\n"],
        vocab_size=1 << 20,
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in phrases])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _plain(text: str, phrases: Sequence[str]) -> list[str]:
    """The parts of a text between phrases."""
    for phrase in phrases:
        text = text.replace(phrase, "\0")
    return [part for part in text.split("\0") if part]


def make_toy_model(
    directory: Path,
    texts: Iterable[str],
    *,
    phrases: Sequence[str] = (),
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    max_context_tokens: int = 512,
    seed: int = 0,
) -> int:
    """Save a toy tokenizer and a randomly initialised Qwen2 model; return its parameter count.

    The embeddings are tied, and drawn with standard deviation ``hidden_size ** -0.5`` in place of
    Qwen2's 0.02: with the small one, copying names out of observations is not learned for a long
    time.

    Args:
        directory: where the Hugging Face files go.
        texts: what the model will read and write (see ``make_toy_tokenizer``).
        phrases: strings that become one token each.
        hidden_size: width of the model; the feed-forward layers are three times as wide.
        num_layers: transformer layers.
        num_heads: attention heads; they must divide ``hidden_size`` into even parts.
        max_context_tokens: the longest prompt and response together.
        seed: of the weights.

    Raises:
        ConfigError: ``hidden_size`` cannot be divided among the heads.
        ModelError: the directory cannot be written.
    """
    if hidden_size % (2 * num_heads):
        raise ConfigError(
            f"toy model: hidden_size {hidden_size} must be an even multiple of num_heads "
            f"{num_heads}"
        )
    tokenizer = make_toy_tokenizer(texts, phrases)
    config = _config(tokenizer, hidden_size, num_layers, num_heads, max_context_tokens)
    model = _draw_model(config, seed)
    try:
        save_pretrained(directory, model, tokenizer)
    except OSError as error:
        raise ModelError(f"{directory}: cannot be written ({error.strerror})") from error
    return model.num_parameters()


def _config(
    tokenizer: Qwen2Tokenizer,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    max_context_tokens: int,
) -> Qwen2Config:
    vocabulary = tokenizer.get_vocab()
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_context_tokens,
        tie_word_embeddings=True,
        initializer_range=(3 * hidden_size) ** -0.5,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
        dtype="float32",
    )


def _draw_model(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    """A model with random weights, which samples until its end token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.hidden_size**-0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model
