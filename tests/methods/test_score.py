"""``graphpo score``: files in, files out, through the command line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpo_agent.cli import main

# Two first steps reach the same state "a" by paths of length 1 and 2:
#
#        0 ── 1[a] ── 3 R=1        class {1, 4} pools: own counts (1, 2) and (1, 1)
#        │     └───── 5 R=0
#        └─ 2 ── 4[a] ── 6 R=1
GRAPH = {
    "schema": "graphpo.graph/1",
    "id": "g",
    "nodes": [
        {"id": 0, "parent": None, "key": "start", "terminal": False},
        {"id": 1, "parent": 0, "key": "a", "terminal": False, "num_tokens": 4},
        {"id": 2, "parent": 0, "key": "b", "terminal": False, "num_tokens": 4},
        {"id": 3, "parent": 1, "key": "right", "terminal": True, "reward": 1.0},
        {"id": 4, "parent": 2, "key": "a", "terminal": False, "num_tokens": 4},
        {"id": 5, "parent": 1, "key": "wrong", "terminal": True, "reward": 0.0},
        {"id": 6, "parent": 4, "key": "other", "terminal": True, "reward": 1.0},
    ],
}


def score(tmp_path: Path, *flags: str, lines: list[Any] | None = None) -> list[dict[str, Any]]:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(line) for line in lines or [GRAPH]) + "\n")
    assert main(["score", str(source), "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def column(scored: dict[str, Any], name: str) -> dict[int, Any]:
    return {node["id"]: node.get(name) for node in scored["nodes"]}


def test_graphpo_by_hand(tmp_path: Path) -> None:
    (scored,) = score(tmp_path, "--method", "graphpo")
    assert scored["method"] == "graphpo" and scored["id"] == "g"
    assert column(scored, "class") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 5, 6: 6}
    assert column(scored, "correct")[1] == 1 and column(scored, "total")[1] == 2
    s = column(scored, "score")
    assert s[1] == pytest.approx((1 + 0.7 * 1) / (2 + 0.7 * 1))
    assert s[4] == pytest.approx((1 + 0.7 * 1) / (1 + 0.7 * 2))
    assert s[0] == pytest.approx(2 / 3) and s[2] == 1.0
    # No embeddings: edges between unequal keys have similarity 0.
    r = column(scored, "step_reward")
    assert r[3] == pytest.approx(1 - s[1]) and r[5] == pytest.approx(-s[1])
    # One group leaves {1, 4}: edges 3, 5, 6.
    group = [1 - s[1], -s[1], 1 - s[4]]
    mean = sum(group) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in group) / 2)
    a = column(scored, "correctness_advantage")
    for node, x in zip((3, 5, 6), group, strict=True):
        assert a[node] == pytest.approx((x - mean) / (std + 1e-6))
    # Paths of length 1 and 2 from the root: ±S̄·0.5/(std(1, 2) + 1e-6), the whole on every edge.
    gate = (s[1] + s[4]) / 2
    e = column(scored, "efficiency_advantage")
    expected = gate * 0.5 / (math.sqrt(0.5) + 1e-6)
    assert e[1] == pytest.approx(expected)
    assert e[2] == e[4] == pytest.approx(-expected)
    for node in range(1, 7):
        assert column(scored, "advantage")[node] == pytest.approx(a[node] + 0.2 * e[node])
    assert [t["leaf"] for t in scored["trajectories"]] == [3, 5, 6]
    assert [t["edges"] for t in scored["trajectories"]] == [[1, 3], [1, 5], [2, 4, 6]]
    assert "advantage" not in scored["nodes"][0] and "score" in scored["nodes"][0]


def test_an_advantage_is_the_sum_of_its_weighted_columns(tmp_path: Path) -> None:
    (plain,) = score(tmp_path, "--method", "graphpo")
    assert not any("trajectory_advantage" in node for node in plain["nodes"])
    (scored,) = score(tmp_path, "--method", "graphpo", "--trajectory-weight", "0.5")
    assert "trajectory_advantage" not in scored["nodes"][0]
    of_trajectory = column(scored, "trajectory_advantage")
    mean, std = 2 / 3, math.sqrt(1 / 3)  # of the rewards 1, 0, 1
    assert of_trajectory[5] == pytest.approx(-mean / (std + 1e-6))
    assert of_trajectory[3] == pytest.approx((1 - mean) / (std + 1e-6))
    for node in scored["nodes"][1:]:
        whole = node["correctness_advantage"] + 0.2 * node["efficiency_advantage"]
        assert node["advantage"] == pytest.approx(whole + 0.5 * node["trajectory_advantage"])


def test_tree_is_graphpo_without_merging(tmp_path: Path) -> None:
    (scored,) = score(tmp_path, "--method", "tree")
    (unmerged,) = score(tmp_path, "--method", "graphpo", "--merge", "none")
    assert scored["nodes"] == unmerged["nodes"]
    assert column(scored, "score")[1] == 0.5
    assert set(column(scored, "efficiency_advantage").values()) == {None, 0.0}


def test_grpo_repeats_a_trajectory_s_advantage_on_its_edges(tmp_path: Path) -> None:
    (scored,) = score(tmp_path, "--method", "grpo")
    std = math.sqrt(((1 / 3) ** 2 * 2 + (2 / 3) ** 2) / 2)
    right, wrong = (1 / 3) / (std + 1e-6), (-2 / 3) / (std + 1e-6)
    got = [t["advantages"] for t in scored["trajectories"]]
    assert got == [
        pytest.approx([right] * 2),
        pytest.approx([wrong] * 2),
        pytest.approx([right] * 3),
    ]
    assert all(set(node) == {"id", "class"} for node in scored["nodes"])
    (centred,) = score(tmp_path, "--method", "grpo", "--normalize", "none")
    assert centred["trajectories"][1]["advantages"] == pytest.approx([-2 / 3] * 2)


def test_equal_rewards_give_grpo_no_advantage_whatever_their_value(tmp_path: Path) -> None:
    for count in range(2, 9):
        leaves = [{"id": i + 1, "parent": 0, "terminal": True, "reward": 0.1} for i in range(count)]
        graph = dict(GRAPH, nodes=[GRAPH["nodes"][0], *leaves])
        (scored,) = score(tmp_path, "--method", "grpo", lines=[graph])
        assert {a for t in scored["trajectories"] for a in t["advantages"]} == {0.0}


def test_classes_of_the_file_are_kept_when_asked_for(tmp_path: Path) -> None:
    nodes = [dict(node, **{"class": node["id"]}) for node in GRAPH["nodes"]]
    nodes[6]["class"] = 3
    lines = [dict(GRAPH, nodes=nodes)]
    (kept,) = score(tmp_path, "--method", "graphpo", "--keep-classes", lines=lines)
    assert column(kept, "class") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 3}
    (computed,) = score(tmp_path, "--method", "graphpo", lines=lines)
    assert column(computed, "class")[4] == 1


def test_ids_may_be_any_distinct_numbers_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    names = {0: 70, 1: 5, 2: 99, 3: 2, 4: 8, 5: 1, 6: 30}
    nodes = [
        dict(node, id=names[node["id"]], parent=names.get(node["parent"]))
        for node in GRAPH["nodes"]
    ]
    renamed, plain = score(
        tmp_path, "--method", "graphpo", lines=[dict(GRAPH, id="renamed", nodes=nodes), GRAPH]
    )
    assert column(renamed, "score") == {names[v]: s for v, s in column(plain, "score").items()}
    assert renamed["trajectories"][2]["edges"] == [99, 8, 30]
    assert column(renamed, "class")[8] == 5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--merge-threshold", "0"], "threshold"),
        (["--merge-threshold", "1.2"], "threshold"),
        (["--merge-threshold", "nan"], "threshold"),
        (["--pool-weight", "2"], "pool_weight"),
        (["--efficiency-weight", "-1"], "efficiency_weight"),
        (["--efficiency-weight", "inf"], "efficiency_weight"),
        (["--trajectory-weight", "nan"], "trajectory_weight"),
        (["--max-layer-gap", "-1"], "max_layer_gap"),
        (["--max-layer-gap", "x"], "--max-layer-gap"),
        (["--backup", "sideways"], "--backup"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_option_is_one_line_status_2_and_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(GRAPH))
    out.write_text("precious")
    status = exit_status(["score", str(source), "--out", str(out), "--method", "graphpo", *flags])
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and says in error
    assert out.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_malformed_line_leaves_the_old_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = dict(GRAPH, id="h", nodes=[*GRAPH["nodes"], {"id": 7, "parent": 3, "terminal": False}])
    source.write_text(json.dumps(GRAPH) + "\n" + json.dumps(bad) + "\n")
    out.write_text("precious")
    assert exit_status(["score", str(source), "--out", str(out), "--method", "tree"]) == 2
    error = capsys.readouterr().err
    assert f"{source}:2" in error and error.count("\n") == 1
    assert out.read_text() == "precious"


def test_a_missing_file_and_an_unwritable_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "nowhere" / "out.jsonl"
    source = tmp_path / "in.jsonl"
    assert exit_status(["score", str(source), "--out", str(out), "--method", "tree"]) == 2
    source.write_text(json.dumps(GRAPH))
    assert exit_status(["score", str(source), "--out", str(out), "--method", "tree"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    for impossible in (source / "out.jsonl", tmp_path / ("x" * 300), Path("/proc/out.jsonl")):
        score = ["score", str(source), "--out", str(impossible), "--method", "tree"]
        assert exit_status(score) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"graphpo: {impossible}: cannot be written (")
        assert error.count("\n") == 1


def test_grpo_refuses_what_it_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(GRAPH))
    arguments = ["score", str(source), "--out", str(tmp_path / "o"), "--method", "grpo"]
    assert exit_status([*arguments, "--merge-threshold", "7"]) == 2
    assert exit_status([*arguments[:2], "--out", str(tmp_path), "--method", "grpo"]) == 2
    assert exit_status([*arguments, "--normalize", "rms"]) == 2
    assert "rms" in capsys.readouterr().err


def exit_status(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--method", "grpo", "--pool-weight", "0.5"], "--pool-weight is not a setting of grpo"),
        (["--method", "tree", "--keep-classes"], "--keep-classes is not a setting of tree, only"),
        (["--method", "tree", "--merge", "similarity"], "--merge similarity is not a setting"),
        (["--method", "spo_tree", "--normalize", "rms"], "use none or std"),
        (["--method", "spo_chain", "--max-probability", "none"], "give a number"),
        (["--method", "treerl", "--select", "many"], "'many' is neither a number nor none"),
        (["--method", "dapo", "--max-length", "9"], "overlong_buffer"),
        (["--method", "dapo", "--max-length", "9" * 20, "--overlong-buffer", "5"], "is more than"),
        (["--method", "grpo", "--drop-zero"], "--drop-zero is not a setting of grpo"),
        (["--method", "prm"], "in.jsonl: graph 'g': method prm needs the scores of a process"),
        (["--method", "spo_tree", "--max-probability", "0.9"], "in.jsonl: graph 'g', node 1: --m"),
        (["--method", "spo_chain", "--max-probability", "0.5"], "node 1: --max-probability needs"),
        (["--method", "pros"], "--method grpo"),
    ],
)
def test_a_method_is_asked_for_what_it_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(GRAPH) + "\n")
    try:
        status = main(["score", str(source), "--out", str(out), *flags])
    except SystemExit as exit:  # argparse's own
        status = exit.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 2 and len(lines) == 1 and told in lines[0]
    assert not out.exists()


def test_a_mask_leaves_out_what_whitening_counts(tmp_path: Path) -> None:
    spread = [
        {"id": 0, "parent": None, "terminal": False},
        {"id": 1, "parent": 0, "terminal": True, "reward": 1.0, "logprobs": [-2.0, -0.01]},
        {"id": 2, "parent": 0, "terminal": True, "reward": 0.0, "logprobs": [-2.0]},
    ]
    flags = ["--method", "spo_tree", "--whiten", "batch", "--max-probability"]
    lines = [dict(GRAPH, nodes=spread)]
    (masked,) = score(tmp_path, *flags, "0.9", lines=lines)
    assert column(masked, "advantage")[1] == pytest.approx(math.sqrt(0.5))
    (whole,) = score(tmp_path, *flags, "none", lines=lines)  # of 0.5, 0.5 and -0.5
    assert column(whole, "advantage")[1] == pytest.approx(1 / math.sqrt(3))
    # Without spread siblings are worth 0, and count only where they are not dropped.
    told = {"terminal": True, "logprobs": [-2.0]}
    same = [{"id": i, "parent": 1, "reward": 1.0, **told} for i in (3, 4)]
    middle = {"id": 1, "parent": 0, "terminal": False, "logprobs": [-2.0]}
    nodes = [spread[0], middle, spread[2], *same]
    for flag, trained in {"--drop-zero": 2, "--no-drop-zero": 4}.items():
        (kept,) = score(tmp_path, *flags[:4], flag, lines=[dict(GRAPH, nodes=nodes)])
        raw = np.array([0.5, -0.5, 0.0, 0.0][:trained])
        whitened = (raw - raw.mean()) / raw.std(ddof=1)
        assert column(kept, "advantage")[1] == pytest.approx(whitened[0])
    # An estimate is not trained, so nobody asks how likely its tokens were.
    estimate = [*spread, {"id": 3, "parent": 0, "terminal": True, "reward": 0.0, "loss_mask": [0]}]
    chain = ["--method", "spo_chain", "--max-probability", "0.9"]
    (scored,) = score(tmp_path, *chain, lines=[dict(GRAPH, nodes=estimate)])
    assert column(scored, "advantage") == {0: None, 1: 1.0, 2: 0.0, 3: None}


def test_weights_that_overflow_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(GRAPH))
    out.write_text("before")
    weights = ["--max-length", "9", "--overlong-buffer", "5", "--overlong-factor", "1e308"]
    words = ["score", str(source), "--out", str(out), "--method", "dapo", *weights]
    assert main(words) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "graph 'g'" in told and "no finite number" in told and out.read_text() == "before"


def test_a_file_without_trees_has_one_under_each_child_of_the_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(trees: list[int | None]) -> list[Any]:
        pairs = zip(GRAPH["nodes"], trees, strict=True)
        nodes = [node if tree is None else node | {"tree": tree} for node, tree in pairs]
        return [GRAPH | {"nodes": nodes}, GRAPH | {"nodes": nodes, "id": "h"}]

    method = ("--method", "tree_grpo")
    given = score(tmp_path, *method, lines=lines([None, 5, 2, 5, 2, 5, 2]))
    assert capsys.readouterr().err == ""
    assert score(tmp_path, *method, lines=lines([None] * 7)) == given
    (note,) = capsys.readouterr().err.splitlines()
    assert "no node of graph 'g' and of 1 more has" in note and "field `tree`" in note
    one_tree = score(tmp_path, *method, lines=lines([None] + [0] * 6))
    assert one_tree != given

    some = tmp_path / "some.jsonl"
    some.write_text(json.dumps(lines([None, 5, 2, 5, 2, None, 2])[0]))
    out = tmp_path / "some.out"
    assert main(["score", str(some), "--out", str(out), *method]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "graph 'g', node 5" in told and "field `tree`" in told and not out.exists()
    assert main(["score", str(some), "--out", str(out), "--method", "treerl"]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["grpo"],
        ["dapo", "--max-length", "4", "--overlong-buffer", "2"],
        ["treerl", "--select", "none"],
        ["spo_tree", "--normalize", "std", "--whiten", "batch"],
        ["spo_chain"],
        ["tree_grpo", "--kept", "1"],
        ["treepo", "--aggregate", "group_size", "--whiten", "batch"],
        ["treerpo"],
    ],
    ids=lambda flags: flags[0],
)
def test_every_method_scores_in_the_fixed_format(tmp_path: Path, flags: list[str]) -> None:
    (scored,) = score(tmp_path, "--method", *flags)
    assert set(scored) == {"id", "method", "nodes", "trajectories"}
    assert [node["id"] for node in scored["nodes"]] == [0, 1, 2, 3, 4, 5, 6]
    assert all("class" in node for node in scored["nodes"])
    assert "advantage" not in scored["nodes"][0]
    edges = {t["leaf"]: t["edges"] for t in scored["trajectories"]}
    assert edges == {3: [1, 3], 5: [1, 5], 6: [2, 4, 6]}
    for trajectory in scored["trajectories"]:
        assert len(trajectory["advantages"]) == len(trajectory["edges"])
    by_trajectory = flags[0] in ("grpo", "dapo", "tree_grpo", "treepo")
    assert by_trajectory != any("advantage" in node for node in scored["nodes"])


def test_a_graph_that_does_not_branch_at_its_root_needs_no_trees(tmp_path, capsys):
    chain = {**GRAPH, "nodes": GRAPH["nodes"][:2]}
    score(tmp_path, "--method", "tree_grpo", lines=[chain])
    assert "tree" not in capsys.readouterr().err


def test_a_file_is_whitened_as_one_batch(tmp_path):
    lines = [{**GRAPH, "id": str(i)} for i in range(70)]
    for line in lines[64:]:
        line["nodes"] = [
            node | ({"reward": 0.0} if node["terminal"] else {}) for node in line["nodes"]
        ]
    scored = score(tmp_path, "--method", "treepo", "--whiten", "batch", lines=lines)
    advantages = np.array(
        [a for one in scored for t in one["trajectories"] for a in t["advantages"]]
    )
    weights = np.array([4.0 if v in (1, 2, 4) else 1.0 for v in (1, 3, 1, 5, 2, 4, 6)] * 70)
    assert advantages @ weights == pytest.approx(0.0, abs=1e-6)
    assert advantages[-1] != 0.0
