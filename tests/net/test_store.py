import json
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ToolError
from graphpo_agent.net.client import HttpService, Limits
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.secrets import Redactor, secret_from_env
from graphpo_agent.net.store import CallStore, request_key
from tests.net.servers import always, answer, in_turn, serving
from tests.worlds import files_of_at_most


class Counted:
    """Answers with how often it was asked."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return b"%d" % self.calls


@pytest.mark.parametrize(
    ("mode", "first", "again", "calls"),
    [("replay", b"1", b"1", 1), ("record", b"1", b"2", 2), ("off", b"1", b"2", 2)],
)
def test_modes(tmp_path, mode, first, again, calls):
    path, call = tmp_path / "deep" / "calls.sqlite", Counted()
    store = CallStore(path, mode)
    assert [store.fetch("k", call), store.fetch("k", call)] == [first, again]
    assert call.calls == calls and path.exists() == (mode != "off")
    if mode != "off":
        assert CallStore(path, "strict").fetch("k", call) == again
        assert CallStore(path, "replay").fetch("k", call) == again
        assert call.calls == calls


def test_bare_off_of_yaml_is_off(tmp_path):
    assert CallStore(tmp_path / "x.sqlite", False).fetch("k", lambda: b"1") == b"1"
    assert not (tmp_path / "x.sqlite").exists()


def test_strict_never_calls_and_names_the_request(tmp_path):
    path, call = tmp_path / "calls.sqlite", Counted()
    with pytest.raises(ToolError, match="does not exist"):
        CallStore(path, "strict")
    assert not path.exists()
    CallStore(path).fetch("known", call)
    with pytest.raises(ToolError, match="no answer is stored for GET http://host/x") as caught:
        CallStore(path, "strict").fetch(request_key("GET", "http://host/x"), call)
    assert call.calls == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["replay", "record", "off"])
def test_failed_call_is_not_stored(tmp_path, mode):
    def fail():
        raise CallFailed("transient", "down")

    store = CallStore(tmp_path / "calls.sqlite", mode)
    with pytest.raises(CallFailed, match="down"):
        store.fetch("k", fail)
    assert store.fetch("k", lambda: b"up") == b"up"


@pytest.mark.parametrize("mode", ["replay", "record"])
def test_strict_repeats_the_failure_of_a_call_that_was_never_answered(tmp_path, mode):
    path = tmp_path / "calls.sqlite"

    def fail(kind, message):
        def call():
            raise CallFailed(kind, message)

        with pytest.raises(CallFailed, match=message):
            CallStore(path, mode).fetch(message, call)

    fail("transient", "the host is down")
    fail("rate_limit", "too many")
    fail("transient", "passed")
    CallStore(path, mode).fetch("passed", lambda: b"up")
    strict = CallStore(path, "strict")
    for kind, message in (("transient", "the host is down"), ("rate_limit", "too many")):
        with pytest.raises(CallFailed, match=message) as caught:
            strict.fetch(message, lambda: b"never asked")
        assert caught.value.kind == kind
    assert strict.fetch("passed", lambda: b"never asked") == b"up"
    with pytest.raises(ToolError, match="no answer is stored"):
        strict.fetch("other", lambda: b"never asked")


def test_a_failure_takes_the_place_of_an_answer_that_was_recorded_before(tmp_path):
    path = tmp_path / "calls.sqlite"
    CallStore(path, "record").fetch("k", lambda: b"old")

    def fail():
        raise CallFailed("transient", "down")

    for mode in ("record", "strict"):
        with pytest.raises(CallFailed, match="down"):
            CallStore(path, mode).fetch("k", fail)


def read_as_another_user(path):
    if os.geteuid() == 0:
        os.setuid(65534)
    return CallStore(path, "strict").fetch("k", lambda: b"")


def test_strict_reads_where_it_may_not_write():
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        store = CallStore(place / "calls.sqlite")
        store.fetch("k", lambda: b"v")
        store._database.close()  # as its process's end does
        (place / "calls.sqlite").chmod(0o444)
        place.chmod(0o555)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(read_as_another_user, (place / "calls.sqlite",)) == b"v"
        place.chmod(0o755)


def test_strict_reads_files_without_failures(tmp_path):
    path = tmp_path / "calls.sqlite"
    CallStore(path).fetch("k", lambda: b"v")
    database = sqlite3.connect(path)
    database.execute("DROP TABLE failures")
    database.close()
    strict = CallStore(path, "strict")
    assert strict.fetch("k", lambda: b"") == b"v"
    with pytest.raises(ToolError, match="no answer is stored"):
        strict.fetch("other", lambda: b"")


def test_equal_calls_of_one_moment_are_made_once(tmp_path):
    store, entered = CallStore(tmp_path / "calls.sqlite", "record"), []
    begun, gate = threading.Event(), threading.Event()

    def call():
        entered.append(1)
        begun.set()
        gate.wait(10)
        return b"%d" % len(entered)

    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(store.fetch("k", call))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    begun.wait(10)
    other = store.fetch("other", lambda: b"not held up")
    gate.set()
    for thread in threads:
        thread.join()
    assert other == b"not held up"
    # A thread that came when the first call was over made one of its own.
    assert len(answers) == 8 and len(set(answers)) == len(entered)


def test_nobody_waits_for_a_call_whose_thread_was_ended(tmp_path):
    store, begun, gate = CallStore(tmp_path / "calls.sqlite"), threading.Event(), threading.Event()

    def end():
        begun.set()
        gate.wait(10)
        raise SystemExit(3)

    ends = []

    def ask():
        try:
            store.fetch("k", end)
        except SystemExit as error:
            ends.append(error.code)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    gate.set()
    for thread in threads:
        thread.join(10)
    assert ends == [3] * 8
    assert store.fetch("k", lambda: b"later") == b"later"


def test_first_answer_stays_when_another_process_was_faster(tmp_path):
    path = tmp_path / "calls.sqlite"
    slow, fast = CallStore(path), CallStore(path)

    def call():
        fast.fetch("k", lambda: b"first")
        return b"second"

    assert slow.fetch("k", call) == b"first"
    assert CallStore(path, "record").fetch("k", lambda: b"third") == b"third"
    assert fast.fetch("k", call) == b"third"


def test_opening_waits_for_another_process_that_is_writing(tmp_path, monkeypatch):
    path, waits = tmp_path / "calls.sqlite", []
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")

    def release(seconds):
        waits.append(seconds)
        writer.execute("COMMIT")

    monkeypatch.setattr(time, "sleep", release)
    assert CallStore(path).fetch("k", lambda: b"1") == b"1"
    assert len(waits) == 1


def hammer(path, mode, process, barrier):
    """32 threads that ask for shared and own keys; every answer must be the stored one."""
    barrier.wait(60)
    store, wrong = CallStore(path, mode), []

    def work(number):
        for turn in range(10):
            shared, own = f"shared {(number + turn) % 20}", f"own {process} {number} {turn}"
            value = f"{process} {number} {turn}".encode() * 200
            first = store.fetch(shared, partial(bytes, value))
            if mode == "replay" and store.fetch(shared, lambda: b"") != first:
                wrong.append(shared)
            if store.fetch(own, partial(bytes, value)) != value:
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise SystemExit(len(wrong))


@pytest.mark.parametrize("mode", ["replay", "record"])
def test_threads_and_processes_share_a_store(tmp_path, mode):
    path = tmp_path / "calls.sqlite"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=hammer, args=(path, mode, number, barrier)) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (count,) = sqlite3.connect(path).execute("SELECT count(*) FROM calls").fetchone()
    assert count == 20 + 3 * 32 * 10


def corrupt(path):
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)


def text_file(path):
    path.write_text("no database " * 100)


def other_database(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE calls (name TEXT)")
    database.close()


@pytest.mark.parametrize("mode", ["replay", "record", "strict"])
@pytest.mark.parametrize("spoil", [corrupt, text_file, other_database, Path.mkdir])
def test_unusable_file_is_one_clear_line(tmp_path, spoil, mode):
    path = tmp_path / "calls.sqlite"
    spoil(path)
    with pytest.raises(ToolError, match="call store") as caught:
        CallStore(path, mode)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_unwritable_place_and_unknown_mode_are_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="cannot be used"):
        CallStore(tmp_path / "file" / "calls.sqlite")
    with pytest.raises(ToolError, match="off, record, replay, strict"):
        CallStore(tmp_path / "calls.sqlite", "repeat")  # pyright: ignore[reportArgumentType]


def test_a_full_disk_costs_no_stored_answer(tmp_path):
    path = tmp_path / "calls.sqlite"
    store = CallStore(path)
    store.fetch("first", lambda: b"1")
    with files_of_at_most(50_000), pytest.raises(ToolError, match="make room for it, then go on"):
        store.fetch("second", lambda: bytes(100_000))
    store.fetch("second", lambda: b"2")
    strict = CallStore(path, "strict")
    assert [strict.fetch(key, Counted()) for key in ("first", "second")] == [b"1", b"2"]


def test_file_that_spoils_later_is_one_clear_line(tmp_path):
    path = tmp_path / "calls.sqlite"
    store = CallStore(path)
    other = sqlite3.connect(path)
    other.execute("DROP TABLE calls")
    other.close()
    with pytest.raises(ToolError, match="no such table"):
        store.fetch("k", lambda: b"1")


def test_request_names_do_not_depend_on_order_or_spelling():
    name = request_key(
        "get", "http://h/x", params={"b": 1, "a": "2", "c": None}, headers={"A": "1", "b": "2"}
    )
    assert name == request_key(
        "GET", "http://h/x", params={"a": 2, "b": "1"}, headers={"B": "2", "a": "1"}
    )
    assert request_key("POST", "u", body={"a": 1, "b": 2}) == request_key(
        "POST", "u", body={"b": 2, "a": 1}
    )
    assert len(request_key("GET", "u", body="x" * 9999)) == 200 + 1 + 64


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["GET", "POST"]),
            st.sampled_from(["http://h/x", "http://h/y"]),
            st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "1"])),
            st.sampled_from([None, [], {}, "", 0, False, [1], {"a": None}, "\ud800"]),
            st.dictionaries(st.sampled_from("ab"), st.sampled_from(["", "1"])),
        ),
        unique_by=lambda one: json.dumps(one, sort_keys=True),
    )
)
def test_different_requests_have_different_names(requests):
    names = [
        request_key(method, url, params=params, body=body, headers=headers)
        for method, url, params, body, headers in requests
    ]
    assert len(set(names)) == len(names)
    assert all(name.encode() for name in names)


def file_bytes(path):
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


def test_no_credential_reaches_the_file(tmp_path):
    header_key, param_key = "sk-Very/secret+1234", "param=key&5678 ü"

    def echo(before, request):
        return answer(
            {"auth": request.headers["Authorization"], "path": request.path, "plain": header_key},
            X_Echo=header_key,
            Set_Cookie="session=cookie-from-server",
        )

    path = tmp_path / "calls.sqlite"
    with serving(echo) as server:

        def service(store, key):
            return HttpService(
                "s",
                secret_headers={"Authorization": f"Bearer {key}"},
                secret_params={"api_key": param_key},
                store=store,
            )

        first = service(CallStore(path), header_key).call("GET", server.url, params={"q": "oak"})
        assert header_key in server.requests[0].headers["Authorization"]
        raw = file_bytes(path)
        for spelled in ("sk-Very", "secret+1234", "5678", "param", "cookie-from-server"):
            assert spelled.encode() not in raw
        # Another key finds the same answer: credentials are not part of the name.
        again = service(CallStore(path, "strict"), "another-key-1").call(
            "GET", server.url, params={"q": "oak"}
        )
    assert again == first and len(server.requests) == 1
    assert again.json()["plain"] == "***" and again.status == 200


def test_definitive_refusals_are_stored_and_passing_failures_are_not(tmp_path):
    limits = Limits(tries=1)
    with serving(in_turn(answer({}, 503), answer({"no": 1}, 422), answer({"ok": 1}))) as server:
        service = HttpService("s", limits=limits, store=CallStore(tmp_path / "calls.sqlite"))
        kinds = []
        for _ in range(3):
            with pytest.raises(CallFailed) as caught:
                service.call("POST", server.url, body=[1])
            kinds.append(caught.value.kind)
        assert kinds == ["transient", "bad_arguments", "bad_arguments"]
        assert len(server.requests) == 2
        assert service.call("POST", server.url, body=[2]).json() == {"ok": 1}


@pytest.mark.parametrize("status", [401, 402])
def test_what_stops_the_run_is_not_stored(tmp_path, status):
    with serving(in_turn(answer({}, status), answer({"ok": 1}))) as server:
        service = HttpService("s", store=CallStore(tmp_path / "calls.sqlite"))
        with pytest.raises(ToolError):
            service.call("GET", server.url)
        assert service.call("GET", server.url).json() == {"ok": 1}


def test_replay_needs_no_server(tmp_path):
    path = tmp_path / "calls.sqlite"
    with serving(always({"answer": "bytes \x00 ü"})) as server:
        recorded = HttpService("s", store=CallStore(path)).call("GET", server.url)
        strict = HttpService("s", store=CallStore(path, "strict"))
    assert strict.call("GET", server.url) == recorded
    with pytest.raises(ToolError, match="no answer is stored for POST"):
        strict.call("POST", server.url)


def test_secret_from_env(monkeypatch):
    monkeypatch.setenv("SOME_KEY", " sk-12345678 \n")
    assert secret_from_env("SOME_KEY") == "sk-12345678"
    for value in ("", "  ", "sk-geheim-ü", "two\nlines-12345"):
        monkeypatch.setenv("SOME_KEY", value)
        with pytest.raises(ToolError, match="SOME_KEY") as caught:
            secret_from_env("SOME_KEY")
        assert "geheim" not in str(caught.value) and "12345" not in str(caught.value)
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ToolError, match="SOME_KEY is not set"):
        secret_from_env("SOME_KEY")


def test_placeholder_keys_do_not_spoil_texts():
    assert Redactor(["Bearer EMPTY", ""]).text("an EMPTY box") == "an EMPTY box"
