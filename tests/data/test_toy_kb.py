import json
import re

import pytest

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_kb import make_kb
from graphpo_agent.errors import ConfigError
from graphpo_agent.toy import WRITINGS
from retrievers.bm25 import Bm25Retriever

WRITING = WRITINGS["search_r1"]
SMALL = {"num_train": 200, "num_heldout": 50, "num_demonstrations": 200, "num_entities": 120}


def world(directory, **knobs):
    make_kb(directory, writing=WRITING, **{**SMALL, **knobs})
    return load_tasks(directory / "train.jsonl"), load_tasks(directory / "heldout.jsonl")


def facts_of(directory):
    """``{(subject, relation): (value, id)}``, read from the corpus file alone."""
    facts = {}
    for line in (directory / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        match = re.fullmatch(r'"(\w+ \w+)"\n(\w+ \w+) (\w+) : (\w+ \w+|\d{4})', row["contents"])
        assert match is not None and match[1] == match[2]
        assert (match[2], match[3]) not in facts
        facts[match[2], match[3]] = (match[4], row["id"])
    return facts


def follow(question, facts):
    """Answer and document ids of a question, by looking the facts up."""
    years, ids = [], []
    for chain in question.removeprefix("when: ").split(" , "):
        _, first, last, *relations = chain.split()
        entity = f"{first} {last}"
        for relation in relations:
            entity, id_ = facts[entity, relation]
            ids.append(id_)
        years.append(entity)
    return " ".join(years), ids


def test_the_default_world_has_ten_thousand_documents_and_search_always_finds_the_right_one(
    tmp_path,
):
    make_kb(tmp_path, writing=WRITING, num_train=10, num_demonstrations=1)
    facts = facts_of(tmp_path)
    assert len(facts) >= 10_000
    queries = [" ".join(key) for key in facts]
    found = Bm25Retriever(tmp_path / "index").search(queries, 1)
    assert [documents[0].id for documents in found] == [id_ for _, id_ in facts.values()]


def test_search_stays_right_with_all_distractors(tmp_path):
    world(tmp_path, num_entities=300, num_distractors=8)
    facts = facts_of(tmp_path)
    found = Bm25Retriever(tmp_path / "index").search([" ".join(key) for key in facts], 1)
    assert [documents[0].id for documents in found] == [id_ for _, id_ in facts.values()]


@pytest.mark.parametrize(("num_chains", "hops"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3)])
def test_questions_are_answered_by_their_gold_documents(tmp_path, num_chains, hops):
    train, heldout = world(tmp_path, num_chains=num_chains, hops=hops)
    facts = facts_of(tmp_path)
    subject_of = {id_: subject for (subject, _), (_, id_) in facts.items()}
    for task in train + heldout:
        answer, ids = follow(task.question, facts)
        assert task.answers == (answer,)
        assert task.metadata["gold_documents"] == ids
        assert len({subject_of[id_] for id_ in ids}) == len(ids) == num_chains * hops
        assert len(set(answer.split())) == num_chains
    assert len({task.question for task in train + heldout}) == 250


def test_splits_share_no_entity_and_no_fact_leads_from_one_to_the_other(tmp_path):
    train, heldout = world(tmp_path)
    facts = facts_of(tmp_path)
    assert all(value != subject for (subject, _), (value, _) in facts.items())
    names = {subject for subject, _ in facts}
    asked = [
        {name for task in split for name in names if name in task.question}
        for split in (train, heldout)
    ]
    reached = []
    for seen in asked:
        open_names = list(seen)
        while open_names:
            name = open_names.pop()
            others = {value for (subject, _), (value, _) in facts.items() if subject == name}
            fresh = (others & names) - seen
            seen |= fresh
            open_names += fresh
        reached.append(seen)
    assert reached[0].isdisjoint(reached[1])
    pieces = [{piece for name in side for piece in name.split()} for side in reached]
    assert pieces[1] <= pieces[0]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        world(tmp_path / name, seed=seed)
    for file in ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl", "corpus.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def turns_of(demonstration):
    return [piece.text for piece in demonstration.pieces if piece.trained]


