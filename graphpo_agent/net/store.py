"""Recorded answers of outside services, so that a run or an evaluation can be repeated."""

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, get_args

from graphpo_agent.errors import ToolError, first_line
from graphpo_agent.net.failures import CallFailed

__all__ = ["CallStore", "StoreMode", "request_key"]

StoreMode = Literal["off", "record", "replay", "strict"]

_LABEL_CHARACTERS = 200
_BUSY_S = 60.0
"""How long one process waits for another's write."""
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def request_key(
    method: str,
    url: str,
    *,
    params: Mapping[str, Any] | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """The name of a request: a readable beginning and the SHA-256 of all of it.

    The order of parameters, of JSON keys and of headers, and the case of header names do not
    count; a parameter that is None is absent. Leave credentials out of the arguments.

    Example: ``request_key("GET", "http://host/search", params={"q": "oak"})`` is
    ``'GET http://host/search {"q": "oak"} 5c9d…'``.
    """
    given = {name: str(value) for name, value in (params or {}).items() if value is not None}
    lowered = {name.lower(): value for name, value in (headers or {}).items()}
    parts = [method.upper(), url, given, body, lowered]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    shown = [json.dumps(part, sort_keys=True, ensure_ascii=False) for part in (given, body) if part]
    label = " ".join([method.upper(), url, *shown])[:_LABEL_CHARACTERS]
    return f"{label.encode(errors='backslashreplace').decode()} {digest}"


class CallStore:
    """Answers by the name of their request, in one SQLite file.

    ``mode`` says what a call does:

    * ``off``: the file is never touched;
    * ``record``: every call is made, and its answer, or failure, replaces what is stored;
    * ``replay``: a stored answer is given where there is one; other calls are made and stored,
      the first answer stays;
    * ``strict``: a stored answer is given, or the failure that is stored of a call without one;
      any other call is an error. Nothing is written.

    A call that fails leaves its failure for ``strict``, so that an evaluation repeats with the
    outages it met; the other modes make it again. One that raises anything else stores nothing.
    Except in ``off``, equal calls that one process has under
    way at one moment are made once. Threads share a store, and so do several processes on one
    machine (SQLite's write-ahead log does not work on network file systems). Make a store after a
    process has forked, not before.

    Example::

        store = CallStore("calls.sqlite")
        store.fetch("GET http://host/a 5c9d…", lambda: b"answer")   # calls
        store.fetch("GET http://host/a 5c9d…", lambda: b"other")    # b"answer"
    """

    def __init__(self, path: str | Path, mode: StoreMode | Literal[False] = "replay") -> None:
        """Open the file; it and its directory are made where they are missing.

        Args:
            path: of the SQLite file.
            mode: see above; False is ``off``, as which YAML reads the bare word.

        Raises:
            ToolError: an unknown mode, a file that cannot be opened or written, or is no store;
                in ``strict`` also a file that does not exist.
        """
        self._mode = "off" if mode is False else mode
        if self._mode not in get_args(StoreMode):
            raise ToolError(
                f"call store {path}: mode {mode!r} is unknown; use {', '.join(get_args(StoreMode))}"
            )
        self._path = Path(path)
        self._under_way: dict[str, Future[bytes]] = {}
        self._under_way_lock = threading.Lock()
        self._database_lock = threading.Lock()
        if self._mode != "off":
            self._database = self._open()

    @property
    def asks(self) -> bool:
        """Whether any call can be made."""
        return self._mode != "strict"

    def fetch(self, key: str, call: Callable[[], bytes]) -> bytes:
        """The answer to the request named ``key``; ``call`` asks for it.

        Raises:
            CallFailed: the call failed, now or (``strict``) when it was recorded.
            ToolError: nothing is stored under this name (``strict``), or the file fails.
            Exception: whatever ``call`` raises.
        """
        if self._mode == "off":
            return call()
        with self._under_way_lock:
            future = self._under_way.get(key)
            leads = future is None
            if future is None:
                future = self._under_way[key] = Future()
        if not leads:
            return future.result()
        try:
            future.set_result(self._answer(key, call))
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._under_way_lock:
                del self._under_way[key]
        return future.result()

    def _answer(self, key: str, call: Callable[[], bytes]) -> bytes:
        stored = None if self._mode == "record" else self._read(key)
        if stored is not None:
            return stored
        if self._mode == "strict":
            self._repeat_failure(key)
            raise ToolError(
                f"call store {self._path}: no answer is stored for {key}; "
                'record it with mode "replay" first'
            )
        try:
            value = call()
        except CallFailed as failure:
            if self._mode == "record":
                self._execute("DELETE FROM calls WHERE request = ?", key)
            self._execute(
                "INSERT OR REPLACE INTO failures VALUES (?, ?, ?)", key, failure.kind, str(failure)
            )
            raise
        verb = "REPLACE" if self._mode == "record" else "IGNORE"
        self._execute(f"INSERT OR {verb} INTO calls VALUES (?, ?)", key, value)
        written = self._read(key)
        assert written is not None
        return written

    def _read(self, key: str) -> bytes | None:
        rows = self._execute("SELECT answer FROM calls WHERE request = ?", key)
        return rows[0][0] if rows else None

    def _repeat_failure(self, key: str) -> None:
        """Raise the CallFailed that is stored, if one is."""
        if not self._execute("SELECT 1 FROM sqlite_master WHERE name = 'failures'"):
            return  # an older file
        for kind, message in self._execute(
            "SELECT kind, message FROM failures WHERE request = ?", key
        ):
            raise CallFailed(kind, message)

    def _execute(self, statement: str, *values: Any) -> list[Any]:
        try:
            with self._database_lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _open(self) -> sqlite3.Connection:
        try:
            return self._open_to_read() if self._mode == "strict" else self._open_to_write()
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error

    def _open_to_write(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = self._connect("mode=rwc")
        _use_write_ahead_log(database)
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("CREATE TABLE IF NOT EXISTS calls (request TEXT PRIMARY KEY, answer BLOB)")
        database.execute(
            "CREATE TABLE IF NOT EXISTS failures "
            "(request TEXT PRIMARY KEY, kind TEXT, message TEXT)"
        )
        _check(database)
        return database

    def _open_to_read(self) -> sqlite3.Connection:
        if not self._path.is_file():
            raise ToolError(
                f'call store {self._path} does not exist; record it with mode "replay" first'
            )
        database = self._connect("mode=ro")
        try:
            _check(database)
        except sqlite3.OperationalError:
            # Beside a file that others may write to, SQLite writes even to read it.
            log = self._path.with_name(f"{self._path.name}-wal")
            if log.exists() and log.stat().st_size:
                raise
            database = self._connect("mode=ro&immutable=1")
            _check(database)
        return database

    def _connect(self, how: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self._path.absolute().as_uri()}?{how}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )

    def _unusable(self, error: Exception) -> ToolError:
        if getattr(error, "sqlite_errorcode", None) in _NO_ROOM:
            mend = "make room for it, then go on"
        elif self._mode == "strict":
            mend = "name another file"
        else:
            mend = "name another file or remove this one"
        return ToolError(f"call store {self._path} cannot be used: {first_line(error)}; {mend}")


def _check(database: sqlite3.Connection) -> None:
    """Raise sqlite3.Error unless a store can be read."""
    database.execute("SELECT request, answer FROM calls LIMIT 1").fetchall()


def _use_write_ahead_log(database: sqlite3.Connection) -> None:
    """Switch the journal, for which SQLite itself does not wait while others open the file."""
    give_up = time.monotonic() + _BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.01)
