"""A process reward model behind vLLM's ``/pooling``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ToolError
from graphpo_agent.net.chat import classify_openai
from graphpo_agent.net.client import HttpService, Limits, Reply, Verdict
from graphpo_agent.net.failures import CallFailed, FailureTally
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.net.secrets import bearer
from graphpo_agent.net.store import CallStore
from graphpo_agent.prm_text import STEP_TOKEN, step_messages
from graphpo_agent.types import SteppedResponse

__all__ = ["VllmStepScorer"]


class VllmStepScorer:
    """A model with Qwen2.5-Math-PRM's interface on a vLLM server; a ``StepScorer``.

    Each response is one request, ``{"model": …, "messages": [question, answer]}``; the server puts
    it into the model's chat template, and for each step token ``data[0].data`` of its reply holds
    the probabilities of the two classes, of which the second is the score. Threads share it.

    A response for which the server gave no answer in all tries (an outage, or an answer too long
    for the model) has NaN for every step. Control tokens that a question or step spells out are
    broken by a space, so that neither can begin a step or end a message.

    Example, with ``vllm serve Qwen/Qwen2.5-Math-PRM-7B --runner pooling`` (ReasonFlux-PRM-7B
    alike)::

        scorer = VllmStepScorer("http://127.0.0.1:8000", "Qwen/Qwen2.5-Math-PRM-7B")
        scorer.score([SteppedResponse("2 + 2 + 2?", ("2 + 2 is 4.", "4 + 2 is 6."))])
            == [[0.98, 0.99]]
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        step_token: str = STEP_TOKEN,
        system: str | None = None,
        api_key_env: str | None = None,
        deadline_s: float = 120.0,
        tries: int = 3,
        concurrency: int = 16,
        per_second: float | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            url: the server's, up to and without ``/pooling``.
            model: as the server names it.
            step_token: as the model's tokenizer knows it.
            system: a system message; None: what the model's chat template puts.
            api_key_env: the environment variable that holds the key; None: no key is sent.
            deadline_s: see ``graphpo_agent.net.client.Limits``, as the next three.
            tries: of one request.
            concurrency: requests at once.
            per_second: requests per second.
            store: where answers are recorded and taken from.

        Raises:
            ToolError: the variable is not set, or a limit makes no sense.
        """
        self._service = HttpService(
            f"process reward model {model}",
            limits=Limits(
                deadline_s=deadline_s, tries=tries, concurrency=concurrency, per_second=per_second
            ),
            secret_headers=bearer(api_key_env, store),
            store=store,
            classify=_classify,
        )
        self._url = f"{url.rstrip('/')}/pooling"
        self._model = model
        self._step_token = step_token
        self._system = system
        self._concurrency = concurrency
        self._tally = FailureTally()

    @property
    def counts(self) -> Mapping[str, int]:
        """Responses without scores so far."""
        return {"prm/failed": self._tally.failed}

    def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
        """For each response one score per step; see the class for NaN.

        Raises:
            ToolError: key, address or model are wrong; the quota is used up; the server does not
                give two probabilities per step; or no response has been scored yet.
        """
        scores = in_threads(self._score, responses, self._concurrency)
        self._tally.check("no response could be scored")
        return scores

    def _score(self, response: SteppedResponse) -> list[float]:
        if not response.steps:
            return []
        messages = step_messages(response, step_token=self._step_token, system=self._system)
        body = {"model": self._model, "messages": messages}
        try:
            rows = _rows(self._service.call("POST", self._url, body=body).json())
        except CallFailed as failure:
            self._tally.fail(str(failure))
            return [math.nan] * len(response.steps)
        assert rows is not None
        if rows.shape != (len(response.steps), 2) or not _are_probabilities(rows):
            raise ToolError(
                f"{self._url}: {self._model} gave numbers of shape {rows.shape} for "
                f"{len(response.steps)} steps, not two probabilities for each; serve a process "
                f"reward model whose step token is {self._step_token} (--runner pooling, and "
                '--pooler-config \'{"pooling_type": "STEP", "step_tag_id": …}\' where vLLM does '
                "not know the token)"
            )
        self._tally.answer()
        return rows[:, 1].tolist()


def _are_probabilities(rows: NDArray[np.float64]) -> bool:
    """Whether each row is a distribution, as exact as half precision makes it."""
    return bool((rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) < 0.02).all())


def _classify(reply: Reply) -> Verdict:
    """As ``classify_openai``; an answer that holds no finite numbers is transient."""
    verdict = classify_openai(reply)
    if verdict is None and _rows(reply.json()) is None:
        return "transient"
    return verdict


def _rows(answer: Any) -> NDArray[np.float64] | None:
    """The numbers of ``{"data": [{"data": [[0.1, 0.9], …]}]}``; None where there are none."""
    match answer:
        case {"data": [{"data": [*rows]}]}:
            try:
                numbers = np.array(rows, np.float64)
            except (TypeError, ValueError, OverflowError):
                return None
            return numbers if np.isfinite(numbers).all() else None
        case _:
            return None
