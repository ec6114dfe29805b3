"""An agent that walks a path through a small library, told what to say."""

from graphpo_agent.rollout.agent import TurnExpander
from graphpo_agent.rollout.dialects.base import InvalidAction
from graphpo_agent.rollout.dialects.search_r1 import SearchR1Dialect
from graphpo_agent.types import Document, PathState, SamplingParams, Step, Task
from tests.rollout.scripted import EOS, ByteTokenizer, Library, bytes_of, expand

TASK = Task(id="t1", question="When was the mentor of Karo Venn born?", answers=("1987",))
SAMPLING = SamplingParams()
KARO = Document("7", '"Karo Venn"\nmentor : Lita Bosdal')
LITA = Document("3", '"Lita Bosdal"\nborn : 1987')
SHELVES = {"Karo": (KARO,), "Lita": (LITA, KARO), "both": (KARO, LITA)}
_ACTION = SearchR1Dialect().parse("")
assert isinstance(_ACTION, InvalidAction)
INVALID = SearchR1Dialect().correction(_ACTION).text


def make(tool=None, **options):
    settings_ = {
        "max_turns": 4,
        "max_turn_tokens": 400,
        "max_observation_tokens": 400,
        "max_response_tokens": 4000,
    } | options
    tool = tool or Library(SHELVES)
    return TurnExpander(dialect=SearchR1Dialect(), tools={"search": tool}, **settings_)


def turns(*said):
    """A policy script: the n-th turn of a path says ``said[n]``, told by its observations."""

    def script(context, seed):
        text = ByteTokenizer().decode(context)
        prompt = text.index("Question:")
        count = text.count("<information>", prompt) + text.count(INVALID, prompt)
        return said[count]

    return script


def walk(expander, policy) -> tuple[PathState, list[Step]]:
    root = state = expander.start(policy, TASK)
    steps = []
    while not steps or not steps[-1].terminal:
        steps += expand(expander, policy, [state], [0], SAMPLING)
        state = steps[-1].state
        assert len(steps) <= expander.max_layers
    return root, steps


SEARCH_KARO = bytes_of("<think> mentor </think> <search> Karo </search>")
SEARCH_LITA = bytes_of("<search> Lita </search>")
ANSWER = bytes_of("<think> so </think> <answer> 1987 </answer>")
MUTE = (*b"hmm", EOS)


def observation_of(*documents):
    shown = "\n".join(f"Doc {i}(Title: {d.title}) {d.text}" for i, d in enumerate(documents, 1))
    return f"\n\n<information>{shown}</information>\n\n"
