"""Process reward models on this machine, through torch and transformers."""

import math
import pickle
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2Model,
    Qwen2PreTrainedModel,
)
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.hub import cached_file

from graphpo_agent.errors import ModelError, first_line
from graphpo_agent.net.checks import check_counts
from graphpo_agent.plain_text import without_control
from graphpo_agent.pretrained import Dtype, control_tokens, load_pretrained, render_chat
from graphpo_agent.prm_text import STEP_TOKEN, step_messages
from graphpo_agent.types import SteppedResponse

__all__ = ["LocalStepScorer", "PrefixScorer"]

_KIND = "process reward model"
_BROKEN_FILE = (OSError, RuntimeError, ValueError, EOFError, TypeError, pickle.UnpicklingError)

Row = tuple[list[int], list[int]]
"""Token ids of a response, and the places among them of the scores of its first steps."""


class _LocalScorer:
    """What both kinds share; a ``StepScorer``."""

    def __init__(
        self,
        model: str | Path,
        auto_class: Any,
        *,
        device: str,
        dtype: Dtype,
        batch_size: int,
        max_tokens: int,
    ) -> None:
        self._path = str(model)
        check_counts(f"{_KIND} {model}", batch_size=batch_size, max_tokens=max_tokens)
        self._tokenizer, self._model = load_pretrained(
            _KIND, self._path, auto_class, device=device, dtype=dtype
        )
        self._control = control_tokens(self._tokenizer)
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._too_long = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """Responses so far that were too long for all of their steps to have a score."""
        return {"prm/too_long": self._too_long}

    def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
        """For each response one score per step; NaN for steps beyond ``max_tokens``."""
        rows = [self._row(response) for response in responses]
        scores: list[list[float]] = [[] for _ in responses]
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        for start in range(0, len(rows), self._batch_size):
            batch = by_length[start : start + self._batch_size]
            for i, found in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                missing = len(responses[i].steps) - len(found)
                self._too_long += missing > 0
                scores[i] = found + [math.nan] * missing
        return scores

    def _row(self, response: SteppedResponse) -> Row:
        """What the model reads of a response: at most ``max_tokens``."""
        raise NotImplementedError

    def _probabilities(self, values: torch.Tensor) -> torch.Tensor:
        """[n] scores from the model's output [n, width] at their places, in float32."""
        raise NotImplementedError

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Row]) -> list[list[float]]:
        """The scores of each row; padding is on the right and not attended to."""
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        width = int(lengths.max())
        input_ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows])
        mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
        device = self._model.device
        output = self._model(input_ids=input_ids.to(device), attention_mask=mask.to(device))[0]
        return [
            self._probabilities(output[i, places].float()).tolist() if places else []
            for i, (_, places) in enumerate(rows)
        ]


class LocalStepScorer(_LocalScorer):
    """A model that classifies the token after each step; a ``StepScorer``.

    The answer's steps, each followed by the step token, stand in the assistant's message of the
    chat template; a step's score is the second of the two classes' probabilities at its token
    (with one class: its sigmoid). That is the interface of Qwen2.5-Math-PRM and ReasonFlux-PRM-7B,
    whose layers are built here, so that no code of a model directory is run, and of every Hugging
    Face model for token classification.

    Control tokens that a question or step spells out are broken by a space.

    Example::

        scorer = LocalStepScorer("Gen-Verse/ReasonFlux-PRM-7B", device="cuda", dtype="bfloat16")
        scorer.score([SteppedResponse("2 + 2 + 2?", ("2 + 2 is 4.", "4 + 2 is 6."))])
            == [[0.98, 0.99]]
    """

    def __init__(
        self,
        model: str | Path,
        *,
        step_token: str = STEP_TOKEN,
        system: str | None = None,
        device: str = "cpu",
        dtype: Dtype = "float32",
        batch_size: int = 8,
        max_tokens: int = 4096,
    ) -> None:
        """Load the model.

        Args:
            model: a directory in the Hugging Face layout, or a model name.
            step_token: as the tokenizer knows it.
            system: a system message; None: what the chat template puts.
            device: where it runs.
            dtype: of its weights.
            batch_size: responses per forward pass.
            max_tokens: steps that end beyond have no score.

        Raises:
            ModelError: there is no usable model, tokenizer or chat template at ``model``, it has
                more than two classes, its tokenizer does not know ``step_token``, or the device
                or dtype is unknown.
            ToolError: a size that is no whole number of at least 1.
        """
        super().__init__(
            model,
            _AutoStepModel,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            max_tokens=max_tokens,
        )
        if self._tokenizer.chat_template is None:
            raise ModelError(f"{_KIND} {model} has no chat template")
        if self._model.config.num_labels not in (1, 2):
            count = self._model.config.num_labels
            raise ModelError(f"{_KIND} {model} has {count} classes, not the two of a step")
        ids = self._tokenizer(step_token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ModelError(
                f"{_KIND} {model}: step_token {step_token!r} is {len(ids)} tokens of its "
                "tokenizer; name the one token that it was trained with"
            )
        self._step_token = step_token
        self._step_id = ids[0]
        self._system = system

    def _row(self, response: SteppedResponse) -> Row:
        messages = step_messages(
            response, step_token=self._step_token, system=self._system, control=self._control
        )
        text = render_chat(self._tokenizer, messages, reply=False)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][: self._max_tokens]
        return ids, [place for place, token in enumerate(ids) if token == self._step_id]

    def _probabilities(self, values: torch.Tensor) -> torch.Tensor:
        return values[:, 0].sigmoid() if values.shape[1] == 1 else values.softmax(dim=1)[:, 1]


