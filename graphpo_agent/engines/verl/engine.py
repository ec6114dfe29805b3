"""verl's FSDP engine, in which the rows of a micro-batch share what they begin with alike.

Imported by verl's processes only, which find it by its vendor (``VERL_ENGINE_VENDOR``). verl's
engine loads, shards, steps and saves; what is ours is which rows are computed together and how a
model sees them: as the flat row that the local engine trains with (``engines.local.packing``).

Shapes: B rows, T tokens of all rows, joined, N tokens of the flat row, K targets, M trained tokens,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import sdpa_kernel
from transformers.modeling_outputs import CausalLMOutput
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.utils import postprocess_batch_func

from graphpo_agent.engines.local.arrays import ranges, to_device
from graphpo_agent.engines.local.checkpoint_weights import weights_as_saved
from graphpo_agent.engines.local.flat_attention import FlatLayouts
from graphpo_agent.engines.local.flat_recurrence import recurrence_of
from graphpo_agent.engines.local.forward import check_head, check_scores
from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.kernels import KERNELS
from graphpo_agent.engines.local.linear_attention import over_recurrence
from graphpo_agent.engines.local.lora import (
    LoraOptions,
    adapters_off,
    add_adapters,
    merged_weights,
    plain_model,
)
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.token_scores import logit_scores
from graphpo_agent.engines.verl.shared_rows import divided, flat_row, micro_batches
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["SharedPrefixEngine"]

_FLAT = "graphpo_flat"


_verl: Any = transformer_impl
_Base: Any = transformer_impl.FSDPEngineWithLMHead


@EngineRegistry.register(
    model_type="language_model", backend="fsdp2", device="cuda", vendor="graphpo"
)
class SharedPrefixEngine(_Base):
    """Computes each token behind the same text once per micro-batch.

    Log-probabilities and entropies are those of the tokens with loss; elsewhere they are 0.
    """

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Forward and, in training, backward passes over micro-batches of rows that begin alike.

        Every rank has as many of them.
        """
        rows = [row.cpu().numpy() for row in data["input_ids"].unbind()]
        batches = micro_batches(rows, int(data["max_token_len_per_gpu"]))
        count = torch.tensor(len(batches), device=get_device_id())
        most = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(count, op=most, group=self.get_data_parallel_group())
        batches = divided(batches, int(count))
        tu.assign_non_tensor(data, dp_size=self.get_data_parallel_size())
        outputs: list[Any] = []
        for number, members in enumerate(batches):
            batch = tu.index_select_tensor_dict(data, members)
            is_last = number + 1 == len(batches)
            context = (
                torch.no_grad()
                if forward_only
                else self._gradient_sync_context(is_last_micro_batch=is_last)
            )
            with context, sdpa_kernel(KERNELS), _over_flat_rows(self.module):
                loss, output = self.forward_step(batch, loss_function, forward_only)
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                    output.pop("model_output")
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=batches, data=data)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], PackedBatch]:
        """The flat row of a micro-batch for the model, and what its logits are of."""
        return self._flat_inputs(*_joined(micro_batch))

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: PackedBatch,
        micro_batch: Any,
        logits_processor_func: object,
    ) -> dict[str, Tensor]:
        """Log-probabilities and, where asked for, entropies, each at the place before its token."""
        del logits_processor_func
        packed, ids = output_args, micro_batch["input_ids"]
        device = ids.device
        target_of = to_device(packed.target_of, device)
        before = to_device(packed.source - 1, device)

        def placed(of_targets: Tensor) -> Tensor:
            of_trained = of_targets.index_select(0, target_of)
            everywhere = of_targets.new_zeros(len(ids.values())).index_copy(0, before, of_trained)
            return torch.nested.nested_tensor_from_jagged(everywhere, ids.offsets())

        logits = output.logits[0]  # [K, V]
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor):  # of each row, and one for all in our runs
            temperature = temperature.flatten()[0]
        wants_entropy = tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False)
        targets = to_device(packed.target_ids, device)
        # verl's own stay in the logits' precision, and may go through them one by one.
        logprobs, entropies = logit_scores(logits, targets, float(temperature), bool(wants_entropy))
        outputs = {"entropy": placed(entropies)} if wants_entropy else {}
        return outputs | {"log_probs": placed(logprobs)}

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        """Loss and outputs of one micro-batch, and how many tokens it computed."""
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if loss_function is not None:
            output["metrics"]["computed_tokens"] = Metric(AggregationType.SUM, self._computed)
        return loss, output

    def get_per_tensor_param(self, **named: Any) -> tuple[Any, Any]:
        """The weights that the servers draw with, one by one, adapters added to them."""
        return weights_as_saved(self.module, _whole), None

    def save_checkpoint(self, local_path: str, *arguments: Any, **named: Any) -> None:
        """As verl does; of a model with adapters also the model that they make."""
        super().save_checkpoint(local_path, *arguments, **named)
        if not self._is_lora:
            return
        first = torch.distributed.get_rank() == 0
        merged = ((name, _whole(weight)) for name, weight in merged_weights(self.module))
        weights = {name: weight.cpu() for name, weight in merged if first}
        if first:
            plain = plain_model(self._model_class, self.module, weights)
            plain.save_pretrained(f"{local_path}/huggingface")
        torch.distributed.barrier()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """The model without its adapters inside the ``with`` block."""
        return adapters_off(self.module)

    def _build_lora_module(self, module: Any) -> Any:
        """Adapters inside the same model, as the local engine has them."""
        own, names = self.model_config, self.model_config.target_modules
        targets = None if isinstance(names, str) else tuple(names)
        return add_adapters(module, LoraOptions(own.lora_rank, own.lora_alpha, targets))

    def _build_module(self) -> Any:
        """The model as transformers has it.

        verl's passes in their place would not hand on to all layers what these need to know.
        """
        patch = _verl.apply_monkey_patch
        _verl.apply_monkey_patch = lambda **_: None
        try:
            module = super()._build_module()
        finally:
            _verl.apply_monkey_patch = patch
        self._model_class = type(module)
        return module

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        self._check()

    def _flat_inputs(
        self, token_ids: IntArray, offsets: IntArray, trained: BoolArray
    ) -> tuple[dict[str, Any], PackedBatch]:
        """For [T] tokens of rows; see ``flat_row``."""
        packed = flat_row(token_ids, offsets, trained)
        self._computed = len(packed.token_ids)
        device = torch.device(get_device_id())
        config = self.module.config.get_text_config()
        inputs = {
            "input_ids": to_device(packed.token_ids, device)[None],
            "position_ids": to_device(packed.position_ids, device)[None],
            "attention_mask": None,
            "logits_to_keep": to_device(packed.predictors, device),
            "flat_layouts": FlatLayouts(config, packed, self._autocast_dtype, device),
            "recurrence": recurrence_of(self.module, packed, device),
        }
        return inputs, packed

    @torch.no_grad()
    def _check(self) -> None:
        """Raise ModelError unless a flat row gives what the model itself gives."""
        vocabulary = self.module.config.get_text_config().vocab_size
        token_ids = np.array([0, 1, 2, 3, 4, 0, 1, 2, 5, 6]) % vocabulary
        rows = to_device(token_ids.reshape(2, 5), torch.device(get_device_id()))
        trained = np.tile(np.arange(5) >= 3, 2)
        half = self._autocast_dtype != torch.float32
        with torch.autocast(rows.device.type, self._autocast_dtype, enabled=half):
            self.module.set_attn_implementation("eager")
            logits = self.module(input_ids=rows, use_cache=False).logits
            dtype = check_head(
                self.module, lambda: self.module(input_ids=rows, use_cache=False).logits
            )
            self.module.set_attn_implementation(_FLAT)
            inputs, packed = self._flat_inputs(token_ids, np.array([0, 5, 10]), trained)
            with _over_flat_rows(self.module):
                of_targets = self.module(**inputs, use_cache=False).logits[0]
        inputs["flat_layouts"].check()
        targets, target_of = (
            to_device(array, rows.device) for array in (packed.target_ids, packed.target_of)
        )
        flat = of_targets.float().log_softmax(-1).gather(1, targets[:, None])[target_of, 0]
        check_scores(self.module, flat, rows, logits, dtype)


