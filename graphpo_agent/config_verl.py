"""What a run through verl can be told beside what every run can."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from graphpo_agent.config_base import Gibibytes, Number, Positive, Size, Strict

__all__ = ["VerlEngineConfig"]


def _may_be_a_cluster(address: str) -> str:
    if address != "auto" and not re.fullmatch(r"\S+:\d+", address):
        raise ValueError("Input should be auto or host:port")
    return address


class VerlEngineConfig(Strict):
    """verl trains, on Ray: FSDP2 workers that update, vLLM servers that sample (docs/verl.md)."""

    kind: Literal["verl"]
    nodes: Positive = 1
    gpus_per_node: Positive = 8
    """On a CPU: processes that share the update."""
    tensor_parallel: Positive = 1
    """GPUs that hold one copy of the model while it samples."""
    max_context_tokens: Positive
    """No context grows longer, so a long prompt leaves less than ``mode.max_response_tokens``."""
    max_sequences: Positive = 256
    """Continuations that one server decodes together; others wait."""
    gpu_memory_utilization: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """Share of a GPU for vLLM's weights, keys and values while it samples."""
    kv_cache_gib: Gibibytes = 1.0
    """Memory of a server for keys and values on a CPU; rounded, at least 1."""
    grower_processes: Positive = 8
    """Each has tools, embedder and verifier of its own and grows its share of a step's graphs."""
    share_prefixes: bool = True
    """The update computes what rows begin with alike once; off: as verl does, row by row."""
    ray_address: Annotated[str, AfterValidator(_may_be_a_cluster)] | None = None
    """A Ray cluster that runs, ``auto`` or its address; None: one is started on this machine."""
    patience_minutes: Size = 120.0
    """A run in which no step ends for so long is ended."""
    overrides: tuple[str, ...] = ()
    """Settings of verl's own, applied last, e.g. ``[actor_rollout_ref.nccl_timeout=1200]``."""
