"""What the parts of a run count, as it can be written."""

import json
from typing import Any

import numpy as np
import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.counts import Counts, counts_of


class Counted:
    def __init__(self, counts: Any) -> None:
        self.counts = counts


def test_counts_of_numpy_can_be_written() -> None:
    part = Counted({"mine/seen": np.int64(3), "mine/cost": np.float32(0.5), "mine/right": 2})
    counts = Counts(part, None)
    part.counts["mine/seen"] += 4
    assert json.dumps(counts.take()) == '{"mine/seen": 4, "mine/cost": 0.0, "mine/right": 0}'


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (["mine/seen"], r"Counted\.counts is \['mine/seen'\], want a mapping"),
        ({"mine/seen": "many"}, "Counted.counts holds 'mine/seen': 'many', want a name: a number"),
        ({7: 1}, "Counted.counts holds 7: 1, want a name"),
    ],
)
def test_what_counts_nothing_is_named(counts: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        counts_of(Counted(counts))
