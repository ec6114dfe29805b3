"""Places of outputs: what is told of each before any work; asking leaves nothing there."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from graphpo_agent.cli import main
from graphpo_agent.errors import ConfigError, DataError, RunError
from graphpo_agent.outputs import check_above, check_apart, check_output, check_place, is_no_file
from tests.worlds import ROOT

CONFIG, SFT = (str(ROOT / "configs" / "toy" / name) for name in ("reach.yaml", "reach_sft.yaml"))
UNPRIVILEGED = """
import os, sys
from pathlib import Path
from graphpo_agent.errors import GraphPOError
from graphpo_agent.outputs import check_above, check_output, check_place
if os.geteuid() == 0:
    os.seteuid(65534)
for check in (check_place, check_output, check_above):
    try:
        check(Path("there/x"))
    except GraphPOError as error:
        print(error)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory to be in, with one of everything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("missing")
    (tmp_path / "nowhere").symlink_to("gone/missing")
    return tmp_path


@pytest.mark.parametrize("out", ["file", "folder/../file", "symbolic", "hard"])
def test_an_output_is_no_input(here, out):
    (here / "symbolic").symlink_to("file")
    (here / "hard").hardlink_to("file")
    with pytest.raises(ConfigError, match="is also an input or another output"):
        check_apart([Path(out)], [Path("dangling"), here / "file"])


def test_outputs_are_different_files(here):
    check_apart([Path("new"), Path("folder/new")], [Path("file"), Path("dangling")])
    with pytest.raises(ConfigError, match="new is also an input"):
        check_apart([Path("new"), Path("folder/../new")], [])


@pytest.mark.parametrize(
    "words",
    [
        ["score", "file", "--method", "grpo", "--out", "file"],
        ["grade", "em", "file", "--out", "file"],
        ["rollout", CONFIG, "--tasks", "file", "--out", "file"],
        ["rollout", "mine.yaml", "--out", "mine.yaml"],
        ["rollout", CONFIG, "mine.yaml", "--out", "mine.yaml"],
        ["rollout", CONFIG, "tasks.heldout=file", "--out", "file"],
        ["eval", CONFIG, "--tasks", "file", "--out", "file"],
        ["eval", CONFIG, "tasks.train=file", "--out", "file"],
    ],
)
def test_no_verb_writes_over_its_input(words, here, capsys):
    Path("mine.yaml").write_text(Path(CONFIG).read_text())
    before = {path: path.read_text() for path in (here / "file", here / "mine.yaml")}
    assert main(words) == 2
    assert "is also an input or another output" in capsys.readouterr().err
    assert {path: path.read_text() for path in before} == before


def told(check, error, path: str) -> str | None:
    before = sorted(os.walk("."))
    try:
        check(Path(path))
    except error as found:
        return str(found)
    finally:
        assert sorted(os.walk(".")) == before
    return None


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("file", None),
        ("dangling", None),
        ("nowhere", "nowhere: cannot be written (No such file or directory); name another"),
        ("new/and/x", None),
        ("x" * 245, None),
        ("folder", "output 'folder' is not a file and cannot be written over; name another"),
        ("", "output '.' is not a file and cannot be written over; name another"),
        ("pipe", "output 'pipe' is not a file and cannot be written over; name another"),
        ("file/x", "file/x: cannot be written (Not a directory); name another"),
        ("x" * 246, f"{'x' * 246}: cannot be written (File name too long); name another"),
        ("/proc/x", "/proc/x: cannot be written (No such file or directory); name another"),
    ],
)
def test_a_place_that_is_made_with_what_is_above_it(here, path, says):
    assert told(check_place, DataError, path) == says


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("file", None),
        ("folder/x", None),
        ("nowhere", "nowhere: cannot be written (No such file or directory); name another"),
        ("folder", "output 'folder' is a directory: name a file"),
        ("pipe", "output pipe is a device or pipe: name a file"),
        ("new/x", "output new/x: there is no directory new"),
        ("/proc/x", "/proc/x: cannot be written (No such file or directory); name another"),
    ],
)
def test_a_place_in_a_directory_that_is_there(here, path, says):
    assert told(check_output, RunError, path) == says


def test_an_output_that_is_a_link_is_written_where_it_points(here):
    (here / "data.jsonl").write_text('{"problem": "2 + 2?", "answer": "4"}\n')
    (here / "folder" / "kept").write_text("old")
    (here / "first").symlink_to("folder/kept")
    (here / "link").symlink_to("first")
    for out, file in (("link", here / "folder" / "kept"), ("dangling", here / "missing")):
        assert main(["data", "prepare", "math", "data.jsonl", "--out", out]) == 0
        assert (here / out).is_symlink() and "2 + 2?" in file.read_text()
    assert [path.name for path in (here / "folder").iterdir()] == ["kept"]


def test_a_directory_to_be_made(here):
    assert told(check_above, RunError, "new/and/run") is None
    says = f"output file/run: {here / 'file'} is no directory"
    assert told(check_above, RunError, "file/run") == says
    says = "/proc/x/run: cannot be written (No such file or directory); name another"
    assert told(check_above, RunError, "/proc/x/run") == says


def test_nothing_can_be_put_in_a_protected_directory():
    with TemporaryDirectory() as place:  # one that an unprivileged user may enter
        os.chmod(place, 0o755)
        there = Path(place).resolve() / "there"
        there.mkdir(mode=0o555)
        command = [sys.executable, "-c", UNPRIVILEGED]
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=place, env=paths, capture_output=True, text=True)
    says = "there/x: cannot be written ({} is protected); name another"
    assert done.stdout.splitlines() == [says.format(each) for each in (there, "there", there)]


def test_what_is_no_file(here):
    found = [
        name for name in ("file", "folder", "pipe", "dangling", "new", "") if is_no_file(Path(name))
    ]
    assert found == ["folder", "pipe", ""]


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", CONFIG, "--out", "/proc/x"],
        ["eval", CONFIG, "--out", "/proc/x"],
        ["calibrate", CONFIG, "never.jsonl", "--out", "/proc/x"],
        ["sft", SFT, "output=/proc/x"],
        ["grade", "em", "never.jsonl", "--out", "/proc/x"],
        ["data", "prepare", "webdancer", "never.jsonl", "--out", "/proc/x"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_place_where_nothing_can_be_made_is_told_before_the_work(arguments, capsys):
    assert main([*arguments]) == 2
    says = "graphpo: /proc/x: cannot be written (No such file or directory); name another\n"
    assert capsys.readouterr().err == says
