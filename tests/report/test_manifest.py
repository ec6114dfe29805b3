"""What a run says of where it came from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import graphpo_agent

PACKAGE = Path(graphpo_agent.__file__).parent
SCRIPT = """
import sys
from pathlib import Path
from graphpo_agent.report.run_dir import RunDirectory
RunDirectory.create(Path(sys.argv[1]), "seed: 0", 0, ["graphpo"])
"""


def git(directory: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit_of_a_run(code: Path, run: Path) -> str | None:
    subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(run)],
        env={**os.environ, "PYTHONPATH": str(code)},
        cwd=run.parent,
        check=True,
    )
    return json.loads((run / "manifest.json").read_text())["git_commit"]


def test_the_commit_is_that_of_this_package_and_of_nothing_around_it(tmp_path):
    project = tmp_path / "project"
    code = project / "lib"
    shutil.copytree(PACKAGE, code / "graphpo_agent", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "own.txt").write_text("something else")
    git(project, "init", "-q")
    git(project, "add", "own.txt")
    git(project, "commit", "-qm", "own")
    assert commit_of_a_run(code, tmp_path / "installed") is None
    git(project, "add", "lib")
    git(project, "commit", "-qm", "code")
    assert commit_of_a_run(code, tmp_path / "checkout") == git(project, "rev-parse", "HEAD")
