"""Under autocast experts are multiplied by in bfloat16, as all other layers are."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.experts import has_experts
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.test_gradient import SAMPLES
from tests.engines.test_lora import experts

UPDATING = UpdateOptions(learning_rate=0.01, minibatch_graphs=2, seed=5)


class Grouped(TorchDispatchMode):
    """Notes the precisions of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if "grouped_mm" in str(func):
            self.kinds |= {each.dtype for each in args[:2]}
        return func(*args, **(kwargs or {}))


def make(family, make_model, tokenizer):
    if family in ("qwen3_moe", "mixtral"):
        return experts(family, tokenizer.vocab_size)
    model = make_model(family, spread=0.1).float()
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_autocast_rounds_experts(make_model, tokenizer, family, adapters, checkpoint_layers):
    losses = []
    for autocast in (False, True):
        model = make(family, make_model, tokenizer)
        layers = [module for module in model.modules() if has_experts(module)]
        if adapters:
            torch.manual_seed(1)
            model = add_adapters(model, LoraOptions(3, 6.0, None))
        own = dict(model.named_parameters())
        compute = ComputeOptions(autocast=autocast, checkpoint_layers=checkpoint_layers)
        engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING, compute=compute)
        wanted = {torch.bfloat16 if autocast else torch.float32}
        with Grouped() as sampling:
            request = SampleRequest(engine.policy.open((5, 9, 30)), 3, 12)
            complete(engine.policy, [request], SamplingParams())
        engine.policy.release()
        with Grouped() as updating:
            losses.append(engine.update(SAMPLES, 0))
        assert sampling.kinds == updating.kinds == wanted
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(model.get_parameter(name) is value for name, value in own.items())
        assert layers and not any("forward" in vars(layer) for layer in layers)
    assert losses[1]["update/entropy"] == pytest.approx(losses[0]["update/entropy"], rel=0.05)
