"""One machine's engine: samples with the weights and learns them (Algorithm 1, stage 4)."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.checkpoint import read_checkpoint, write_checkpoint, write_model
from graphpo_agent.engines.local.demonstrations import (
    check_demonstrations,
    demonstration_sample,
)
from graphpo_agent.engines.local.forward import check_flat_layout, flat_passes, score_tokens
from graphpo_agent.engines.local.lora import adapters_off, has_adapters
from graphpo_agent.engines.local.loss import clipped_objective, mismatch_weights, reverse_kl
from graphpo_agent.engines.local.metrics import MetricSums, mismatch
from graphpo_agent.engines.local.model import check_vocabulary
from graphpo_agent.engines.local.optimizer import make_adamw, optimizer_step, state_on_device
from graphpo_agent.engines.local.options import (
    ComputeOptions,
    ImitationOptions,
    OptimizerOptions,
    UpdateOptions,
)
from graphpo_agent.engines.local.out_of_memory import within_memory
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.local.token_data import (
    TokenData,
    moving_sample,
    recorded_logprobs,
    token_data,
)
from graphpo_agent.engines.local.token_weights import token_weights
from graphpo_agent.engines.minibatches import minibatches
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.graph.arrays import FloatArray, IntArray
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.types import Demonstration

__all__ = ["LocalEngine"]


class LocalEngine:
    """The weights, as sampler and learner (``graphpo_agent.protocols.Engine``).

    The model stays in evaluation mode. Only weights that require a gradient are trained. A
    reference model is kept only if the objective has a KL term: a copy of the weights given here,
    or, where adapters are trained, the same model without them.

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
        compute: ComputeOptions | None = None,
    ) -> None:
        """Take the weights over.

        Args:
            model: trained in place.
            tokenizer: the model's.
            optimizer: of every step.
            updating: how ``update`` learns; None for an engine that only imitates.
            imitation: how ``imitate`` learns; None for an engine that only updates.
            max_batch_bytes: as ``LocalPolicy``'s.
            compute: how forward and backward passes are computed; None for the defaults.

        Raises:
            ModelError: the tokenizer does not fit, or the flat layout cannot express the model.
        """
        check_vocabulary(model, tokenizer)
        self._compute = compute or ComputeOptions()
        check_flat_layout(model, self._compute)
        self.policy = LocalPolicy(model, tokenizer, max_batch_bytes, self._compute.autocast)
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._options = optimizer
        self._updating = updating
        self._imitation = imitation
        self._optimizer = make_adamw(model, optimizer)
        self._counters = {"update_steps": 0, "imitation_steps": 0}
        self._has_kl = updating is not None and updating.objective.kl > 0
        copied = self._has_kl and not has_adapters(model)
        self._reference = copy.deepcopy(model).requires_grad_(False) if copied else None

    @within_memory(
        "the update",
        "lower update.max_tokens_per_batch, or set update.gradient_checkpointing, "
        "update.offload_optimizer or model.lora",
    )
    def update(
        self,
        samples: Sequence[TrainingSample],
        step: int,
        learned: Callable[[float], object] = lambda share: None,
    ) -> dict[str, float]:
        """One PPO update from the graphs of one batch.

        Every context of the policy is released. Samples without a trained token are left out, and
        tokens without an advantage are computed only where the objective or a later token needs
        them.

        Args:
            samples: the graphs.
            step: of the run; with the options' seed it decides how they are dealt out.
            learned: told the share of the update that is done, after every flat row.

        Returns:
            ``update/loss`` and means over the tokens that have a gradient, left out where none has:
            ``update/entropy`` (nats), ``update/kl`` (k3 estimate of the divergence from the policy
            that sampled), ``update/reference_kl`` (with a reference model),
            ``update/clip_fraction`` (some of whose gradient is cut) and ``update/mismatch_capped``
            (whose weight is the cap); ``update/grad_norm`` (before clipping),
            ``update/learning_rate``, ``update/optimizer_steps``; of log-probabilities recorded and
            recomputed ``update/mismatch`` (mean distance) and ``update/mismatch_kl`` (k3).

        Raises:
            GraphError: log-probabilities of the rollout are asked for and missing.
            ModelError: memory ran out.
        """
        options = self._updating
        assert options is not None, "this engine was made without UpdateOptions"
        self._begin()
        trained = [sample for sample in samples if sample.loss_mask.any()]
        if not trained:
            return {}
        graphs, seed = options.minibatch_graphs, options.seed
        plan = list(minibatches(len(trained), graphs, seed, step, options.epochs))
        recompute = options.old_logprobs == "recompute"
        computed = trained if options.objective.moves_all else [moving_sample(s) for s in trained]
        old = self._old_logprobs(computed, plan[0]) if recompute else recorded_logprobs(computed)
        reference = self._reference_logprobs(computed) if self._has_kl else None
        sums = MetricSums()
        with state_on_device(self._optimizer, self._options.offload):
            for number, members in enumerate(plan):
                first = recompute and number == 0
                data = token_data(members, trained, None if first else old, reference, options)
                logprobs = self._learn(
                    [computed[i] for i in members],
                    data,
                    options,
                    sums,
                    lambda share, done=number: learned((done + share) / len(plan)),
                )
                if first:
                    for i, values in zip(members, logprobs, strict=True):
                        old[i] = values
                self._step(options, "update_steps", sums)
        metrics = {"update/optimizer_steps": float(len(plan)), **sums.means("update")}
        return metrics | (_mismatch(computed, old) if recompute else {})

    def check_demonstrations(self, demonstrations: Sequence[Demonstration]) -> None:
        """Raise DataError where ``imitate`` would, for any of all that are to be learned."""
        check_demonstrations(demonstrations, self._tokenizer, self.policy.max_context_tokens)

    @within_memory("a step", "lower max_tokens_per_batch or batch_size, or set model.lora")
    def imitate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One supervised step: mean negative log-likelihood of the trained pieces' tokens.

        Returns:
            ``imitate/loss`` (nats per token), ``imitate/entropy``, ``imitate/grad_norm`` and
            ``imitate/learning_rate``.

        Raises:
            DataError: a demonstration without prompt or trained piece, or longer than the context.
            ModelError: memory ran out.
        """
        assert self._imitation is not None, "this engine was made without ImitationOptions"
        self._begin()
        limit = self.policy.max_context_tokens
        samples = [demonstration_sample(d, self._tokenizer, limit) for d in demonstrations]
        weights = token_weights(samples, "token_mean").weights
        sums = MetricSums()
        with flat_passes(self._model, self._compute):
            for batch in pack(samples, self._options.max_tokens):
                scores = score_tokens(self._model, batch, 1.0, self._compute)
                loss = -(self._at(batch, weights) * scores.logprobs).sum()
                loss.backward()
                sums.add_tokens(loss, entropy=scores.entropies)
        with state_on_device(self._optimizer, self._options.offload):
            self._step(self._imitation, "imitation_steps", sums)
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
        self.policy.rest()
        write_model(directory, self._model, self._tokenizer)

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, tokenizer, optimiser state and counters; whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        self.policy.rest()
        write_checkpoint(directory, self._model, self._tokenizer, self._optimizer, self._counters)

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, bit for bit.

        A reference model stays what it was when the engine was made.

        Raises:
            ModelError: no complete model is there.
            RunError: the optimiser state is missing, damaged or belongs to another model.
        """
        self.policy.release()
        self._counters = read_checkpoint(directory, self._model, self._optimizer, self._counters)

    def _begin(self) -> None:
        """Free what the sampler holds, and the gradients of a step that did not come to its end."""
        self.policy.release()
        self._optimizer.zero_grad(set_to_none=True)

    def _step(
        self, options: UpdateOptions | ImitationOptions, counter: str, sums: MetricSums
    ) -> None:
        """One optimiser step, at the rate that ``options`` give after as many as were counted."""
        rate = options.rate(self._counters[counter])
        self._counters[counter] += 1
        norm = optimizer_step(self._optimizer, rate, self._options.max_grad_norm)
        sums.add_step(norm, rate)

    def _learn(
        self,
        samples: Sequence[TrainingSample],
        data: TokenData,
        options: UpdateOptions,
        sums: MetricSums,
        learned: Callable[[float], object],
    ) -> list[FloatArray]:
        """Compute the gradient of one minibatch; ``learned`` is told the share that is done.

        Returns:
            Per sample [tokens] the log-probabilities of the policy; NaN where not trained.
        """
        logprobs = np.full(sum(len(sample.token_ids) for sample in samples), np.nan)
        with flat_passes(self._model, self._compute):
            batches = pack(samples, self._options.max_tokens)
            for done, batch in enumerate(batches, 1):
                logprobs[batch.source] = self._learn_row(batch, data, options, sums)
                learned(done / len(batches))
        return _split(logprobs, samples)

    def _learn_row(
        self, batch: PackedBatch, data: TokenData, options: UpdateOptions, sums: MetricSums
    ) -> FloatArray:
        """Add the gradient of one flat row; returns the [M] log-probabilities."""
        objective = options.objective
        scores = score_tokens(
            self._model, batch, options.temperature, self._compute, objective.entropy != 0
        )
        logprobs = scores.logprobs.detach()
        old = logprobs if data.old_logprobs is None else self._at(batch, data.old_logprobs)
        reference = data.reference_logprobs
        reference = None if reference is None else self._at(batch, reference)
        advantages = self._at(batch, data.loss.advantages)
        values: dict[str, Tensor] = {}
        if data.sampler_logprobs is not None and (cap := options.mismatch_cap):
            counted = mismatch_weights(old, self._at(batch, data.sampler_logprobs), cap)
            advantages = advantages * counted
            values["mismatch_capped"] = (counted >= cap).double()
        tokens = clipped_objective(
            scores.logprobs,
            old,
            advantages,
            scores.entropies,
            reference,
            objective,
        )
        loss = (self._at(batch, data.loss.weights) * tokens.loss).sum()
        loss.backward()
        values |= {
            "entropy": scores.entropies,
            "kl": reverse_kl(old, logprobs),
            "clip_fraction": tokens.clipped.any(0).double(),
        }
        if reference is not None:
            values["reference_kl"] = reverse_kl(logprobs, reference)
        sums.add_tokens(loss, **values)
        return logprobs.double().cpu().numpy()

    def _old_logprobs(self, samples: Sequence[TrainingSample], first: IntArray) -> list[FloatArray]:
        """Per sample [tokens] log-probabilities of the policy as it is now.

        Those of the ``first`` minibatch are NaN: its own forward pass gives them.
        """
        assert self._updating is not None
        later = sorted(set(range(len(samples))) - set(first.tolist()))
        result = [np.full(len(sample.token_ids), np.nan) for sample in samples]
        scored = self._logprobs(self._model, [samples[i] for i in later])
        for i, values in zip(later, scored, strict=True):
            result[i] = values
        return result

    def _reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Per sample [tokens] log-probabilities of the reference model."""
        if self._reference is not None:
            return self._logprobs(self._reference, samples)
        with adapters_off(self._model):
            return self._logprobs(self._model, samples)

    @torch.no_grad()
    def _logprobs(
        self, model: PreTrainedModel, samples: Sequence[TrainingSample]
    ) -> list[FloatArray]:
        """Per sample [tokens]; NaN where not trained."""
        assert self._updating is not None
        result = np.full(sum(len(sample.token_ids) for sample in samples), np.nan)
        with flat_passes(model, self._compute):
            for batch in pack(samples, self._options.max_tokens):
                scores = score_tokens(model, batch, self._updating.temperature, self._compute)
                result[batch.source] = scores.logprobs.double().cpu().numpy()
        return _split(result, samples)

    def _at(self, batch: PackedBatch, values: FloatArray) -> Tensor:
        """[…, M] values of the trained tokens of a row, out of [..., N] of all tokens."""
        dtype = torch.promote_types(self._model.dtype, torch.float32)
        picked = np.ascontiguousarray(values[..., batch.source])
        return torch.from_numpy(picked).to(self._model.device, dtype)


def _mismatch(
    samples: Sequence[TrainingSample], recomputed: Sequence[FloatArray]
) -> dict[str, float]:
    """``mismatch`` of the trained tokens of all samples."""
    trained = [
        (sample.logprobs[sample.loss_mask], values[sample.loss_mask])
        for sample, values in zip(samples, recomputed, strict=True)
    ]
    recorded, ours = (np.concatenate(parts) for parts in zip(*trained, strict=True))
    return mismatch(recorded, ours)


def _split(values: FloatArray, samples: Sequence[TrainingSample]) -> list[FloatArray]:
    """Per sample its [tokens] of the values of all."""
    sizes = [len(sample.token_ids) for sample in samples]
    ends = np.cumsum(sizes)
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
