"""Who is refused a directory or a file: asked by real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphpo_agent.locks import directory_lock, file_lock

LOCKS = {"directory": directory_lock, "file": file_lock}
HOLD = """
import sys; from pathlib import Path
from graphpo_agent.locks import {kind}_lock
with {kind}_lock(Path(sys.argv[1]), Exception("busy")):
    print("inside", flush=True); sys.stdin.read()
"""
TAKE_TURNS = """
import sys; from pathlib import Path
from graphpo_agent.locks import {kind}_lock
place, inside, done = Path(sys.argv[1]), Path(sys.argv[1] + ".inside"), 0
while done < 300:
    try:
        with {kind}_lock(place, InterruptedError()):
            try:
                inside.touch(exist_ok=False)
            except FileExistsError:
                sys.exit("another one is inside")
            inside.unlink()
            place.{remove}()
            done += 1
    except (InterruptedError, FileExistsError):  # the latter is mkdir's, of one just removed
        pass
"""


class Busy(Exception):
    pass


@pytest.mark.parametrize("kind", LOCKS)
def test_what_another_process_holds_is_refused_until_it_dies(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD.format(kind=kind), str(tmp_path / "held")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"inside\n"
        with pytest.raises(Busy), LOCKS[kind](tmp_path / "held", Busy()):
            pass
        other.kill()
    with LOCKS[kind](tmp_path / "held", Busy()):
        pass


@pytest.mark.parametrize("kind", LOCKS)
def test_what_has_just_been_taken_away_is_refused(kind: str, tmp_path: Path) -> None:
    """Opened before it was removed, which /proc does again."""
    place = tmp_path / "held"
    with LOCKS[kind](place, Busy()):
        descriptor = os.open(place, os.O_RDONLY)
        place.rmdir() if kind == "directory" else place.unlink()
    with pytest.raises(Busy), LOCKS[kind](Path(f"/proc/self/fd/{descriptor}"), Busy()):
        pass
    os.close(descriptor)


@pytest.mark.parametrize(("kind", "remove"), [("directory", "rmdir"), ("file", "unlink")])
def test_one_process_at_a_time_is_inside_while_all_take_it_away(
    kind: str, remove: str, tmp_path: Path
) -> None:
    program = TAKE_TURNS.format(kind=kind, remove=remove)
    command = [sys.executable, "-c", program, str(tmp_path / "held")]
    others = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    said = [other.communicate()[1] for other in others]
    assert said == [b""] * 4
