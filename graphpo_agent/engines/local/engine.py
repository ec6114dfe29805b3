"""One machine's engine: samples with the weights and learns them (Algorithm 1, stage 4)."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from graphpo_agent.engines.local.attention import attention
from graphpo_agent.engines.local.checkpoint import read_checkpoint, write_checkpoint, write_model
from graphpo_agent.engines.local.demonstrations import demonstration_sample
from graphpo_agent.engines.local.forward import check_flat_layout, score_tokens
from graphpo_agent.engines.local.loss import (
    clipped_objective,
    loss_weights,
    reverse_kl,
    token_advantages,
)
from graphpo_agent.engines.local.metrics import MetricSums
from graphpo_agent.engines.local.model import check_vocabulary
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import GraphError
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.types import Demonstration

__all__ = ["LocalEngine"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _TokenData:
    """What the objective needs of the N tokens of some samples, in their order.

    Attributes:
        weights: [N] of ``loss_weights``, over the samples of one minibatch.
        advantages: [A, N].
        old_logprobs: [N].
        reference_logprobs: [N]; None without a reference model.
    """

    weights: FloatArray
    advantages: FloatArray
    old_logprobs: FloatArray
    reference_logprobs: FloatArray | None


class LocalEngine:
    """The weights, as sampler and learner (``graphpo_agent.protocols.Engine``).

    The model stays in evaluation mode. A reference model is kept only if the objective has a
    KL term: a copy of the weights given here.

    Example::

        tokenizer = HfTokenizer.load(name)
        updating = UpdateOptions(learning_rate=3e-4)
        engine = LocalEngine(load_model(name), tokenizer, OptimizerOptions(), updating)
        metrics = engine.update(samples, step=0)

    Attributes:
        policy: the model as a sampler.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: HfTokenizer,
        optimizer: OptimizerOptions,
        updating: UpdateOptions | None = None,
        imitation: ImitationOptions | None = None,
        max_batch_bytes: int = 2**30,
    ) -> None:
        """Take the weights over.

        Args:
            model: trained in place.
            tokenizer: the model's.
            optimizer: of every step.
            updating: how ``update`` learns; None for an engine that only imitates.
            imitation: how ``imitate`` learns; None for an engine that only updates.
            max_batch_bytes: keys and values that one sampling batch may hold.

        Raises:
            ModelError: the tokenizer does not fit, or the flat layout cannot express the model.
        """
        check_vocabulary(model, tokenizer)
        check_flat_layout(model)
        self.policy = LocalPolicy(model, tokenizer, max_batch_bytes)
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._options = optimizer
        self._updating = updating
        self._imitation = imitation
        self._optimizer = _adamw(model, optimizer)
        self._counters = {"update_steps": 0, "imitation_steps": 0}
        has_kl = updating is not None and updating.objective.kl > 0
        self._reference = copy.deepcopy(model).requires_grad_(False) if has_kl else None

    def update(self, samples: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """One PPO update from the graphs of one batch.

        Every context of the policy is released. Samples without a trained token are left out.

        Returns:
            ``update/loss``, ``update/entropy`` (nats per trained token), ``update/kl`` (k3
            estimate of the divergence from the policy that sampled), ``update/reference_kl``
            (with a reference model), ``update/clip_fraction`` (of tokens and terms whose
            gradient is cut), ``update/grad_norm`` (before clipping), ``update/learning_rate``;
            where the rollout recorded log-probabilities and they are recomputed,
            ``update/mismatch`` (mean distance of the two) and ``update/mismatch_kl`` (k3).

        Raises:
            GraphError: log-probabilities of the rollout are asked for and missing.
        """
        options = self._updating
        assert options is not None, "this engine was made without UpdateOptions"
        self.policy.release()
        trained = [sample for sample in samples if sample.loss_mask.any()]
        old, mismatch = self._old_logprobs(trained, options)
        reference = (
            None
            if self._reference is None
            else self._logprobs(self._reference, trained, options.temperature)
        )
        sums = MetricSums()
        for members in _minibatches(len(trained), step, options):
            chosen = [trained[i] for i in members]
            data = _TokenData(
                loss_weights(chosen, options.loss_aggregation),
                token_advantages(chosen),
                np.concatenate([old[i] for i in members]),
                None if reference is None else np.concatenate([reference[i] for i in members]),
            )
            for batch in pack(chosen, self._options.max_tokens):
                self._learn(batch, data, options, sums)
            rate = options.rate(self._counters["update_steps"])
            self._counters["update_steps"] += 1
            sums.add_step(self._step(rate), rate)
        return sums.means("update") | mismatch

    def imitate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One supervised step: mean negative log-likelihood of the trained pieces' tokens.

        Returns:
            ``imitate/loss`` (nats per token), ``imitate/entropy``, ``imitate/grad_norm`` and
            ``imitate/learning_rate``.

        Raises:
            DataError: a demonstration without a trained piece or longer than the context.
        """
        assert self._imitation is not None, "this engine was made without ImitationOptions"
        self.policy.release()
        limit = self.policy.max_context_tokens
        samples = [demonstration_sample(d, self._tokenizer, limit) for d in demonstrations]
        weights = loss_weights(samples, "token_mean")
        sums = MetricSums()
        for batch in pack(samples, self._options.max_tokens):
            with attention(self._model, "graphpo_flat"):
                scores = score_tokens(self._model, batch, temperature=1.0)
                loss = -(self._at(batch, weights) * scores.logprobs).sum()
                loss.backward()
            sums.add_tokens(loss, entropy=scores.entropies)
        rate = self._imitation.rate(self._counters["imitation_steps"])
        self._counters["imitation_steps"] += 1
        sums.add_step(self._step(rate), rate)
        return sums.means("imitate")

    @property
    def model(self) -> PreTrainedModel:
        """The weights."""
        return self._model

    def save_model(self, directory: Path) -> None:
        """Write weights and tokenizer in the Hugging Face layout; whole or not at all.

        Raises:
            RunError: they cannot be written.
        """
        write_model(directory, self._model, self._tokenizer)

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, tokenizer, optimiser state and counters; whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        write_checkpoint(directory, self._model, self._tokenizer, self._optimizer, self._counters)

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, bit for bit.

        A reference model stays what it was when the engine was made.

        Raises:
            ModelError: no complete model is there.
            RunError: the optimiser state is missing or belongs to another model.
        """
        self.policy.release()
        self._counters = read_checkpoint(directory, self._model, self._optimizer)

    def _learn(
        self, batch: PackedBatch, data: _TokenData, options: UpdateOptions, sums: MetricSums
    ) -> None:
        """Add the gradient of one flat row of a minibatch."""
        with attention(self._model, "graphpo_flat"):
            scores = score_tokens(
                self._model,
                batch,
                options.temperature,
                entropy_gradient=options.objective.entropy != 0,
            )
            old = self._at(batch, data.old_logprobs)
            reference = data.reference_logprobs
            reference = None if reference is None else self._at(batch, reference)
            tokens = clipped_objective(
                scores.logprobs,
                old,
                self._at(batch, data.advantages),
                scores.entropies,
                reference,
                options.objective,
            )
            loss = (self._at(batch, data.weights) * tokens.loss).sum()
            loss.backward()
        logprobs = scores.logprobs.detach()
        values = {
            "entropy": scores.entropies,
            "kl": reverse_kl(old, logprobs),
            "clip_fraction": tokens.clipped.double().mean(0),
        }
        if reference is not None:
            values["reference_kl"] = reverse_kl(logprobs, reference)
        sums.add_tokens(loss, **values)

    def _step(self, learning_rate: float) -> float:
        """One optimiser step; returns the gradient's norm before clipping. Crashes on NaN."""
        norm = clip_grad_norm_(
            self._model.parameters(), self._options.max_grad_norm, error_if_nonfinite=True
        )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _old_logprobs(
        self, samples: Sequence[TrainingSample], options: UpdateOptions
    ) -> tuple[list[FloatArray], dict[str, float]]:
        """Per sample [tokens] log-probabilities under the policy that sampled, and the mismatch."""
        recorded = [sample.logprobs.astype(np.float64) for sample in samples]
        if options.old_logprobs == "rollout":
            for sample in samples:
                if np.isnan(sample.logprobs[sample.loss_mask]).any():
                    raise GraphError(
                        f"graph {sample.graph_id}: trained tokens without recorded logprobs; "
                        "set old_logprobs to recompute"
                    )
            return recorded, {}
        recomputed = self._logprobs(self._model, samples, options.temperature)
        trained = np.concatenate([sample.loss_mask for sample in samples])
        return recomputed, _mismatch(
            np.concatenate(recorded)[trained], np.concatenate(recomputed)[trained]
        )

    @torch.no_grad()
    def _logprobs(
        self, model: PreTrainedModel, samples: Sequence[TrainingSample], temperature: float
    ) -> list[FloatArray]:
        """Per sample [tokens]; NaN where not trained."""
        ends = np.cumsum([len(sample.token_ids) for sample in samples])
        result = np.full(ends[-1], np.nan)
        with attention(model, "graphpo_flat"):
            for batch in pack(samples, self._options.max_tokens):
                scores = score_tokens(model, batch, temperature)
                result[batch.source] = scores.logprobs.double().cpu().numpy()
        return np.split(result, ends[:-1])

    def _at(self, batch: PackedBatch, values: FloatArray) -> Tensor:
        """[…, M] values of the trained tokens of a row, out of [..., N] of all tokens."""
        dtype = torch.promote_types(self._model.dtype, torch.float32)
        picked = np.ascontiguousarray(values[..., batch.source])
        return torch.from_numpy(picked).to(self._model.device, dtype)


def _minibatches(count: int, step: int, options: UpdateOptions) -> Iterator[NDArray[np.int64]]:
    """Indices of the samples of each optimiser step; the order depends on (seed, step) only."""
    generator = np.random.default_rng([options.seed, step])
    for _ in range(options.epochs):
        order = generator.permutation(count)
        for start in range(0, count, options.minibatch_graphs):
            yield order[start : start + options.minibatch_graphs]


def _mismatch(recorded: FloatArray, recomputed: FloatArray) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, where both are known."""
    known = ~np.isnan(recorded)
    if not known.any():
        return {}
    log_ratio = (recomputed - recorded)[known]
    kl = np.exp(log_ratio) - 1.0 - log_ratio
    return {
        "update/mismatch": float(np.abs(log_ratio).mean()),
        "update/mismatch_kl": float(kl.mean()),
    }


def _adamw(model: PreTrainedModel, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=options.betas)
