"""vLLM as the sampler of a run: the same policy, continuations and random numbers, faster decoding.

vLLM runs inside this process, so that one ``advance`` is one step of its engine, and the learner's
weights reach it without a file between.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from graphpo_agent.engines.local.adapter_files import under_adapters
from graphpo_agent.engines.local.attention import eager_attention
from graphpo_agent.engines.local.checkpoint_weights import weights_as_saved
from graphpo_agent.engines.local.drawing import StopFinder, check_finite
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.lora import has_adapters
from graphpo_agent.engines.local.model import computable, load_model
from graphpo_agent.engines.vllm_start import VllmOptions, start_vllm
from graphpo_agent.errors import ConfigError, first_line
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import (
    Completion,
    Context,
    Demonstration,
    SampleRequest,
    SamplingParams,
)

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.logprobs import Logprob

__all__ = ["VllmContext", "VllmEngine", "VllmPolicy"]

_HEAD = "lm_head"
_COMPARED_TOKENS = 16
_ROUNDING_32, _ROUNDING_16 = 0.01, 0.3
"""Mean distance of log-probabilities that rounding explains, where vLLM has 32 or 16 bits."""


@dataclass(frozen=True, slots=True)
class VllmContext:
    """A prefix as its token ids. ``generation`` is one object per policy and release.

    Example: ``VllmContext(token_ids=(5, 9, 30), generation=…)``
    """

    token_ids: tuple[int, ...]
    generation: object

    @property
    def num_tokens(self) -> int:
        """Tokens from the start of the prompt to here."""
        return len(self.token_ids)


@dataclass(slots=True)
class _Continuation:
    """One request under way, and what it has drawn so far."""

    ticket: int
    context: VllmContext
    stop: tuple[str, ...]
    min_new_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


class VllmPolicy:
    """A model in vLLM as a sampler (``graphpo_agent.protocols.Policy``).

    Given the same weights and seeds it draws the tokens that ``LocalPolicy`` draws, but for what
    rounding changes.

    Example::

        policy = VllmPolicy("runs/kb/policy", tokenizer, VllmOptions())
        prompt = policy.open(tokenizer.encode("1 + 1 ="))
        policy.submit(SampleRequest(prompt, seed=0, max_new_tokens=8), SamplingParams())
        while not (ended := policy.advance()):
            pass
        ((ticket, completion),) = ended

    Attributes:
        tokenizer: as given.
        max_context_tokens: no context grows longer than this.
        dtype: of vLLM's weights.
    """

    def __init__(self, model_name: str, tokenizer: Tokenizer, options: VllmOptions) -> None:
        """Start vLLM with the weights of a directory or hub model; adapters are merged into them.

        Raises:
            ConfigError: vLLM is not installed, or refuses the model, the options or the machine.
            ModelError: adapters cannot be merged, or the model that they belong to is not there.
            RunError: adapters are missing, damaged or belong to another model.
        """
        whole, adapters = under_adapters(model_name)
        self._engine = start_vllm(whole, options)
        model = self._engine.model_config
        self.tokenizer = tokenizer
        self.max_context_tokens = model.max_model_len
        self.dtype = cast(torch.dtype, model.dtype)
        self._stops = StopFinder(tokenizer, model.get_vocab_size())
        self._eager = model.enforce_eager
        self._generation = object()
        self._running: dict[str, _Continuation] = {}
        self._ended: list[tuple[int, Completion]] = []
        self._tickets = self._prefilled_tokens = 0
        (self._tied,) = self._engine.apply_model(_tied_to_head)
        if adapters:
            merged = load_model(model_name, getattr(torch, options.dtype))
            self.load_weights(weights_as_saved(merged))

    def open(self, token_ids: Sequence[int]) -> VllmContext:
        """A context that holds a prompt."""
        if not len(token_ids):
            raise ValueError("a prompt needs at least one token")
        return VllmContext(tuple(map(int, token_ids)), self._generation)

    def extend(self, context: Context, token_ids: Sequence[int]) -> VllmContext:
        """``context`` followed by tokens that the policy did not sample."""
        before = self._own(context)
        return VllmContext((*before.token_ids, *map(int, token_ids)), self._generation)

    def cut(self, context: Context, num_tokens: int, last: int) -> VllmContext:
        """The first tokens of a context."""
        token_ids = self._own(context).token_ids[:num_tokens]
        assert token_ids[-1] == last
        return VllmContext(token_ids, self._generation)

    def submit(self, request: SampleRequest, sampling: SamplingParams) -> int:
        """Queue one continuation and return its ticket; nothing is computed yet."""
        from graphpo_agent.engines.vllm_drawing import drawing_params

        context = self._own(request.context)
        self._tickets += 1
        room = min(request.max_new_tokens, self.max_context_tokens - context.num_tokens)
        if room <= 0:
            self._ended.append((self._tickets, Completion((), (), "length", context)))
            return self._tickets
        params = drawing_params(request.seed, sampling, room, self.tokenizer.eos_ids)
        name = str(self._tickets)
        # Noted first, so that ``release`` knows of what an interrupt leaves half submitted.
        self._running[name] = _Continuation(
            self._tickets, context, request.stop, request.min_new_tokens
        )
        self._engine.add_request(name, {"prompt_token_ids": list(context.token_ids)}, params)
        return self._tickets

    def advance(self) -> list[tuple[int, Completion]]:
        """One step of vLLM: one more token of what runs, or a piece of prompt; what ended."""
        if self._running:
            with self._uncompiled():
                outputs = self._engine.step()
            for output in outputs:
                self._record(cast("RequestOutput", output))
        ended, self._ended = self._ended, []
        return ended

    def take_prefilled_tokens(self) -> int:
        """Prompt and observation tokens computed since the last call.

        vLLM keeps whole blocks of a prefix: up to ``block_size`` tokens at its end are computed
        again, sampled ones among them, and are counted.
        """
        count, self._prefilled_tokens = self._prefilled_tokens, 0
        return count

    def release(self) -> None:
        """Forget every context, unfinished continuation and cached prefix."""
        with self._uncompiled():  # the end of a step that was interrupted; else it does nothing
            self._engine.collective_rpc("sample_tokens", args=(None,))
        self._engine.abort_request(list(self._running))
        self._running, self._ended = {}, []
        self._generation = object()
        emptied = self._engine.reset_prefix_cache()
        assert emptied, "nothing runs any more"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights over; every context is released.

        Args:
            weights: all of them, by their names in the Hugging Face layout.
        """
        self.release()
        try:
            self._reload(weights)
        except BaseException:
            self._reload(())  # or vLLM would take the next weights for the rest of these
            raise
        if self._tied is not None:
            place, source = self._tied
            self._engine.apply_model(partial(_renew_head, place=place, source=source))

    def _reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _own(self, context: Context) -> VllmContext:
        if not isinstance(context, VllmContext) or context.generation is not self._generation:
            raise ValueError("this context was made by another policy or has been released")
        return context

    def _uncompiled(self) -> AbstractContextManager[object]:
        """Without compiling, vLLM's few compiled helpers cost no half minute and no compiler."""
        return torch.compiler.set_stance("force_eager") if self._eager else nullcontext()

    def _record(self, output: "RequestOutput") -> None:
        """Take the new tokens of one request, and end it where they end it."""
        row = self._running[output.request_id]
        if not row.token_ids:
            cached = output.num_cached_tokens or 0
            self._prefilled_tokens += row.context.num_tokens - cached
        (new,) = output.outputs
        row.token_ids += new.token_ids
        logprobs = cast("list[dict[int, Logprob]]", new.logprobs)
        row.logprobs += [
            values[token_id].logprob
            for token_id, values in zip(new.token_ids, logprobs, strict=True)
        ]
        check_finite(row.logprobs[-1], self._engine.model_config.model)
        reason = self._stops.ends(row.token_ids, row.stop, row.min_new_tokens)
        reason = reason or ("length" if output.finished else None)
        if reason is None:
            return
        if not output.finished:
            self._engine.abort_request([output.request_id])
        del self._running[output.request_id]
        token_ids = tuple(row.token_ids)
        after = VllmContext(row.context.token_ids + token_ids, self._generation)
        completion = Completion(token_ids, tuple(row.logprobs), reason, after)
        self._ended.append((row.ticket, completion))


