"""Turns that a vLLM server of verl's draws; ``test_server.py`` runs it as a program.

    python -m tests.engines.verl.server_turns MODEL OUT

They are written as a pickle.
"""

import asyncio
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerManager

from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.engines.local.model import model_config
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.launch import compose, environment, runtime_environment
from graphpo_agent.engines.verl.policy import Drawn, ServerPolicy
from graphpo_agent.engines.verl.settings import verl_settings
from tests.engines.turns import draw_turns
from tests.worlds import ROOT

LIMIT = 128
ENGINE = f"engine={{kind: verl, gpus_per_node: 1, max_context_tokens: {LIMIT}}}"


def main(model: str, out: str) -> None:
    overrides = [f"model.path={model}", "mode.max_response_tokens=100", ENGINE]
    config = load_config(RunConfig, str(ROOT / "configs/toy/kb.yaml"), overrides)
    settings = verl_settings(config, Path(out), "cpu", "no:worker", "")
    rollout = "actor_rollout_ref.rollout"
    settings |= {f"{rollout}.nnodes": 1, f"{rollout}.n_gpus_per_node": 1}  # without a trainer
    # A prompt takes several passes.
    settings |= {f"{rollout}.max_num_seqs": 8, f"{rollout}.max_num_batched_tokens": 8}
    runtime = runtime_environment(environment("cpu", 1.0, shares_prefixes=False))
    ray.init("local", num_gpus=1, include_dashboard=False, runtime_env=runtime)
    client: Any = LLMServerManager.create(compose(settings, [])).get_client()

    async def generate(token_ids: list[int], sampling: dict[str, Any]) -> Drawn:
        drawn = await client.generate("one", prompt_ids=token_ids, sampling_params=sampling)
        return Drawn(drawn.token_ids, drawn.log_probs)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    tokenizer = HfTokenizer.load(model)
    stops = StopFinder(tokenizer, model_config(model).vocab_size)
    steps = draw_turns(ServerPolicy(generate, loop, tokenizer, stops, LIMIT))
    Path(out).write_bytes(pickle.dumps(steps))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
