"""A small model that says what was found, trained a little and then frozen."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.calibration_parts.states import DemonstratedState
from graphpo_agent.data.toy_kb import YEARS
from graphpo_agent.data.toy_model import make_toy_model
from graphpo_agent.rollout.frozen_summary import summary_messages, written_path

__all__ = ["train_summarizer"]

LEARNING_RATE = 5e-3
MAX_CHARACTERS = 12_000
"""Of a path, as ``frozen_summary`` shows it by default."""
PROMPT_WEIGHT = 0.5
"""Of the prompt's tokens in the loss: a model that starts from nothing learns copying there."""


def train_summarizer(
    states: Sequence[DemonstratedState], directory: Path, *, steps: int, batch_size: int = 24
) -> float:
    """Train a summariser on (path as the frozen model is shown it, its facts), and save it.

    Its heads have the size 32, the smallest that vLLM knows on a CPU.

    Args:
        states: to learn from.
        directory: where the model goes, in the Hugging Face layout.
        steps: batches.
        batch_size: states of a batch.

    Returns:
        The mean loss per token of the summary in the last ten batches, in nats.
    """
    rng = random.Random("summarizer")
    texts = [
        _prompt(state) + _summary(state) for state in rng.sample(states, min(4000, len(states)))
    ]
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_context_tokens": 1024}
    make_toy_model(directory, texts, phrases=[f" {year}" for year in YEARS], **sizes)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    losses: list[float] = []
    for _ in range(steps):
        input_ids, weights = _batch(tokenizer, rng.sample(states, batch_size))
        logits = model(input_ids=input_ids).logits[:, :-1]
        of_tokens = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), input_ids[:, 1:], reduction="none"
        )
        of_prompt, of_summary = ((weights[:, 1:] == k) for k in (1, 2))
        loss = of_tokens[of_summary].mean()
        (loss + PROMPT_WEIGHT * of_tokens[of_prompt].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(directory)
    return sum(losses[-10:]) / len(losses[-10:])


def _prompt(state: DemonstratedState) -> str:
    return summary_messages(written_path(state.path, MAX_CHARACTERS))[0]["content"]


def _summary(state: DemonstratedState) -> str:
    """With a space in front, so that its first word is the token that it is elsewhere."""
    return f" {state.facts}"


def _batch(
    tokenizer: PreTrainedTokenizerBase, states: Sequence[DemonstratedState]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens] ids, and what each belongs to: 1 the prompt, 2 the summary, 0 the padding.

    Padding is on the right, where a causal model never looks.
    """
    ids: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    for state in states:
        messages = [{"role": "user", "content": _prompt(state)}]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(shown, str)
        prompt, summary = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (shown, f"{_summary(state)}{tokenizer.eos_token}")
        )
        ids.append(torch.tensor(prompt + summary))
        parts.append(torch.tensor([1] * len(prompt) + [2] * len(summary)))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(parts, batch_first=True)
