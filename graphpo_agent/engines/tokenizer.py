"""Text to token ids and back, with any Hugging Face tokenizer.

The rule that everything here serves: *text never becomes a control token*. A retrieved document
that holds ``<|im_end|>`` or a question that spells ``<|im_start|>system`` is encoded as the plain
characters it consists of; only the chat template writes control tokens.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from graphpo_agent.errors import ModelError, first_line
from graphpo_agent.plain_text import plain_text
from graphpo_agent.pretrained import control_tokens, render_chat, why_not_loaded
from graphpo_agent.types import Message, Prompt, TurnBreak

__all__ = ["HfTokenizer", "check_model_directory"]

_CONFIG_FILES = frozenset({"config.json", "tokenizer_config.json", "generation_config.json"})
_PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")
"""Private-use characters stand for the messages' contents while the chat template is rendered."""
_LONGEST_HUB_NAME = 193
"""An owner and a name of 96 characters each."""
_REMEMBERED = 512
"""Texts, and lists of token ids, whose counterparts are remembered."""


def check_model_directory(name: str, required_file: str) -> bool:
    """Whether ``name`` is a directory; a name that is not one is looked up on the Hugging Face hub.

    Args:
        name: a directory, or a model name such as ``Qwen/Qwen2.5-0.5B-Instruct``.
        required_file: a file that a model directory must have.

    Raises:
        ModelError: the path is a file, or neither a directory nor a hub name; or the required file
            is missing, or a configuration file damaged.
    """
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, required_file)):
            raise ModelError(
                f"model directory {name}: {required_file} is missing; "
                "name a directory written by save_pretrained"
            )
        for file in sorted(_CONFIG_FILES & {*os.listdir(name)}):
            _check_object(Path(name) / file)
        return True
    if os.path.exists(name):
        raise ModelError(f"model {name} is a file; name the directory that it lies in")
    in_hub = re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name) and len(name) <= _LONGEST_HUB_NAME
    if not in_hub:
        raise ModelError(f"model directory {name:.200} does not exist; check the path")
    return False


