"""Language models behind an OpenAI-compatible ``/chat/completions`` (OpenAI, vLLM, SGLang)."""

from collections.abc import Mapping, Sequence
from typing import Any

from graphpo_agent.net.client import HttpService, Limits, Reply, Verdict, classify_json
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.secrets import bearer
from graphpo_agent.net.store import CallStore
from graphpo_agent.plain_text import without_control
from graphpo_agent.types import Message

__all__ = ["OpenAIChat", "classify_openai", "without_thinking"]

_USED_UP = frozenset(("insufficient_quota", "billing_hard_limit_reached"))
_CONTROL = ("<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>")
"""Tokens with which templates of Llama 2, Mistral and Gemma begin and end messages."""


class OpenAIChat:
    """A model behind an OpenAI-compatible endpoint; a ``ChatModel``. Threads share it.

    Servers put the messages into the model's chat template as they are. Control tokens that a
    message spells out, such as ``<|im_end|>``, are broken by a space, so that no message can end
    early or pass for another.

    Example::

        judge = OpenAIChat("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-72B-Instruct")
        judge.reply([{"role": "user", "content": "Is 7 prime? yes or no"}], max_tokens=8)
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        deadline_s: float = 120.0,
        tries: int = 3,
        concurrency: int = 16,
        per_second: float | None = None,
        options: Mapping[str, Any] | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            base_url: up to and without ``/chat/completions``.
            model: as the server names it.
            api_key_env: the environment variable that holds the key; None: no key is sent.
            deadline_s: see ``graphpo_agent.net.client.Limits``, as the next three.
            tries: of one call.
            concurrency: calls at once.
            per_second: requests per second.
            options: further fields of the request's JSON, which replace the standard ones; a None
                removes one. ``{"chat_template_kwargs": {"enable_thinking": False}}`` switches off
                Qwen3's thinking, ``{"max_tokens": None, "max_completion_tokens": 2000}`` suits
                OpenAI's reasoning models.
            store: where answers are recorded and taken from.

        Raises:
            ToolError: the variable is not set, or a limit makes no sense.
        """
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._options = dict(options or {})
        self._service = HttpService(
            f"chat model {model}",
            limits=Limits(
                deadline_s=deadline_s, tries=tries, concurrency=concurrency, per_second=per_second
            ),
            secret_headers=bearer(api_key_env, store),
            store=store,
            classify=_classify_chat,
        )

    def reply(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Its answer to a conversation, drawn at temperature 0.

        Raises:
            CallFailed: no answer this time, or an answer without text.
            ToolError: none at any time: wrong key or model, used-up quota.
        """
        fields = {
            "model": self._model,
            "messages": [
                {**message, "content": without_control(message["content"], _CONTROL)}
                for message in messages
            ],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            **self._options,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        choice = self._service.call("POST", self._url, body=body).json()["choices"][0]
        said = _text(choice["message"].get("content"))
        if said is None:
            reason = choice.get("finish_reason")
            raise CallFailed("no_result", f"chat model {self._model} said nothing ({reason})")
        return said


def _text(content: Any) -> str | None:
    """What a message says, of its parts those that are text and no thoughts; None: nothing."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                pass
    return "".join(texts) if texts else None


def without_thinking(reply: str) -> str:
    """What a reasoning model says after its thoughts; nothing where it was cut off among them.

    Example: ``without_thinking("<think>1 and 1 …</think> 2")`` is ``"2"``.
    """
    _, closed, rest = reply.rpartition("</think>")
    if closed:
        return rest.strip()
    return "" if rest.lstrip().startswith("<think>") else rest.strip()


def classify_openai(reply: Reply) -> Verdict:
    """``classify_json``, and OpenAI's codes for a used-up account, which come as 429 or 400.

    What a gateway refuses for its words (OpenRouter's moderation) is refused alone.

    Example: 429 with ``{"error": {"code": "insufficient_quota"}}`` is ``"quota"``.
    """
    verdict = classify_json(reply)
    if reply.status == 403 and '"flagged_input"' in reply.text:
        return "bad_arguments"
    if verdict in ("rate_limit", "bad_arguments") and any(
        f'"{code}"' in reply.text for code in _USED_UP
    ):
        return "quota"
    return verdict


def _classify_chat(reply: Reply) -> Verdict:
    """An answer without a message, such as ``{"error": …}`` with status 200, is transient.

    So is one that a gateway could not finish, as its model failed on the way (OpenRouter's
    ``finish_reason``).
    """
    verdict = classify_openai(reply)
    if verdict is not None:
        return verdict
    match reply.json():
        case {"choices": [{"finish_reason": "error"} | {"error": {}}, *_]}:
            return "transient"
        case {"choices": [{"message": {}}, *_]}:
            return None
        case _:
            return "transient"