class VllmEngine:
    """A local learner whose policy samples through vLLM (``graphpo_agent.protocols.Engine``).

    Attributes:
        policy: vLLM, which has the learner's weights whenever it samples.
    """

    def __init__(self, learner: LocalEngine, policy: VllmPolicy) -> None:
        """Args: the learner, and vLLM started with the learner's weights.

        Raises:
            ConfigError: vLLM does not take the learner's weights, or computes something else.
        """
        self.policy = policy
        self._learner = learner
        self._share_class(type(learner.model.base_model))
        self._check_agreement()

    def _share_class(self, model_class: Any) -> None:
        """Let the learner use transformers' class, which vLLM wraps where it has none of its own.

        Calls then ask whether they are compiled, and no further model of it can be made.
        """
        if not hasattr(model_class, "aot_compile"):
            return
        if has_adapters(self._learner.model):
            raise ConfigError(
                f"model.lora needs a class of vllm's own for {self._learner.model.name_or_path}, "
                "which it does not have; use engine.kind=local"
            )
        model_class.do_not_compile = True

    def _check_agreement(self) -> None:
        """Compare with other weights than vLLM has loaded: it keeps those that it does not take."""
        name = self._learner.model.name_or_path
        other = "use engine.kind=local"
        try:
            with _other_weights(self._learner.model):
                self._publish()
                distance = self._distance(self.policy.tokenizer.encode("1 + 1 = 2"))
            self._publish()
        except (KeyError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"vllm does not take the weights of {name} over: {first_line(error)}; {other}"
            ) from error
        if distance > (_ROUNDING_32 if self.policy.dtype == torch.float32 else _ROUNDING_16):
            raise ConfigError(
                f"vllm computes other log-probabilities for {name} than transformers, by "
                f"{distance:.2g} on average, or does not take all weights over: it would sample "
                f"from another policy than is trained; {other}"
            )

    def _distance(self, prompt: Sequence[int]) -> float:
        """Mean of a continuation's log-probabilities' distance from those of the learner."""
        request = SampleRequest(self.policy.open(prompt), seed=0, max_new_tokens=_COMPARED_TOKENS)
        (drawn,) = complete(self.policy, [request], SamplingParams())
        self.policy.release()
        self.policy.take_prefilled_tokens()
        model = self._learner.model
        tokens = torch.tensor([[*prompt, *drawn.token_ids]], device=model.device)
        with torch.no_grad(), computable(model), eager_attention(model):
            logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = logits.float().log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        return float((own.cpu() - torch.tensor(drawn.logprobs)).abs().mean())

    def update(
        self,
        samples: Sequence[TrainingSample],
        step: int,
        learned: Callable[[float], object] = lambda share: None,
    ) -> dict[str, float]:
        """One PPO update (Algorithm 1, stage 4); see ``LocalEngine.update``."""
        metrics = self._learner.update(samples, step, learned)
        self._publish()
        return metrics

    def imitate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One supervised step; see ``LocalEngine.imitate``."""
        metrics = self._learner.imitate(demonstrations)
        self._publish()
        return metrics

    def save_model(self, directory: Path) -> None:
        """Write weights and tokenizer in the Hugging Face layout; see ``LocalEngine``."""
        self._learner.save_model(directory)

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights, tokenizer and optimiser state; see ``LocalEngine``."""
        self._learner.save_checkpoint(directory)

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote; see ``LocalEngine``."""
        self._learner.load_checkpoint(directory)
        self._publish()

    def _publish(self) -> None:
        """Give the learner's weights to the policy."""
        self.policy.load_weights(weights_as_saved(self._learner.model))


@contextmanager
def _other_weights(model: nn.Module) -> Iterator[None]:
    """All weights move up by one column inside the ``with`` block, to the bit back behind it."""

    def move(columns: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.roll(columns, -1))

    move(1)
    try:
        yield
    finally:
        move(-1)


def _tied_to_head(model: nn.Module) -> tuple[str, str] | None:
    """The output head of vLLM's model and the weights that it shares with others; None: none.

    Example: ``("language_model.lm_head", "language_model.model.embed_tokens.weight")``
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    places = (name for name, _ in model.named_modules() if name.rpartition(".")[2] == _HEAD)
    for place in places:
        own = f"{place}.weight"
        shared = [n for n, w in weights.items() if w is weights.get(own) and n != own]
        if shared:
            return place, shared[0]
    return None


def _renew_head(model: nn.Module, place: str, source: str) -> None:
    """Give a tied head the weights that it shares: vLLM skips it, and has packed it on a CPU."""
    head: Any = model.get_submodule(place)
    head.weight.data.copy_(model.get_parameter(source).data)
    head.quant_method.process_weights_after_loading(head)
