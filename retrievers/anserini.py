"""Anserini's jar, which holds Lucene: found on this machine, or fetched once.

It is published inside pyserini. Pyserini as a Python package depends on gigabytes that BM25 does
not need, so the jar is taken out of its source archive, which pip fetches with the user's own
settings for indexes, mirrors and proxies.
"""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphpo_agent.errors import ToolError
from retrievers.progress import say

__all__ = ["PYSERINI", "SourceArchive", "cached_jar", "find_jar"]

_VARIABLE = "GRAPHPO_ANSERINI_JAR"
_PLACE = "resources/jars"


@dataclass(frozen=True, slots=True)
class SourceArchive:
    """A published source archive and the one file of it that is kept.

    Example::

        SourceArchive("pyserini", "1.6.0", sha256="e347…", megabytes=165,
                      member="pyserini-1.6.0/pyserini/resources/jars/anserini-1.7.1-fatjar.jar")
    """

    package: str
    version: str
    sha256: str
    """Of the archive; another archive is refused before anything in it is run or kept."""
    megabytes: int
    member: str
    """The path of the file inside the archive."""


PYSERINI = SourceArchive(
    package="pyserini",
    version="1.6.0",
    sha256="e34761d700b33613c26bc61113effc6d65598dee6ada28a33214f79350f833f4",
    megabytes=165,
    member=f"pyserini-1.6.0/pyserini/{_PLACE}/anserini-1.7.1-fatjar.jar",
)


_MEND = (
    f"or take the jar out of pyserini-{PYSERINI.version}.tar.gz yourself and name it in {_VARIABLE}"
)


def find_jar() -> Path:
    """The jar that GRAPHPO_ANSERINI_JAR names, else an installed pyserini's, else the cached one.

    Raises:
        ToolError: the variable names no file, or the jar is nowhere and cannot be fetched.
    """
    if _VARIABLE in os.environ:
        jar = Path(os.environ[_VARIABLE])
        if not jar.is_file():
            raise ToolError(f"{_VARIABLE}: {jar} is not a file; it must name anserini-*-fatjar.jar")
        return jar
    spec = importlib.util.find_spec("pyserini")
    for place in (spec and spec.submodule_search_locations) or ():
        for jar in sorted((Path(place) / _PLACE).glob("anserini-*-fatjar.jar")):
            return jar
    return cached_jar(_cache_directory(), PYSERINI)


def cached_jar(cache: Path, archive: SourceArchive) -> Path:
    """The member of ``archive`` in ``cache``; fetched if it is not there, by one process only.

    Raises:
        ToolError: it cannot be fetched or written, or is not what was published.
    """
    jar = cache / Path(archive.member).name
    if jar.exists():
        return jar
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache):
            if not jar.exists():
                say(
                    f"fetching {archive.package} {archive.version} ({archive.megabytes} MB) once "
                    f"for its Lucene: {jar}"
                )
                _fetch(archive, jar)
    except OSError as error:
        raise ToolError(f"{cache}: cannot be written ({error.strerror}); {_MEND}") from error
    return jar


def _fetch(archive: SourceArchive, jar: Path) -> None:
    with tempfile.TemporaryDirectory(dir=jar.parent, prefix=".fetching.") as name:
        work = Path(name)
        _download(archive, work)
        [downloaded] = work.glob("*.tar.gz")
        with downloaded.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != archive.sha256:
            raise ToolError(f"{downloaded.name}: SHA-256 is {found}, expected {archive.sha256}")
        with tarfile.open(downloaded) as tar, (work / jar.name).open("wb") as file:
            member = tar.extractfile(archive.member)
            assert member is not None
            while block := member.read(1 << 20):
                file.write(block)
        os.replace(work / jar.name, jar)


def _download(archive: SourceArchive, work: Path) -> None:
    """The source archive, through this Python's pip, which checks the hash before it looks in."""
    # Not by importlib.util.find_spec: to setuptools' own finder a search for pip means that pip is
    # at work in this process, and from then on neither it nor torch compiles anything there.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ToolError(f"fetching {archive.package} needs pip: install it in this Python, {_MEND}")
    requirements = work / "requirements.txt"
    requirements.write_text(
        f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n"
    )
    options = ["--no-deps", "--no-binary", archive.package, "--require-hashes"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run(
        [*command, "--dest", str(work), "--requirement", str(requirements)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR:")]
        reason = " ".join((errors or done.stdout.splitlines() or ["pip failed"])[-1].split())
        raise ToolError(
            f"{archive.package} {archive.version} cannot be fetched ({reason}); {_MEND}"
        )


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Other processes wait here; the system lets go of the directory when a process dies."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cache_directory() -> Path:
    """Where this user's programs keep what can be fetched again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "graphpo"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "graphpo"
    return Path.home() / ".cache" / "graphpo"
