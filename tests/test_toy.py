"""The harder toy worlds through the command line, with their own states and rewards."""

import json
from pathlib import Path

import pytest

from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_demonstrations
from tests.worlds import ROOT, SIZES, make_world, run_arguments


@pytest.mark.parametrize(("world", "key"), [("hops", '["who: '), ("trace", "0 ")])
def test_a_world_is_made_warm_started_and_rolled_out_with_its_own_keys(
    world: str, key: str, tmp_path: Path
) -> None:
    place, graphs = make_world(tmp_path, world), tmp_path / "graphs.jsonl"
    config = load_config(RunConfig, ROOT / f"configs/toy/{world}.yaml", [])
    own = [f"reward={config.reward}", f"state={config.state.model_dump_json()}"]
    arguments = run_arguments(place, tmp_path / "run", *own)
    assert main(["rollout", *arguments, "--count", "2", "--out", str(graphs)]) == 0
    for line in graphs.read_text().splitlines():
        nodes = json.loads(line)["nodes"]
        assert nodes[0]["key"].startswith(key) and len({node["key"] for node in nodes}) > 1
        assert {node["reward"] for node in nodes if node["terminal"]} == {0.0}


def test_hops_can_be_written_in_the_hermes_dialect(tmp_path: Path) -> None:
    place = tmp_path / "hops"
    assert main(["data", "toy", "hops", str(place), *SIZES, "dialect=hermes", "hops=2"]) == 0
    shown = load_demonstrations(place / "demonstrations.jsonl")
    assert any(" not " in piece.text for d in shown for piece in d.pieces)
    for demonstration in shown:
        for turn, reply in zip(demonstration.pieces[::2], demonstration.pieces[1::2], strict=False):
            assert turn.text.startswith('\n<tool_call>\n{"name": "search"') and turn.trained
            assert reply.role == "user" and "<tool_response>" in reply.text


@pytest.mark.parametrize(
    "knob",
    [
        *("dialect=hermes", "hops=2", "skill=0.5", "limit=[1"),
        *("num_train=0", "num_heads=0", "num_layers=0", "max_context_tokens=0"),
        *(f"seed={2**63}", "slip=1.5", "habit=-0.1", "slip=.nan", "slip=yes"),
    ],
)
def test_a_knob_of_another_world_is_refused(
    knob: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "toy", "trace", str(tmp_path / "trace"), knob]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and repr(knob) in error
    assert not (tmp_path / "trace").exists()


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("knobs", [["hops=100"], ["num_heads=3"], ["dialect=latin"]])
def test_a_world_that_cannot_be_made_leaves_what_is_there(
    knobs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, new = tmp_path / "kb", tmp_path / "new"
    place.mkdir()
    (place / "own.txt").write_text("mine")
    make = ["data", "toy", "kb", str(place), *SIZES, "hops=1"]
    assert main([*make, *knobs]) == 2
    assert main(["data", "toy", "kb", str(new), *SIZES, *knobs]) == 2
    assert capsys.readouterr().err.count("\n") == 2 and not new.exists()
    assert contents(place) == {place / "own.txt": b"mine"}
    assert main(make) == 0
    assert (place / "own.txt").read_text() == "mine" and (place / "train.jsonl").is_file()


def test_a_world_is_made_once_and_written_over_by_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "kb"
    make = ["data", "toy", "kb", str(place), *SIZES, "hops=1"]
    assert main(make) == 0
    before = contents(place)
    capsys.readouterr()
    assert main([*make, "seed=0"]) == 0  # the same, for 0 it is
    assert "is there already" in capsys.readouterr().out
    for other, told in (
        ([*make, "seed=1", "num_heads=4"], "kb holds a world with seed=0, num_heads=2: name"),
        (["data", "toy", "reach", str(place)], "kb holds a kb world: name"),
    ):
        assert main(other) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line and "delete that one" in line
    assert contents(place) == before
    (place / "world.json").unlink()
    assert main(make) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is there, and no complete world of these knobs" in line
    assert contents(place) | {place / "world.json": before[place / "world.json"]} == before


def test_a_limit_makes_its_numbers_single_tokens(tmp_path: Path) -> None:
    place = tmp_path / "trace"
    assert main(["data", "toy", "trace", str(place), *SIZES, "limit=25", "num_lines=3"]) == 0
    tokenizer = json.loads((place / "untrained/tokenizer.json").read_text())
    added = {token["content"] for token in tokenizer["added_tokens"]}
    assert {" 24", " *3"} <= added and " 25" not in added
