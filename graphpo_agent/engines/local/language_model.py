"""The part of a model that turns tokens into hidden states, whatever else the model takes."""

from typing import Any

from transformers import PreTrainedModel

from graphpo_agent.errors import ModelError

__all__ = ["freeze_other_parts", "language_model", "parts_beside"]


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """A causal LM's layers, or those of the language model of one that takes images as well.

    Raises:
        ModelError: the model does not tell them.
    """
    takes_more = model.config.get_text_config() is not model.config
    layers: Any = model.get_decoder() if takes_more else model.base_model
    if layers is model:
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) does not tell its layers from "
            "its output head; use another model family"
        )
    return layers


def parts_beside(model: PreTrainedModel) -> list[str]:
    """Names of the modules that text never reaches, such as those for images."""
    reached = {*language_model(model).modules(), model.get_output_embeddings()}
    above = {m for m in model.modules() if reached & set(m.modules())}
    return [name for name, module in model.named_modules() if module not in reached | above]


def freeze_other_parts(model: PreTrainedModel) -> None:
    """Only what text reaches is trained."""
    for name in parts_beside(model):
        model.get_submodule(name).requires_grad_(False)
