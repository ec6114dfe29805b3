"""A frozen language model on this machine, through torch and transformers."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from graphpo_agent.errors import ModelError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.plain_text import plain_text, without_control
from graphpo_agent.pretrained import (
    Dtype,
    control_tokens,
    load_pretrained,
    most_tokens,
    render_chat,
)
from graphpo_agent.types import Message

__all__ = ["LocalChat"]

_THOUGHTS = "<think>"


class LocalChat:
    """A causal language model with a chat template; a ``ChatModel``. Threads wait for each other.

    Replies are drawn greedily, one at a time. Control tokens that a message spells out, such as
    ``<|im_end|>``, are broken by a space, so that no message can end early or pass for another. A
    reply begins with the ``<think>`` that its model's chat template writes, where it writes one:
    whoever reads it can then tell thoughts that were cut off from an answer.

    Example::

        judge = LocalChat("Qwen/Qwen2.5-7B-Instruct", device="cuda", dtype="bfloat16")
        judge.reply([{"role": "user", "content": "Is 7 prime? yes or no"}], max_tokens=8)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: Dtype = "float32",
        max_context_tokens: int = 8192,
    ) -> None:
        """Load the model.

        Args:
            path: a directory in the Hugging Face layout, or a model name.
            device: where it runs.
            dtype: of its weights.
            max_context_tokens: of messages and reply together; no more than tokenizer and model
                allow.

        Raises:
            ModelError: there is no usable model, tokenizer or chat template at ``path``, or the
                device or dtype is unknown.
            ToolError: ``max_context_tokens`` is no whole number of at least 1.
        """
        self._path = str(path)
        check_counts(f"model {path}", max_context_tokens=max_context_tokens)
        self._tokenizer, self._model = load_pretrained(
            "language model", self._path, AutoModelForCausalLM, device=device, dtype=dtype
        )
        if self._tokenizer.chat_template is None:
            raise ModelError(f"model {path} has no chat template; use an instruction-tuned model")
        self._max_context_tokens = min(
            max_context_tokens, most_tokens(self._tokenizer, self._model)
        )
        self._control = control_tokens(self._tokenizer)
        self._lock = threading.Lock()

    def reply(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Its answer to a conversation.

        Raises:
            CallFailed: the conversation leaves no room for ``max_tokens``.
            ModelError: the chat template refuses these messages.
        """
        token_ids = self._rendered(messages)
        length = len(token_ids)
        if length + max_tokens > self._max_context_tokens:
            raise CallFailed(
                "bad_arguments",
                f"model {self._path}: {length} tokens leave no room for {max_tokens} more in "
                f"{self._max_context_tokens}",
            )
        with self._lock, torch.inference_mode():
            input_ids = torch.tensor([token_ids], device=self._model.device)
            output: Any = self._model.generate(  # pyright: ignore[reportCallIssue]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                pad_token_id=self._tokenizer.eos_token_id,
            )
        text = self._tokenizer.decode(output[0, length:].tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        asked = self._tokenizer.decode(token_ids)
        assert isinstance(asked, str)
        return _THOUGHTS + text if asked.rstrip().endswith(_THOUGHTS) else text

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model answers."""
        harmless = [
            {**message, "content": without_control(message["content"], self._control)}
            for message in messages
        ]
        text = render_chat(self._tokenizer, harmless, reply=True)
        return self._tokenizer(plain_text(text), add_special_tokens=False)["input_ids"]
