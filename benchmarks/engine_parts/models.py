"""Random models of many sizes, and the prompts that go with them.

Nothing here is trained: speed does not depend on what the weights say, but for where a response
ends. So the end-of-sequence token is made impossible and every length is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.utils import logging as transformers_logging

from graphpo_agent.data.toy_model import make_toy_tokenizer

__all__ = ["SIZES", "Size", "make_model", "questions", "save_model"]


@dataclass(frozen=True, slots=True)
class Size:
    """A Qwen2 architecture, or with ``linear`` layers one of another family.

    Example: ``Size("0.2M", hidden=64, layers=2, heads=2, vocabulary=1000, intermediate=192)``.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    intermediate: int
    key_heads: int = 0
    """0: as many as query heads."""
    linear: str = ""
    """What three of four layers are instead, about as wide: see ``_architecture``."""

    @property
    def matrices(self) -> int:
        """Weights of the layers' matrices, by which every computed token is multiplied."""
        keys = self.hidden * (self.key_heads or self.heads) // self.heads
        return self.layers * self.hidden * (2 * self.hidden + 2 * keys + 3 * self.intermediate)


SIZES = {
    size.name: size
    for size in (
        Size("0.2M", 64, 2, 2, 1000, 192),
        Size("5M", 256, 4, 4, 8000, 768),
        Size("41M", 1024, 2, 16, 3072, 5408, key_heads=2),
        Size("0.3M, delta nets", 64, 4, 2, 1000, 192, linear="delta nets"),
        Size("6M, delta nets", 256, 4, 4, 8000, 768, linear="delta nets"),
        Size("0.3M, Mamba-2", 64, 4, 2, 1000, 192, linear="Mamba-2"),
        Size("0.3M, convolutions", 64, 4, 2, 1000, 192, linear="convolutions"),
    )
}
"""By name, which is about the number of parameters, the tied embeddings included.

The output head takes 38 % of a token's products with weights in the first two, and 8 % in the
third, two layers in the proportions of Qwen2.5-7B.
"""


def make_model(
    size: Size, never: Sequence[int] = (), context: int = 8192, device: str = "cpu"
) -> PreTrainedModel:
    """A model in float32 and evaluation mode.

    Args:
        size: its architecture.
        never: tokens that must never be sampled, such as the end of a sequence.
        context: the longest prompt and response together.
        device: where it is made.
    """
    config_class, model_class, own = _architecture(size)
    config = config_class(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads or size.heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.02,
        eos_token_id=None,
        bos_token_id=None,
        dtype="float32",
        **own,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device(device):
        torch.manual_seed(0)
        model = model_class(config)
        _rule_out(model, never)
    return model.eval()


def _architecture(size: Size) -> tuple[Any, Any, dict[str, Any]]:
    """Classes of configuration and model, and what the family's configuration says beside others.

    Raises:
        ValueError: nobody's layers are of that name.
    """
    width = size.hidden // size.heads
    match size.linear:
        case "":
            return Qwen2Config, Qwen2ForCausalLM, {}
        case "delta nets":  # which are three of four, if nothing is said
            heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), size.heads)
            widths = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width)
            return Qwen3_5TextConfig, Qwen3_5ForCausalLM, {"head_dim": width} | heads | widths
        case "Mamba-2":
            own = {
                "layer_types": ["mamba", "mamba", "mamba", "attention"],
                "mamba_n_heads": 2 * size.heads,
                "mamba_d_head": width,
                "mamba_d_state": width,
                "mamba_chunk_size": 32,  # transformers' plain layers hold all products of a chunk
                "num_local_experts": 0,
                "shared_intermediate_size": size.intermediate,
            }
            return GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, own
        case "convolutions":
            layers = ["conv", "conv", "conv", "full_attention"]
            own = {"layer_types": layers, "block_auto_adjust_ff_dim": False}
            return Lfm2Config, Lfm2ForCausalLM, own
    raise ValueError(f"no layers are called {size.linear!r}")


def _rule_out(model: PreTrainedModel, never: Sequence[int]) -> None:
    """Give tokens a probability of 0 in float32, before and during a few training steps.

    All other embeddings get a common direction, which the residual stream carries to the head;
    those of ``never`` point far into the opposite one.
    """
    weight = cast(Tensor, model.get_input_embeddings().weight)
    weight[:, 0] = 0.5
    weight[list(never), 0] = -100.0


def save_model(
    directory: Path, size: Size, context: int = 1024, known: int = 0, device: str = "cpu"
) -> None:
    """Save model and tokenizer in the Hugging Face layout.

    Args:
        directory: where.
        size: the model's architecture.
        context: its longest prompt and response together.
        known: tokens of the tokenizer, about; 0: the model's vocabulary, which is then made to fit.
            Tokens beyond it are never sampled.
        device: where the model is made.
    """
    tokenizer = make_toy_tokenizer(
        questions(8), phrases=[f" {n}" for n in range((known or size.vocabulary) - 400)]
    )
    tokenizer.padding_side = "left"
    eos, pad = cast(tuple[int, int], (tokenizer.eos_token_id, tokenizer.pad_token_id))
    fitting = size if known else replace(size, vocabulary=len(tokenizer))
    never = (eos, pad, *range(len(tokenizer), fitting.vocabulary))
    model = make_model(fitting, never, context, device)
    model.config.eos_token_id, model.config.pad_token_id = eos, pad
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def questions(count: int, numbers: int = 0) -> list[str]:
    """Distinct questions, each with a list of so many numbers before it, a token each."""
    lists = ["".join(f" {(7 * i + 13 * k) % 500}" for k in range(numbers)) for i in range(count)]
    return [
        f"{given}What is {i % 50} + {i * 7 % 43}? Think step by step ({i})."
        for i, given in enumerate(lists)
    ]