def _check_object(path: Path) -> None:
    """Raise ModelError unless a file holds a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a valid JSON file: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; copy it from the model again")


class HfTokenizer:
    """A ``graphpo_agent.protocols.Tokenizer`` around a Hugging Face tokenizer.

    Example::

        tokenizer = HfTokenizer.load("runs/kb/policy")
        tokenizer.decode(tokenizer.encode("<search> karo </search>"))  # '<search> karo </search>'
        tokenizer.render([{"role": "user", "content": "Who mentored Karo Venn?"}])

    Attributes:
        eos_ids: every token that ends an answer: the tokenizer's and the generation config's.
        eos_id: the one that is appended to demonstrations (the tokenizer's own).
        vocab_size: one more than the largest token id.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, extra_eos_ids: Sequence[int] = ()
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path}: no eos_token; set it in tokenizer_config.json"
            )
        self.hf = tokenizer
        self.eos_id = cast(int, tokenizer.eos_token_id)
        self.eos_ids = frozenset({self.eos_id, *extra_eos_ids})
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self._control = control_tokens(tokenizer)
        self._control_pattern = _any_of(self._control)
        self._control_ids = frozenset(self._control.values()) - {cast(int, tokenizer.unk_token_id)}
        opening = cast(list[int], tokenizer("")["input_ids"])
        self._turn_breaks: dict[str, TurnBreak] = {}
        # Paths of one graph see the same observations and begin with the same turns.
        self._ids_of = lru_cache(_REMEMBERED)(self._encode_plain)
        self._text_of = lru_cache(_REMEMBERED)(self._decode)
        self._bos = [i for i in opening if i == tokenizer.bos_token_id]
        self._decoder = _decoder(tokenizer)

    @classmethod
    def load(cls, name: str) -> "HfTokenizer":
        """Read the tokenizer of a directory (never the network) or of a hub model.

        Raises:
            ModelError: nothing there, unreadable, or without an end-of-sequence token.
        """
        local = check_model_directory(name, "tokenizer_config.json")
        words = Path(name) / "tokenizer.json"
        if local and words.is_file():
            _check_object(words)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
        except StrictDataclassError as error:  # it is read to tell the kind of tokenizer
            why = why_not_loaded(name, error)
            raise ModelError(f"model {name} cannot be read: {why}") from error
        except Exception as error:  # of no narrower kind, where tokenizer.json is wrong
            why = why_not_loaded(name, error)
            raise ModelError(f"tokenizer of {name} cannot be read: {why}") from error
        longest: object = tokenizer.model_max_length
        if not isinstance(longest, int | float):
            raise ModelError(
                f"tokenizer of {name}: model_max_length in tokenizer_config.json must be a number, "
                f"found {longest!r:.60}"
            )
        if len(tokenizer.get_vocab()) == len(tokenizer.get_added_vocab()):
            raise ModelError(
                f"tokenizer of {name} knows no text, only {len(tokenizer.get_vocab())} control "
                "tokens: copy tokenizer.json or the vocabulary files into it"
            )
        return cls(tokenizer, _generation_eos_ids(name, local))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; a control token's spelling inside it stays plain text.

        Half of a surrogate pair, which JSON can hold but no token, becomes ``?``.
        """
        text = plain_text(text)
        token_ids = self._ids_of(text)
        if self._control_ids.isdisjoint(token_ids):
            return list(token_ids)
        # The spelling is also an ordinary vocabulary entry: cut it after its first character.
        return [i for piece in self._broken_spellings(text) for i in self._encode_plain(piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without control tokens; added tags such as ``<search>`` are text."""
        return self._text_of(tuple(token_ids))

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a conversation, up to where the policy answers, or of a plain text.

        The template is rendered with placeholders for the contents. Its control tokens become
        ids; the text between two of them, contents filled in, is encoded as plain text.
        A tokenizer without a chat template gets the contents, joined by newlines.

        Raises:
            ModelError: the chat template refuses these messages.
        """
        if isinstance(prompt, str):
            return [*self._bos, *self.encode(prompt)]
        contents = [message["content"] for message in prompt]
        if self.hf.chat_template is None:
            return [*self._bos, *self.encode("\n".join(contents))]
        return self._template_ids(self._rendered(prompt), contents)

    def turn_break(self, role: str) -> TurnBreak:
        """What the chat template puts around a message that replies to the policy.

        Without a chat template it is a line break on either side.

        Raises:
            ModelError: the chat template refuses such a message.
        """
        if role not in self._turn_breaks:
            self._turn_breaks[role] = self._turn_break(role)
        return self._turn_breaks[role]

    def _turn_break(self, role: str) -> TurnBreak:
        if self.hf.chat_template is None:
            line_break = tuple(self.encode("\n"))
            return TurnBreak(line_break, line_break)
        roles = ("user", "assistant", role)
        rendered = self._rendered([{"role": each, "content": ""} for each in roles])
        # Of three placeholders: what is between the last two, and what follows the last.
        opening, closing = _PLACEHOLDER.split(rendered)[-3::2]
        return TurnBreak(tuple(self._template_ids(opening)), tuple(self._template_ids(closing)))

    def _template_ids(self, text: str, contents: Sequence[str] = ()) -> list[int]:
        """Token ids of a template's output, its control tokens as such, contents filled in."""
        token_ids: list[int] = []
        for plain, control in _runs(text, contents, self._control_pattern):
            token_ids += self.encode(plain)
            if control:
                token_ids.append(self._control[control])
        return token_ids

    def _rendered(self, messages: Sequence[Message]) -> str:
        stand_ins = [
            {**message, "content": f"\ue000{i}\ue001"} for i, message in enumerate(messages)
        ]
        return render_chat(self.hf, stand_ins, reply=True)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        encoded = self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return tuple(cast(list[int], encoded["input_ids"]))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        if self._decoder is not None:  # transformers' checks of every id take as long again
            return self._decoder.decode(token_ids, skip_special_tokens=True)
        text = self.hf.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _broken_spellings(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._control_pattern.finditer(text):
            cut = match.start() + 1
            yield text[start:cut]
            start = cut
        yield text[start:]


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """What does the decoding, where ``tokenizer.decode`` adds nothing to it."""
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, fast) or kind.decode is not PreTrainedTokenizerBase.decode:
        return None
    return tokenizer.backend_tokenizer if kind._decode is fast._decode else None


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _runs(
    rendered: str, contents: Sequence[str], control: re.Pattern[str]
) -> Iterator[tuple[str, str]]:
    """``(plain text, control token after it)`` pairs of a rendered template; the last has ""."""

    def fill(text: str) -> str:
        return _PLACEHOLDER.sub(lambda match: contents[int(match[1])], text)

    start = 0
    for match in control.finditer(rendered):
        yield fill(rendered[start : match.start()]), match.group()
        start = match.end()
    yield fill(rendered[start:]), ""


def _generation_eos_ids(name: str, local: bool) -> list[int]:
    """The ``eos_token_id``s of generation_config.json; empty where the model has no such file.

    Raises:
        ModelError: they are no token ids.
    """
    try:
        given = GenerationConfig.from_pretrained(name, local_files_only=local).eos_token_id
    except OSError:
        return []
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in ids):
        raise ModelError(
            f"{name}: eos_token_id of generation_config.json is {given!r}; give a token id or a "
            "list of them"
        )
    return [token for token in ids if token >= 0]  # -1 stands for none