SEARCH_TURN = re.compile(
    r"<think> (?:(?P<note>[^.<]+) \. )?(?P<mark>first|second|aside) (?P<plan>[^.<]+)</think>"
    r"<search> (?P<query>[^<]+)</search>"
)
LAST_TURN = re.compile(
    r"<think> (?:(?P<note>[^.<]+) \. )?first (?P<one>\d{4}) second (?P<two>\d{4})</think>"
    r"<answer> (?P<answer>\d{4} \d{4})</answer>"
)


def test_demonstrations_hold_what_the_retriever_really_returns(tmp_path):
    train, _ = world(tmp_path)
    retriever = Bm25Retriever(tmp_path / "index")
    questions = {task.question for task in train}
    for d in load_demonstrations(tmp_path / "demonstrations.jsonl"):
        assert d.messages[0]["content"] in questions
        assert not d.ends
        assert [piece.trained for piece in d.pieces] == [True, False] * (len(d.pieces) // 2) + [
            True
        ]
        for turn, seen in zip(d.pieces[::2], d.pieces[1::2], strict=False):
            match = SEARCH_TURN.fullmatch(turn.text)
            assert match is not None and match["plan"] == match["query"]
            assert seen == WRITING.write_observation(
                match["query"], retriever.search([match["query"]], 1)[0]
            )
        last = LAST_TURN.fullmatch(d.pieces[-1].text)
        assert last is not None and last["answer"] == f"{last['one']} {last['two']}"


def test_a_note_repeats_what_was_just_found_and_what_it_leads_to(tmp_path):
    world(tmp_path, hops=3)
    num_notes = 0
    for d in load_demonstrations(tmp_path / "demonstrations.jsonl"):
        turns, seen = turns_of(d), [piece.text for piece in d.pieces if not piece.trained]
        for before, observed, turn in zip(turns, seen, turns[1:], strict=False):
            mark = SEARCH_TURN.fullmatch(before)["mark"]
            note = (SEARCH_TURN.fullmatch(turn) or LAST_TURN.fullmatch(turn))["note"]
            if mark == "aside":
                assert note is None
                continue
            num_notes += 1
            value = observed.split(" : ")[1].removesuffix("</information>\n\n")
            asked = {part.split()[0]: part.split()[3:] for part in chains_of(d)}[mark]
            assert note.startswith(f"{mark} {value}")
            left = note.removeprefix(f"{mark} {value}").split()
            assert asked[len(asked) - len(left) :] == left
    assert num_notes > 100


def chains_of(demonstration):
    return demonstration.messages[0]["content"].removeprefix("when: ").split(" , ")


def accuracy(directory, train):
    answers = {task.question: task.answers[0] for task in train}
    demonstrations = load_demonstrations(directory / "demonstrations.jsonl")
    right = [
        f"<answer> {answers[d.messages[0]['content']]}</answer>" in d.pieces[-1].text
        for d in demonstrations
    ]
    return sum(right) / len(right), max(len(turns_of(d)) for d in demonstrations)


def test_a_perfect_demonstrator_is_always_right_in_the_fewest_turns(tmp_path):
    train, _ = world(tmp_path, noise=0.0, slip=0.0, hurry=0.0, hops=3)
    assert accuracy(tmp_path, train) == (1.0, 2 * 3 + 1)


def test_noise_slips_hurry_and_a_short_horizon_each_cost_accuracy(tmp_path):
    perfect = {"noise": 0.0, "slip": 0.0, "hurry": 0.0, "max_turns": 8}
    for knob, value in {"noise": 0.6, "slip": 0.4, "hurry": 0.3, "max_turns": 4}.items():
        train, _ = world(tmp_path / knob, **{**perfect, knob: value})
        share, turns = accuracy(tmp_path / knob, train)
        assert share < 0.75
        assert turns <= (4 if knob == "max_turns" else 8)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_entities": 10}, "num_entities must be in"),
        ({"num_chains": 3}, "num_chains must be 1 or 2"),
        ({"hops": 0}, "hops must be in"),
        ({"hops": 1000}, "hops must be in"),
        ({"num_distractors": 9}, "num_distractors must be in"),
        ({"max_turns": 1}, "max_turns must be at least 2"),
        ({"num_chains": 1, "hops": 1, "num_train": 5000}, "do not give 5000 different questions"),
    ],
)
def test_impossible_worlds_are_refused_in_one_line(tmp_path, knobs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        world(tmp_path, **knobs)
    assert "\n" not in str(caught.value)
