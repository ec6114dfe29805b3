"""Who is refused a directory or a file: asked by real processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
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
LEAVE_A_PROGRAM = """
import subprocess, sys; from pathlib import Path
from graphpo_agent.locks import directory_lock
with directory_lock(Path(sys.argv[1]), Exception("busy"), inherit=sys.argv[2] == "True"):
    own = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    print(own.pid, flush=True)
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
    except InterruptedError:
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


@pytest.mark.parametrize("inherit", [True, False])
def test_a_program_that_outlives_its_process_holds_a_directory_where_it_should(
    inherit: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LEAVE_A_PROGRAM, str(tmp_path / "held"), str(inherit)]
    left = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    try:
        held = pytest.raises(Busy) if inherit else nullcontext()
        with held, directory_lock(tmp_path / "held", Busy()):
            pass
    finally:
        os.kill(left, signal.SIGKILL)
    while os.path.exists(f"/proc/{left}/fd/0"):  # it lets go as it dies
        time.sleep(0.01)
    with directory_lock(tmp_path / "held", Busy()):
        pass


def test_a_directory_that_cannot_be_made_is_told_and_not_called_busy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for place in (tmp_path / "file", tmp_path / "nowhere", tmp_path / "nowhere" / "held"):
        with pytest.raises(FileExistsError), directory_lock(place, Busy()):
            pass
    with pytest.raises(FileNotFoundError), directory_lock(Path("/proc/none"), Busy()):
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


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_holds_nobody_up(tmp_path, monkeypatch, kind, number):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    told = pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext()
    with told, LOCKS[kind](tmp_path / "place", Exception("busy")):
        pass
