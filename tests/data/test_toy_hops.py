import json
import re

import pytest

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_hops import make_hops
from graphpo_agent.errors import ConfigError
from graphpo_agent.toy import WRITINGS
from graphpo_agent.types import Document
from retrievers.stale import StaleRetriever

WRITING = WRITINGS["search_r1"]
SMALL = {"num_train": 200, "num_heldout": 50, "num_demonstrations": 200, "num_entities": 120}
PERFECT = {"trust": 0.0, "slip": 0.0, "hurry": 0.0}
NAME = r"[A-Z]\w+ [A-Z]\w+"


def world(directory, **knobs):
    make_hops(directory, writing=WRITING, **{**SMALL, **knobs})
    return load_tasks(directory / "train.jsonl"), load_tasks(directory / "heldout.jsonl")


def documents_of(directory):
    """``{(subject, relation): [(mark, value, id), ...]}``, read from the corpus file alone."""
    documents = {}
    for line in (directory / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        match = re.fullmatch(rf'"(old|new)"\n({NAME}) ([a-z]+) : ({NAME})', row["contents"])
        documents.setdefault((match[2], match[3]), []).append((match[1], match[4], row["id"]))
    return documents


def follow(question, documents):
    """Answer, present and outdated document ids of a question, by looking the facts up."""
    match = re.fullmatch(rf"who: ({NAME})((?: [a-z]+)+)", question)
    entity, present, outdated = match[1], [], []
    for relation in match[2].split():
        *old, (_, value, id_) = documents[entity, relation]
        present.append(id_)
        outdated.append(old[0][2] if old else None)
        entity = value
    return entity, present, outdated


def test_outdated_documents_stand_before_the_present_one_as_often_as_asked_for(tmp_path):
    world(tmp_path, num_entities=300, stale=0.35)
    documents = documents_of(tmp_path)
    assert len(documents) == 300 * 8
    marks = [tuple(mark for mark, *_ in each) for each in documents.values()]
    assert set(marks) == {("new",), ("old", "new")}
    assert marks.count(("old", "new")) / len(marks) == pytest.approx(0.35, abs=0.04)
    for (subject, _), each in documents.items():
        assert len({subject, *(value for _, value, _ in each)}) == 1 + len(each)


def test_asking_again_gives_the_present_document(tmp_path):
    world(tmp_path)
    retriever = StaleRetriever(tmp_path / "corpus.jsonl")
    for search, (*old, (_, _, present)) in documents_of(tmp_path).items():
        query = " ".join(search)
        again = f"not {old[0][1]} : {query}" if old else query
        found = retriever.search([query, again], 1)
        first = old[0][2] if old else present
        assert [documents[0].id for documents in found] == [first, present]


@pytest.mark.parametrize("hops", [1, 5, 8])
def test_questions_are_answered_by_the_present_documents(tmp_path, hops):
    train, heldout = world(tmp_path, hops=hops)
    documents = documents_of(tmp_path)
    for task in train + heldout:
        answer, present, outdated = follow(task.question, documents)
        assert task.answers == (answer,)
        assert task.metadata["gold_documents"] == present and len(set(present)) == hops
        assert task.metadata["outdated"] == outdated
    assert len({task.question for task in train + heldout}) == 250


def test_splits_share_no_entity_and_no_fact_leads_from_one_to_the_other(tmp_path):
    train, heldout = world(tmp_path)
    documents = documents_of(tmp_path)
    starts = [{re.search(NAME, task.question)[0] for task in split} for split in (train, heldout)]
    reached = []
    for seen in starts:
        open_names = list(seen)
        while open_names:
            name = open_names.pop()
            stated = [each for (subject, _), each in documents.items() if subject == name]
            fresh = {value for each in stated for _, value, _ in each} - seen
            seen |= fresh
            open_names += fresh
        reached.append(seen)
    assert reached[0].isdisjoint(reached[1]) and len(reached[1]) > 10
    pieces = [{piece for name in side for piece in name.split()} for side in reached]
    assert pieces[1] <= pieces[0]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        world(tmp_path / name, seed=seed)
    for file in ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl", "corpus.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def read(demonstration):
    """Every query of a demonstration with the mark and the value that it found, and the answer."""
    *pieces, last = demonstration.pieces
    assert last.trained and not demonstration.ends
    found = []
    for turn, reply in zip(pieces[::2], pieces[1::2], strict=True):
        query = re.fullmatch(r"<search> ([^<]+)</search>", turn.text)[1]
        subject = query.partition(" : ")[2] if query.startswith("not ") else query
        match = re.search(rf'Doc 1\(Title: "(old|new)"\) {subject} : ({NAME})<', reply.text)
        contents = f'"{match[1]}"\n{subject} : {match[2]}'
        assert turn.trained and reply == WRITING.write_observation(query, [Document("", contents)])
        found.append((query, match[1], match[2]))
    return found, re.fullmatch(rf"<answer> ({NAME})</answer>", last.text)[1]


def test_a_demonstration_asks_and_is_answered_as_the_retriever_would(tmp_path):
    _, heldout = world(tmp_path, slip=0.3)
    relations = {"mentor", "rival", "partner", "cousin", "neighbor", "teacher", "tailor", "banker"}
    names, again = set(), 0
    for d in load_demonstrations(tmp_path / "demonstrations.jsonl"):
        found, answer = read(d)
        names |= {answer, *(value for *_, value in found)}
        answers = {}
        for row, (query, mark, value) in enumerate(found):
            assert answers.setdefault(query, (mark, value)) == (mark, value)
            if query.startswith("not "):
                again += 1
                before, old, outdated = found[row - 1]
                assert query == f"not {outdated} : {before}" and (old, mark) == ("old", "new")
            else:
                assert query.split()[2] in relations and len(query.split()) == 3
    assert again > 100
    assert names.isdisjoint({re.search(NAME, task.question)[0] for task in heldout})


def accuracy(directory):
    """Of each demonstration: whether its answer is the present one, its turns, its old answers."""
    rows = []
    for d in load_demonstrations(directory / "demonstrations.jsonl"):
        found, answer = read(d)
        present = {}
        for query, mark, value in found:
            if mark == "new":
                present[query.partition(" : ")[2] or query] = value
        _, first, last, *relations = d.messages[0]["content"].split()
        entity = f"{first} {last}"
        for relation in relations:
            entity = present.get(f"{entity} {relation}")
        rows.append((entity == answer, len(found) + 1, sum(mark == "old" for _, mark, _ in found)))
    return rows


def test_the_demonstrator_is_wrong_more_often_than_right(tmp_path):
    world(tmp_path, num_demonstrations=1000)
    rows = accuracy(tmp_path)
    assert 0.2 <= sum(right for right, *_ in rows) / len(rows) <= 0.4


def test_a_perfect_demonstrator_is_always_right_in_the_fewest_turns(tmp_path):
    world(tmp_path, **PERFECT)
    assert all(right and turns == 6 + old for right, turns, old in accuracy(tmp_path))


def test_who_trusts_old_answers_is_right_where_there_are_none(tmp_path):
    world(tmp_path, **{**PERFECT, "trust": 1.0})
    rows = accuracy(tmp_path)
    assert all(turns == 6 and right == (old == 0) for right, turns, old in rows)
    assert sum(right for right, *_ in rows) / len(rows) == pytest.approx(0.65**5, abs=0.08)


def test_slips_hurry_and_a_short_horizon_each_cost_accuracy(tmp_path):
    perfect = {**PERFECT, "max_turns": 12, "unnoticed": 0.5}
    for knob, value in {"trust": 0.5, "slip": 0.4, "hurry": 0.2, "max_turns": 6}.items():
        world(tmp_path / knob, **{**perfect, knob: value})
        rows = accuracy(tmp_path / knob)
        assert 0.02 < sum(right for right, *_ in rows) / len(rows) < 0.6
        assert max(turns for _, turns, _ in rows) <= (6 if knob == "max_turns" else 12)


def test_slips_that_are_noticed_cost_turns_only(tmp_path):
    world(tmp_path, **{**PERFECT, "slip": 0.2, "unnoticed": 0.0, "max_turns": 60})
    rows = accuracy(tmp_path)
    assert all(right for right, *_ in rows) and max(turns for _, turns, _ in rows) > 11


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_entities": 10}, "num_entities must be in"),
        ({"hops": 0}, "hops must be in"),
        ({"hops": 9}, "hops must be in"),
        ({"max_turns": 1}, "max_turns must be at least 2"),
        ({"hops": 1, "num_train": 5000}, "do not give 5000 different questions"),
    ],
)
def test_impossible_worlds_are_refused_in_one_line(tmp_path, knobs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        world(tmp_path, **knobs)
    assert "\n" not in str(caught.value)
