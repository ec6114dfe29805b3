"""Finished rollouts are looked for twenty times a second, where verl does so every two seconds.

Loaded by ``VERL_USE_EXTERNAL_MODULES``: a measured step should not end with a wait.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

_wait = ReplayBuffer._wait_for_next_poll


def _wait_for_next_poll(self: Any, *arguments: Any) -> float:
    self.poll_interval = 0.05
    return _wait(self, *arguments)


ReplayBuffer._wait_for_next_poll = _wait_for_next_poll
