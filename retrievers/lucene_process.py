"""A process of its own in which Lucene writes: Java there does not outlive whoever asked for it.

``python -m retrievers.lucene_process HEAP`` takes one job after the other from its standard input,
a JSON list a line, and ends with it. What Java says goes to standard output, then how the job went.
"""

import errno
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from graphpo_agent.errors import ToolError
from retrievers.jvm import java_exception, start_jvm

__all__ = ["LuceneProcess", "java_failure"]

_DONE = "job done"
_FAILED = "job failed: "
_INDEXER = "io.anserini.index.IndexCollection"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LuceneProcess:
    """Jobs for Lucene's writers, to be used in ``with``; the process starts with the first.

    Example::

        with LuceneProcess("2g") as lucene:
            for line in lucene.index(["-collection", "JsonCollection", ...]):
                print(line)
            lucene.merge([Path("a"), Path("b")], Path("both"))
    """

    def __init__(self, heap: str) -> None:
        """``heap`` is Java's memory, such as ``2g``."""
        self._heap = heap
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "LuceneProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()  # finished work is on disk
            self._process.communicate()

    def index(self, arguments: Sequence[str]) -> Iterator[str]:
        """Run Anserini's indexer and give what it says; last, how many documents are there.

        Raises:
            OSError: the disk is full.
            ToolError: Java failed.
        """
        return self._run("index", *arguments)

    def merge(self, parts: Sequence[Path], out: Path) -> None:
        """One index, of one segment, of all documents of several.

        Raises:
            OSError: the disk is full.
            ToolError: Java failed.
        """
        for _ in self._run("merge", str(out), *map(str, parts)):
            pass

    def _run(self, *job: str) -> Iterator[str]:
        self._process = process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        last = ""
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; what it said last is still to be read
        for line in process.stdout:
            text = line.rstrip("\n")
            if text == _DONE:
                return
            if text.startswith(_FAILED):
                raise java_failure(f"lucene: {job[0]} failed ({text.removeprefix(_FAILED)})")
            last = text.strip() or last
            yield text
        raise java_failure(f"lucene: Java ended with status {process.wait()} ({last})")

    def _started(self) -> "subprocess.Popen[str]":
        """It inherits the lock of the directory that is built: free when both have gone."""
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "retrievers.lucene_process", self._heap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            close_fds=False,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )


def java_failure(text: str) -> OSError | ToolError:
    """What to raise where Java said ``text``: the disk's own error where that is the reason."""
    full = next((code for code in _FULL if os.strerror(code) in text), None)
    return ToolError(text) if full is None else OSError(full, os.strerror(full))


def _main(heap: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    jobs: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    find_class = start_jvm(heap)
    do = {"index": _index, "merge": _merge}
    while True:
        name, *arguments = jobs.get()
        try:
            do[name](find_class, arguments)
        except java_exception() as error:
            print(_FAILED + " ".join(str(error).split("\n")[0].split()), flush=True)
        else:
            print(_DONE, flush=True)


def _listen(jobs: "queue.SimpleQueue[list[str]]") -> None:
    """Pass jobs on; end the process, whatever Java does, when nobody is left to give any."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)


def _index(find_class: Callable[[str], Any], arguments: Sequence[str]) -> None:
    """Anserini goes on after an error: what the index holds says how it went."""
    find_class(_INDEXER).main(arguments)
    place = _directory(find_class, arguments[arguments.index("-index") + 1])
    held, readers = 0, find_class("org.apache.lucene.index.DirectoryReader")
    if readers.indexExists(place):
        reader = readers.open(place)
        held = reader.numDocs()
        reader.close()
    print(f"in the index: {held}", flush=True)


def _merge(find_class: Callable[[str], Any], arguments: Sequence[str]) -> None:
    """Merge the segments of all indexes into one new segment; nothing is copied before."""
    out, *parts = arguments
    open_reader = find_class("org.apache.lucene.index.DirectoryReader").open
    readers = [open_reader(_directory(find_class, part)) for part in parts]
    leaves = [leaf for reader in readers for leaf in _elements(reader.leaves())]
    settings = find_class("org.apache.lucene.index.IndexWriterConfig")(None)
    # In this thread: where one of its own meets a full disk, Lucene may wait for it for ever.
    settings.setMergeScheduler(find_class("org.apache.lucene.index.SerialMergeScheduler")())
    writer = _writer_class()(_directory(find_class, out), settings)
    if leaves:
        writer.addIndexes([_codec_reader(leaf.reader()) for leaf in leaves])
    writer.forceMerge(1)
    writer.close()
    for reader in readers:
        reader.close()


def _elements(list_: Any) -> list[Any]:
    return [list_.get(number) for number in range(list_.size())]


def _codec_reader(reader: Any) -> Any:
    return importlib.import_module("jnius").cast("org.apache.lucene.index.CodecReader", reader)


def _writer_class() -> Any:
    """Lucene's IndexWriter; by itself pyjnius does not find the method that takes an array."""
    jnius = importlib.import_module("jnius")
    package = "org/apache/lucene"
    settings = f"L{package}/store/Directory;L{package}/index/IndexWriterConfig;"

    class IndexWriter(jnius.JavaClass, metaclass=jnius.MetaJavaClass):
        __javaclass__ = f"{package}/index/IndexWriter"
        __javaconstructor__ = ((f"({settings})V", False),)
        addIndexes = jnius.JavaMethod(f"([L{package}/index/CodecReader;)J")
        forceMerge = jnius.JavaMethod("(I)V")
        close = jnius.JavaMethod("()V")

    return IndexWriter


def _directory(find_class: Callable[[str], Any], path: str) -> Any:
    place = find_class("java.io.File")(path).toPath()
    return find_class("org.apache.lucene.store.FSDirectory").open(place)


if __name__ == "__main__":
    _main(sys.argv[1])