class PrefixScorer(_LocalScorer):
    """A model that scores a text by its last token; a ``StepScorer``.

    The interface of ReasonFlux-PRM-1.5B (``RewardModel`` in its ``utils/rm_utils.py``): question
    and answer one after the other, without a chat template; the sigmoid of a linear map of the
    last hidden state, in the file ``reward_head.pt``. It scores whole answers, which is what one
    step is; here the score of an earlier step is that at its last whole token, the answer so far.

    Example::

        PrefixScorer("Gen-Verse/ReasonFlux-PRM-1.5B").score([SteppedResponse("2 + 2?", ("4",))])
            == [[0.9]]
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: Dtype = "float32",
        batch_size: int = 8,
        max_tokens: int = 8192,
    ) -> None:
        """Load the model.

        Args:
            model: a directory in the Hugging Face layout with ``reward_head.pt``, or a model name.
            device: where it runs.
            dtype: of its weights.
            batch_size: responses per forward pass.
            max_tokens: steps that end beyond have no score; the authors trained with 8192 and cut
                longer texts.

        Raises:
            ModelError: there is no usable model, tokenizer or head at ``model``, or the device or
                dtype is unknown.
            ToolError: a size that is no whole number of at least 1.
        """
        super().__init__(
            model,
            AutoModel,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            max_tokens=max_tokens,
        )
        self._head = _reward_head(self._path, self._model.config.hidden_size).to(device)

    def _row(self, response: SteppedResponse) -> Row:
        pieces = [without_control(x, self._control) for x in (response.question, *response.steps)]
        encoded = self._tokenizer("".join(pieces), return_offsets_mapping=True)
        ids = encoded["input_ids"]
        whole = [0 if start == end else end for start, end in encoded["offset_mapping"]]
        places: list[int] = []
        for boundary in list(accumulate(map(len, pieces)))[1:]:
            place = max((i for i, end in enumerate(whole) if 0 < end <= boundary), default=0)
            if place >= self._max_tokens or not ids:
                break
            places.append(place)
        return ids[: self._max_tokens], places

    def _probabilities(self, values: torch.Tensor) -> torch.Tensor:
        return self._head(values)[:, 0].sigmoid()


class _QwenStepModel(Qwen2PreTrainedModel):
    """The layers of Qwen2.5-Math-PRM's weights: two classes from a head of two layers."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.model = Qwen2Model(config)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self._keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> TokenClassifierOutput:
        """Logits [batch, tokens, 2]."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))


class _AutoStepModel:
    """Either kind of model for ``LocalStepScorer``, by what its configuration says it is."""

    @staticmethod
    def from_pretrained(name: str, *, local_files_only: bool, **options: Any) -> Any:
        config = AutoConfig.from_pretrained(name, local_files_only=local_files_only)
        own = "Qwen2ForProcessRewardModel" in (config.architectures or ())
        auto_class = _QwenStepModel if own else AutoModelForTokenClassification
        return auto_class.from_pretrained(
            name, config=config, local_files_only=local_files_only, **options
        )


def _reward_head(name: str, width: int) -> nn.Linear:
    head = nn.Linear(width, 1)
    try:
        path = cached_file(name, "reward_head.pt", local_files_only=Path(name).is_dir())
        head.load_state_dict(torch.load(str(path), map_location="cpu", weights_only=True))
    except _BROKEN_FILE as error:
        reason = first_line(error)
        raise ModelError(f"{_KIND} {name!r}: reward_head.pt cannot be loaded: {reason}") from error
    return head.eval()