def _whole(weight: Tensor) -> Tensor:
    """On this rank's device; every rank asks for it."""
    own = weight.to(torch.device(get_device_id()))
    return own.full_tensor() if isinstance(own, DTensor) else own


@contextmanager
def _over_flat_rows(module: Any) -> Iterator[None]:
    """Inside the ``with`` block a model computes flat rows, of its language model alone.

    Where it takes images as well, verl's own pass would compute that part of it, too, and the
    logits of every token.
    """
    takes_images = module.config.get_text_config() is not module.config
    if takes_images:
        module.forward = partial(_of_text, module)
    try:
        with over_recurrence(module):
            yield
    finally:
        if takes_images:
            del module.forward


def _of_text(module: Any, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
    """The logits of some tokens of a flat row."""
    hidden = module.get_decoder()(**inputs).last_hidden_state[:, logits_to_keep]
    head: Any = output_head(module)
    return CausalLMOutput(logits=head.logits(head.layer(hidden)))


def _joined(micro_batch: Any) -> tuple[IntArray, IntArray, BoolArray]:
    """[T] tokens, [B + 1] where the rows begin, and [T] which tokens have loss."""
    ids, mask = micro_batch["input_ids"], micro_batch["loss_mask"]
    offsets = ids.offsets().cpu().numpy()
    responses = mask.offsets().diff().cpu().numpy()
    own = np.repeat(offsets[1:] - responses, responses) + ranges(responses)
    trained = np.zeros(offsets[-1], np.bool_)
    trained[own] = mask.values().bool().cpu().numpy()
    if not trained.any():  # an empty row's pass is shared by all ranks; its loss is masked
        trained[1] = True
    return ids.values().cpu().numpy(), offsets, trained
