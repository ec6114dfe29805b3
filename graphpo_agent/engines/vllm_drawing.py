"""How vLLM draws tokens for us: from the request's own random numbers, as the local engine does.

vLLM's own sampler knows no log-probability that is at the sampling temperature and yet before
top-p truncation, and draws from a generator whose state is bound to its device. A logits
processor replaces both: it draws the token and leaves vLLM a row of logits in which that token
alone is possible and its value is the log-probability. vLLM then decodes greedily and reports the
values (``logprobs_mode="processed_logits"``).

Shapes: B rows of the batch, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from graphpo_agent.engines.local.drawing import UniformNumbers, draw
from graphpo_agent.types import SamplingParams

__all__ = ["SeededDraw", "drawing_params"]

_DRAWN_AHEAD = 64


def drawing_params(
    seed: int, sampling: SamplingParams, max_new_tokens: int, eos_ids: frozenset[int]
) -> VllmSampling:
    """The parameters for vLLM of one request that ``SeededDraw`` draws for.

    Args:
        seed: 0 <= seed < 2**128.
        sampling: temperature and top-p.
        max_new_tokens: at least 1.
        eos_ids: tokens that end the request.
    """
    return VllmSampling(
        temperature=0.0,
        max_tokens=max_new_tokens,
        stop_token_ids=sorted(eos_ids),
        ignore_eos=True,  # those of the model's generation config, that is
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"seed": seed, "sampling": sampling},
        skip_clone=True,
    )


@dataclass(slots=True)
class _Row:
    """One request in the batch. ``token_ids`` is vLLM's own growing list of its tokens."""

    seed: int
    sampling: SamplingParams
    token_ids: list[int]
    uniforms: list[float] = field(default_factory=list[float])

    def next_uniform(self, numbers: UniformNumbers) -> float:
        """The random number of the token to be drawn; the same if it has to be drawn again."""
        place = len(self.token_ids)
        while place >= len(self.uniforms):
            ahead = numbers.take(self.seed, len(self.uniforms), _DRAWN_AHEAD)
            self.uniforms += ahead.tolist()
        return self.uniforms[place]


class SeededDraw(LogitsProcessor):
    """Draws the next token of every row from the random numbers of its request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._numbers = UniformNumbers()
        self._rows: dict[int, _Row] = {}
        self._groups: list[tuple[SamplingParams, list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        """No: it decides what the largest value is, at temperature 0 too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests that enter, leave and move within the batch."""
        if process_dict_updates(self._rows, batch_update, _row):
            groups: dict[SamplingParams, list[int]] = {}
            for index in sorted(self._rows):
                groups.setdefault(self._rows[index].sampling, []).append(index)
            self._groups = list(groups.items())

    def apply(self, logits: Tensor) -> Tensor:
        """[B, V] of which each row keeps the drawn token's log-probability only."""
        drawn = [self._draw(logits, *group) for group in self._groups]
        logits.fill_(-torch.inf)
        for rows, token_ids, logprobs in drawn:
            logits[rows, token_ids] = logprobs.to(logits.dtype)
        return logits

    def _draw(
        self, logits: Tensor, sampling: SamplingParams, indices: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and log-probabilities of the requests that share a way of drawing."""
        uniform = np.array([self._rows[index].next_uniform(self._numbers) for index in indices])
        rows = torch.tensor(indices, device=logits.device)
        chosen = logits if len(indices) == len(logits) else logits[rows]
        return rows, *draw(chosen, torch.from_numpy(uniform).to(logits.device), sampling)


def _row(params: VllmSampling, prompt_ids: Any, token_ids: list[int]) -> _Row:
    assert params.extra_args is not None, "made by drawing_params"
    return _Row(params.extra_args["seed"], params.extra_args["sampling"], token_ids)
