"""Tiny random models of many families and a tiny trained tokenizer, in the Hugging Face layout."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<search>", "</search>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "who mentored karo venn in the year 1987, user assistant system search",
    "the mentor of karo venn was born in the city of orla in 1921",
    "1 + 1 = 2 ; 2 * 3 = 6 ; 12 - 4 = 8 .\nwhat is the answer to the question",
]

DELTA_NETS = ("qwen3_5", "qwen3_next", "olmo_hybrid")
"""Families with gated delta nets; the third's overwrite more than they hold, as beta is up to 2."""
_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

MAMBA = ("granitemoehybrid", "nemotron_h", "falcon_h1")
"""Families with Mamba-2 layers; the second counts what follows a layer as one of its own, in the
third they stand beside attention."""
CONVOLUTIONS = ("lfm2",)
"""Families with short convolutions."""
LINEAR = (*DELTA_NETS, *MAMBA, *CONVOLUTIONS)
"""Families with layers that have neither keys nor values."""
_LINEAR: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {"pad_token_id": None, "eos_token_id": None},  # beyond the vocabulary, if not
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
        "time_step_min": 1e-9,  # the plain way to compute it lets no step be shorter
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "pad_token_id": None,
        "lm_head_multiplier": 0.8,
        "embedding_multiplier": 1.5,
        "mlp_multipliers": [0.8, 0.7],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.85,
    },
}

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
WINDOW = 7
WINDOWED = ("mistral", "gemma3", "gpt_oss", "gemma4")
BOUNDED = ("gemma2",)
"""Families with a sliding window and bounded scores, which no kernel computes."""
"""Families with a sliding window of so many tokens: in every layer, and in one of two. The third
has attention sinks and experts as well; the last one's layers have keys of two sizes, or those of
an earlier layer."""
_GEMMA_4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 4,
    "final_logit_softcapping": 20.0,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,  # no experts
}
"""Keys and values are unpacked from one vector, keys of 12 numbers and values of 6."""
_GEMMA_2 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 20.0,
    "query_pre_attn_scalar": 8,
}
OWN = {"deepseek_v3": _LATENT, "granite": {"logits_scaling": 4.0}}
"""Families without windows that have something of their own."""


def long_rope(original: int) -> dict[str, Any]:
    """Positions that are turned another way beyond so many; for heads of 8 numbers."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": original,
    }


def save_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer with ChatML control tokens and agent tags that are plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def tiny_model(
    family: str, vocab_size: int, limit: int = 128, spread: float = 0.3
) -> PreTrainedModel:
    """A random float64 model; ``spread`` 0.3 makes its predictions far from uniform."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
        "gpt_oss": (GptOssConfig, GptOssForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
        "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
        "granite": (GraniteConfig, GraniteForCausalLM),
        "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
        "falcon_h1": (FalconH1Config, FalconH1ForCausalLM),
        "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
        "lfm2": (Lfm2Config, Lfm2ForCausalLM),
        "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM),
        "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
        "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    }[family]
    own: dict[str, Any] = OWN.get(family, {}) | _LINEAR.get(family, {})
    if family in DELTA_NETS:
        own |= _DELTA_NETS
    if family == "qwen3_next":
        own |= {"mlp_only_layers": [0, 1, 2]}  # no experts
    if family in (*WINDOWED, *BOUNDED):
        own |= {"sliding_window": WINDOW}
    if family in ("gemma3", "gpt_oss"):
        own |= {"layer_types": ["sliding_attention", "full_attention"]}
    if family == "gemma2":
        own |= _GEMMA_2
    if family == "gemma4":
        own |= _GEMMA_4 | {"vocab_size_per_layer_input": vocab_size}
    if family == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        own |= {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
        own |= {"intermediate_size": 64}  # of which 32 numbers go into a pack
    torch.manual_seed(0)
    common = {
        "vocab_size": vocab_size,
        "max_position_embeddings": limit,
        "initializer_range": spread,
        "tie_word_embeddings": family not in ("llama", "gpt_oss"),
    }
    config = config_class(**SIZES | common | own)
    model = model_class(config).double().eval()
    if family == "gpt_oss":
        model.set_experts_implementation("eager")  # others know no float64
    if family in MAMBA:
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                torch.nn.init.normal_(weight)  # as made, some states hardly change
    if family in BOUNDED:
        model.set_attn_implementation("precise")  # others cast scores down, or leave the bound out
    return model


def precise_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers computes it, with nothing cast down."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = (scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("precise", precise_attention)
AttentionMaskInterface.register("precise", eager_mask)


def with_vision(text: PreTrainedModel) -> PreTrainedModel:
    """A random float64 model of texts and images, its language model like the Qwen3.5 given."""
    sizes = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config=sizes | {"out_hidden_size": text.config.hidden_size},
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    return Qwen3_5ForConditionalGeneration(config).double().eval()
