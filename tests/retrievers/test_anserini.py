import hashlib
import importlib.machinery
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from graphpo_agent.errors import ToolError
from retrievers.anserini import SourceArchive, cached_jar, find_jar
from tests.worlds import ROOT

JAR = bytes(range(256)) * 5000
BACKEND = """
import os, pathlib
log = pathlib.Path(os.environ["BUILD_LOG"])
log.touch()

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    log.write_text(log.read_text() + "built\\n")
    info = pathlib.Path(directory) / "pyserini_like-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: pyserini-like\\nVersion: 1.0\\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\n")
    return info.name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise NotImplementedError
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
PROGRAM = """
import sys
from pathlib import Path
from retrievers.anserini import SourceArchive, cached_jar
archive = SourceArchive("pyserini-like", "1.0", sys.argv[2], 1, sys.argv[3])
print(cached_jar(Path(sys.argv[1]), archive))
"""


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A source archive in a package index of its own, published the way pyserini is."""
    index = tmp_path / "index"
    index.mkdir()
    path, root = index / "pyserini_like-1.0.tar.gz", "pyserini_like-1.0"
    files = {
        "pyproject.toml": PYPROJECT.encode(),
        "backend.py": BACKEND.encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: pyserini-like\nVersion: 1.0\n",
        "jars/anserini-9-fatjar.jar": JAR,
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{root}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("BUILD_LOG", str(tmp_path / "built"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return SourceArchive("pyserini-like", "1.0", digest, 1, f"{root}/jars/anserini-9-fatjar.jar")


def test_processes_that_need_the_jar_at_once_fetch_it_once(tmp_path, archive):
    cache = tmp_path / "cache" / "graphpo"
    command = [sys.executable, "-c", PROGRAM, str(cache), archive.sha256, archive.member]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert {out.strip() for out, _ in results} == {str(cache / "anserini-9-fatjar.jar")}
    assert sum("fetching pyserini-like 1.0 (1 MB)" in error for _, error in results) == 1
    assert (tmp_path / "built").read_text() == "built\n"
    assert os.listdir(cache) == ["anserini-9-fatjar.jar"]
    assert (cache / "anserini-9-fatjar.jar").read_bytes() == JAR


def test_setuptools_can_be_used_after_a_jar_was_fetched(tmp_path, archive):
    # torch.compile imports it for its first kernel.
    command = [sys.executable, "-c", PROGRAM + "import setuptools", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, archive.sha256, archive.member], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_without_pip_the_message_says_what_to_do(tmp_path, archive, monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    with pytest.raises(ToolError, match=r"fetching pyserini-like needs pip: install it .* or"):
        cached_jar(tmp_path / "cache", archive)


def test_an_archive_that_was_tampered_with_is_neither_run_nor_kept(tmp_path, archive):
    other = SourceArchive("pyserini-like", "1.0", "0" * 64, 1, archive.member)
    with pytest.raises(ToolError, match="cannot be fetched") as caught:
        cached_jar(tmp_path / "cache", other)
    assert "\n" not in str(caught.value) and "GRAPHPO_ANSERINI_JAR" in str(caught.value)
    assert not (tmp_path / "built").exists() and os.listdir(tmp_path / "cache") == []


def test_without_the_network_the_message_says_what_to_do(tmp_path, archive, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ToolError, match="No matching distribution found for pyserini-like"):
        cached_jar(tmp_path / "cache", archive)
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="cannot be written"):
        cached_jar(tmp_path / "file" / "cache", archive)


def test_the_named_jar_goes_before_an_installed_pyserinis_and_that_before_the_cache(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GRAPHPO_ANSERINI_JAR", raising=False)
    cached = tmp_path / "graphpo" / "anserini-1.7.1-fatjar.jar"
    cached.parent.mkdir()
    cached.write_bytes(JAR)
    monkeypatch.setattr("retrievers.anserini.importlib.util.find_spec", lambda name: None)
    assert find_jar() == cached
    installed = tmp_path / "pyserini" / "resources" / "jars" / "anserini-2-fatjar.jar"
    installed.parent.mkdir(parents=True)
    installed.write_bytes(JAR)
    spec = importlib.machinery.ModuleSpec("pyserini", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "pyserini")]
    monkeypatch.setattr("retrievers.anserini.importlib.util.find_spec", lambda name: spec)
    assert find_jar() == installed
    named = tmp_path / "mine.jar"
    monkeypatch.setenv("GRAPHPO_ANSERINI_JAR", str(named))
    with pytest.raises(ToolError, match=r"GRAPHPO_ANSERINI_JAR: .* is not a file"):
        find_jar()
    Path(named).write_bytes(JAR)
    assert find_jar() == named
