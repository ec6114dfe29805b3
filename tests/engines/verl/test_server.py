"""A vLLM server of verl's as a policy, for real."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.launch import environment
from tests.engines.test_vllm import save_model
from tests.engines.tiny import save_tokenizer
from tests.engines.turns import check_turns, learner_of_call, teach_call
from tests.worlds import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_a_turn_that_goes_on_behind_a_stop_string_is_as_if_drawn_at_once(tmp_path: Path) -> None:
    policy, found = tmp_path / "policy", tmp_path / "steps"
    save_tokenizer(policy)
    save_model(policy, seed=0, extra_ids=0)  # verl's servers draw none of them
    model, tokenizer = load_model(str(policy)), HfTokenizer.load(str(policy))
    learner = learner_of_call(model, tokenizer)
    teach_call(learner)
    learner.save_model(tmp_path / "taught")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.verl.server_turns", tmp_path / "taught", found],
        cwd=ROOT,
        env=os.environ | environment("cpu", 1.0, shares_prefixes=False),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_turns(pickle.loads(found.read_bytes()), model, tokenizer)
