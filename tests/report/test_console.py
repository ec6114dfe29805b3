import io
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphpo_agent.report.console as console_module
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.errors import RewardError
from graphpo_agent.report.console import RunConsole, TimeLeft
from graphpo_agent.report.watch import Watch
from graphpo_agent.train_run import train_run
from tests.report.sample_run import metric_rows, write_lines
from tests.worlds import run_arguments


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _watch(stream: io.StringIO, rows: list[dict[str, float]]) -> str:
    console = RunConsole(stream)
    console.tell(["graphpo → runs/kb"])
    console.start(len(rows) - 1)
    for row in rows:
        console.step(row)
    console.close()
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_elsewhere_than_on_a_terminal_there_is_one_plain_line_per_step() -> None:
    lines = _watch(io.StringIO(), metric_rows(12)).splitlines()

    assert lines[0] == "graphpo → runs/kb"
    names = "step, reward, held-out, length, entropy, merged, tokens, tok/s, left"
    assert lines[1].split() == names.split(", ")
    assert [line.split()[0] for line in lines[2:]] == [str(step) for step in range(13)]
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_held_out_accuracy_stands_on_evaluated_steps_only() -> None:
    rows = metric_rows(12)
    lines = _watch(io.StringIO(), rows).splitlines()[2:]

    start = len("step  reward  ") + 1
    cells = [line[start : start + len("held-out")].strip() for line in lines]
    assert [bool(cell) for cell in cells] == ["eval/accuracy" in row for row in rows]
    assert cells[0] == "21.0%"


@pytest.mark.parametrize("columns", [20, 40, 60, 79, 200])
def test_a_narrow_terminal_keeps_the_most_important_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    header, *lines = _watch(io.StringIO(), metric_rows(3)).splitlines()[1:]

    assert header.split()[:2] == ["step", "reward"]
    assert max(len(line) for line in [header, *lines]) <= columns
    assert ("tok/s" in header) == (columns >= 79)


def test_what_is_not_known_is_a_dash_and_never_an_error() -> None:
    line = _watch(io.StringIO(), [{}]).splitlines()[-1]
    assert set(line.split()) == {"–"}


def test_the_column_names_come_again_before_they_scroll_away() -> None:
    lines = _watch(io.StringIO(), metric_rows(60)).splitlines()
    headers = [i for i, line in enumerate(lines) if "reward" in line]
    assert max(b - a for a, b in itertools.pairwise(headers)) <= 26


def test_a_terminal_gets_a_bar_with_accuracy_and_time_left_and_its_cursor_back() -> None:
    text = _watch(_Terminal(), [r for r in metric_rows(10) if r["step"] != 5])

    assert "step 10/9 · held-out 21.0% → " in text
    assert "100%" in text
    assert re.search(r"(?<!\d)0s left", text)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_that_is_too_long_keeps_the_share_and_the_time_left(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(console_module, "BAR_SECONDS", 0.0)
    stream = _Terminal()
    console = RunConsole(stream)
    console.start(1200)
    for step, accuracy in ((0, 0.1), (600, 0.56)):
        row = {"step": step, "progress": step / 1200, "time/seconds": 150.0 * step}
        console.step(row | {"eval/accuracy": accuracy})
    console.working(lambda: "step 601: 12.9k tokens, 13 of 16 graphs [/]")
    console.close()
    last = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue()).split("\r")[-1].rstrip()
    assert last.startswith("step 600/1200 · hel") and last.endswith(" 50% 25h00m left")
    assert "…" in last and len(last) <= columns


def test_a_bar_goes_on_from_the_accuracies_before_a_resume(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metric_rows(12))
    stream = _Terminal()
    console = RunConsole(stream)
    console.start(14)
    console.goes_on(tmp_path)
    console.step({"step": 13, "progress": 13 / 14, "time/seconds": 60.0, "eval/accuracy": 0.75})
    console.close()
    assert "step 13/14 · held-out 21.0% → 75.0%" in stream.getvalue()


def test_text_from_outside_is_not_read_as_markup() -> None:
    stream = io.StringIO()
    console = RunConsole(stream)
    console.tell(["[bold]model[/bold]"])
    console.start(None)
    console.note("[red]saved[/red]")
    console.close()
    console.close()
    assert stream.getvalue() == "[bold]model[/bold]\n[red]saved[/red]\n"


@given(
    pace=st.floats(1e-5, 0.1),
    start=st.floats(0, 1e4),
    before=st.floats(0, 0.4),
    steps=st.integers(2, 5),
)
def test_at_a_constant_pace_the_time_left_is_exact(
    pace: float, start: float, before: float, steps: int
) -> None:
    clock = TimeLeft()
    clock.update(before, start)
    for step in range(1, steps):
        progress = before + 0.1 * step
        seconds = start + 0.1 * step / pace
        assert clock.update(progress, seconds) == pytest.approx((1 - progress) / pace, rel=1e-6)


def test_the_pace_is_that_since_the_first_step() -> None:
    clock = TimeLeft()
    for progress, seconds in ((0.1, 60.0), (0.3, 100.0)):
        clock.update(progress, seconds)
    assert clock.update(0.5, 240.0) == pytest.approx(225.0)  # 180 s for 40 %


def test_without_progress_the_time_left_is_unknown() -> None:
    clock = TimeLeft()
    assert math.isnan(clock.update(0.0, 5.0))
    assert math.isnan(clock.update(math.nan, 6.0))
    assert math.isnan(clock.update(0.0, 9.0))


def test_a_run_that_fails_gives_the_terminal_back(reach: Path, tmp_path: Path) -> None:
    stream = _Terminal()
    arguments = run_arguments(reach, tmp_path / "run", "reward=tests.worlds:bad_reward")
    config = load_config(RunConfig, arguments[0], arguments[1:])
    with pytest.raises(RewardError, match="outside"):
        train_run(config, None, RunConsole(stream))
    text = stream.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


class _Clock:
    """Stands for the ``time`` module of the console."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_inside_a_step_a_line_breaks_a_long_silence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = _Clock(), io.StringIO()
    monkeypatch.setattr(console_module, "time", clock)
    console = RunConsole(stream)
    console.start(9)
    watch = Watch(console, "step 1")
    watch.growing(4)
    for _ in range(100):
        clock.now += 1.0
        watch.drawn(700)
    watch.finished(None)
    console.step({"step": 1.0})
    clock.now += 59.0
    watch.learned(0.1)
    clock.now += 2.0
    watch.learned(0.25)
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1: 42k tokens, 0 of 4 graphs"
    assert "reward" in lines[1] and lines[2].split()[0] == "1"
    assert lines[3:] == ["step 1: update 25.0%"]


@pytest.mark.parametrize("evaluated", [False, True])
def test_inside_a_step_a_terminals_bar_says_how_far_it_is(
    evaluated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stream = _Clock(), _Terminal()
    monkeypatch.setattr(console_module, "time", clock)
    monkeypatch.setenv("COLUMNS", "160")
    console = RunConsole(stream)
    console.start(9)
    if evaluated:
        console.step(metric_rows(1)[0])
    watch = Watch(console, "step 1")
    watch.growing(3)
    watch.drawn(20)
    clock.now += 1.0
    watch.finished(None)
    console.close()
    before = "step 0/9 · held-out 21.0%" if evaluated else "starting"
    assert f"{before} · step 1: 20 tokens, 1 of 3 graphs " in stream.getvalue()
