"""Tiny worlds and policies for tests that run the whole program."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpo_agent.cli import main
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Outcome, PathState, Step, SteppedResponse, Task

ROOT = Path(__file__).parent.parent
SIZES = ["num_train=24", "num_heldout=8", "num_demonstrations=64"]


def length_reward(task: Task, outcome: Outcome) -> float:
    """A verifier that an untrained policy sometimes pleases: there is something to learn."""
    return len(outcome.response) % 3 / 2


def no_reward(task: Task, outcome: Outcome) -> float:
    """Nobody is right."""
    return 0.1


class CountingReward:
    """``length_reward``, and how often it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0

    @property
    def counts(self) -> dict[str, int]:
        return {self.name: self.asked}

    def __call__(self, task: Task, outcome: Outcome) -> float:
        self.asked += 1
        return length_reward(task, outcome)


class Stopped:
    """``length_reward`` in a process that is stopped once some tasks are finished.

    Args:
        seen: the file of finished tasks.
        stop: a file that is there for as long as the process is to be stopped.
        by: the name of the signal.
    """

    def __init__(self, seen: str, stop: str, by: str) -> None:
        self._seen, self._stop, self._by = Path(seen), Path(stop), signal.Signals[by]

    def __call__(self, task: Task, outcome: Outcome) -> float:
        self.stop()
        return length_reward(task, outcome)

    def stop(self) -> None:
        begun = self._seen.exists() and self._seen.read_bytes().count(b"\n") > 2
        if begun and self._stop.exists():
            os.kill(os.getpid(), self._by)


def stopped(out: Path, by: str) -> str:
    """The override for ``Stopped``, which stops while ``stop`` is there beside the output."""
    return f"reward={json.dumps(_stopped(Stopped, out, by))}"


def stopped_scorer(out: Path, by: str, group_size: int) -> str:
    """The override for ``StoppedScorer``, which stops as ``stopped`` does."""
    scorer = _stopped(StoppedScorer, out, by)
    method = {"name": "prm", "group_size": group_size, "scorer": scorer}
    return f"method={json.dumps(method)}"


def _stopped(part: type, out: Path, by: str) -> dict[str, str]:
    return {
        "class": f"{__name__}:{part.__name__}",
        "seen": f"{out}.partial",
        "stop": str(out.with_name("stop")),
        "by": by,
    }


class Flaky:
    """A verifier that reaches its service for some tasks only while ``down`` is there."""

    def __init__(self, down: str) -> None:
        self._down = Path(down)

    def __call__(self, task: Task, outcome: Outcome) -> float:
        if self._down.exists() and sum(task.id.encode()) % 3:
            raise CallFailed("transient", "the service is busy")
        return length_reward(task, outcome)


class LengthScorer:
    """A process reward model that likes steps of some lengths."""

    def score(self, responses: list[SteppedResponse]) -> list[list[float]]:
        return [[len(step) % 4 / 3 for step in response.steps] for response in responses]


class StoppedScorer(Stopped, LengthScorer):
    """``LengthScorer`` in a process that is stopped as ``Stopped`` stops it."""

    def score(self, responses: list[SteppedResponse]) -> list[list[float]]:
        self.stop()
        return super().score(responses)


class Storm:
    """An expander on whose paths a tool meets an outage, where ``met`` says so of the task."""

    def __init__(self, calm: Any, met: Callable[[str], bool]) -> None:
        self.calm = calm
        self.met = met

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calm, name)

    async def expand(self, scheduler: Any, states: Sequence[PathState], *rest: Any) -> list[Step]:
        steps = await self.calm.expand(scheduler, states, *rest)
        return [
            replace(step, state=replace(step.state, outages=int(self.met(step.state.task.id))))
            for step in steps
        ]


class AnyArguments:
    """It takes what a tool takes, and is none."""

    def __init__(self, **arguments: object) -> None:
        pass


class Noted:
    """A tool whose note is what it is given; a class is no schema."""

    name = "search"

    def __init__(self, schema: Any = str, description: Any = "Finds.") -> None:
        self.schema, self.description = schema, description

    def run(self, calls: object) -> list[object]:
        return []


class Runs(AnyArguments):
    """It runs, and does not say as what."""

    def run(self, calls: object) -> list[object]:
        return []


def bad_reward(task: Task, outcome: Outcome) -> float:
    """A verifier on the wrong scale."""
    return 100.0


def make_world(directory: Path, world: str) -> Path:
    """A world with 24 tasks and a policy that was warm-started for two steps."""
    place = directory / world
    model = ["hidden_size=32", "num_layers=1", "num_heads=2"]
    assert main(["data", "toy", world, str(place), "seed=0", *SIZES, *model]) == 0
    assert main(["sft", str(ROOT / f"configs/toy/{world}_sft.yaml"), *sft_overrides(place)]) == 0
    return place


def sft_overrides(place: Path) -> list[str]:
    return [
        f"model.path={place / 'untrained'}",
        f"demonstrations={place / 'demonstrations.jsonl'}",
        f"output={place / 'policy'}",
        "steps=2",
        "batch_size=8",
    ]


def run_arguments(place: Path, output: Path, *overrides: str) -> list[str]:
    """Configuration and overrides of a short run in a tiny world."""
    world = place.name
    arguments = [
        str(ROOT / f"configs/toy/{world}.yaml"),
        f"output={output}",
        f"model.path={place / 'policy'}",
        f"tasks.train={place / 'train.jsonl'}",
        f"tasks.heldout={place / 'heldout.jsonl'}",
        "reward=tests.worlds:length_reward",
        "state={kind: text, embedder: {kind: hashing}}",
        "train.prompts_per_step=3",
        "train.steps=4",
        "train.eval_every=2",
        "update.minibatch_graphs=2",
    ]
    if world == "kb":
        arguments.append(f"mode.tools.search.retriever.directory={place / 'index'}")
    if world == "hops":
        arguments.append(f"mode.tools.search.retriever.corpus={place / 'corpus.jsonl'}")
    return [*arguments, *overrides]


def start_command(arguments: list[str], **settings: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "graphpo_agent.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once it has happened in the process, which is still running."""
    for _ in range(2400):
        if happened():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("nothing happened in two minutes")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, no file grows beyond so many bytes inside the ``with`` block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
