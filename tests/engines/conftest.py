import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.lfm2.modeling_lfm2 import Lfm2RMSNorm

from graphpo_agent.engines.tokenizer import HfTokenizer
from tests.engines.delta_nets import use_slow_delta_nets
from tests.engines.mamba import use_slow_mamba
from tests.engines.norms import norm_in_full_precision
from tests.engines.tiny import CONVOLUTIONS, DELTA_NETS, MAMBA, save_tokenizer, tiny_model


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> HfTokenizer:
    return HfTokenizer.load(str(tokenizer_dir))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda":  # what is equal to the bit on a CPU is so there as well
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


@pytest.fixture
def make_model(
    tokenizer: HfTokenizer, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PreTrainedModel]:
    """``make_model("qwen2", limit=128)``: a fresh model with the tokenizer's vocabulary.

    Its own linear attention layers, and the norms of such a model, cast nothing down.
    """

    def make(family: str = "qwen2", limit: int = 128, spread: float = 0.3) -> PreTrainedModel:
        if family in DELTA_NETS:
            use_slow_delta_nets(monkeypatch)
        if family in MAMBA:
            use_slow_mamba(monkeypatch)
        if family in CONVOLUTIONS:
            monkeypatch.setattr(Lfm2RMSNorm, "forward", norm_in_full_precision)
        return cast(Any, tiny_model(family, tokenizer.vocab_size, limit, spread)).to(device)

    return make


@pytest.fixture
def on_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy made from now on keeps its running rows on shelves, as on a GPU."""
    monkeypatch.setattr(
        "graphpo_agent.engines.local.sampler.pages_fit", lambda device, dtype: False
    )


@pytest.fixture(params=["where they fit", "shelves"])
def rows(request: pytest.FixtureRequest) -> str:
    """Both ways to keep the running continuations; on a GPU there is one."""
    if request.param == "shelves":
        request.getfixturevalue("on_shelves")
    return request.param
