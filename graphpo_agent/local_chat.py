"""A frozen language model on this machine, through torch and transformers."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from graphpo_agent.errors import ModelError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Message

__all__ = ["LocalChat"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LocalChat:
    """A causal language model with a chat template; a ``ChatModel``. Threads wait for each other.

    Replies are drawn greedily, one at a time. Control tokens that a message spells out, such as
    ``<|im_end|>``, are broken by a space, so that no message can end early or pass for another.

    Example::

        judge = LocalChat("Qwen/Qwen2.5-7B-Instruct", device="cuda", dtype="bfloat16")
        judge.reply([{"role": "user", "content": "Is 7 prime? yes or no"}], max_tokens=8)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_context_tokens: int = 8192,
    ) -> None:
        """Load the model.

        Args:
            path: a directory in the Hugging Face layout, or a model name.
            device: where it runs.
            dtype: of its weights.
            max_context_tokens: of messages and reply together.

        Raises:
            ModelError: there is no usable model, tokenizer or chat template at ``path``, or the
                device or dtype is unknown.
        """
        self._path = str(path)
        if dtype not in _DTYPES:
            raise ModelError(f"model {path}: dtype {dtype!r} is unknown; use {', '.join(_DTYPES)}")
        self._tokenizer, self._model = _load(self._path, device, _DTYPES[dtype])
        self._max_context_tokens = max_context_tokens
        self._control = _control_tokens(self._tokenizer)
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
        return text

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model answers."""
        harmless = [
            {**message, "content": self._control.sub(_broken, message["content"])}
            for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                harmless, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"chat template of {self._path}: {reason}") from error
        assert isinstance(text, str)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _load(
    name: str, device: str, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and weights; a directory is read without the network."""
    local = Path(name).is_dir()
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
        loaded = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=local, output_loading_info=True
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        model = model.to(torch.device(device)).eval()  # pyright: ignore[reportArgumentType]
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise ModelError(
            f"model {name!r} cannot be loaded: {reason}; give a directory with config.json, "
            "weights and tokenizer, or the name of a model on the hub, and a device of this machine"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model {name!r} cannot be loaded: {len(missing)} weights are missing, first "
            f"{missing[0]}; the directory does not hold a complete causal language model"
        )
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruction-tuned model")
    return tokenizer, model


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the spelling of every token that only a template may produce."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    spellings = {*added, *tokenizer.all_special_tokens}
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _broken(match: re.Match[str]) -> str:
    """``<|im_end|>`` as ``< |im_end|>``."""
    return f"{match[0][0]} {match[0][1:]}"
