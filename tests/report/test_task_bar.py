import io

from graphpo_agent.report.task_bar import TaskBar


def shown(seconds: float) -> str:
    """What a command that takes so long writes where there is no terminal."""
    stream = io.StringIO()
    with TaskBar(total=4, unit="graph", file=stream) as bar:
        began = bar.start_t
        for share in (0.25, 0.5, 1.0):
            bar._time = lambda share=share: began + share * seconds
            bar.drawn(20_000)
            bar.update()
    return stream.getvalue()


def test_elsewhere_than_on_a_terminal_a_long_command_says_once_a_minute_how_far_it_is() -> None:
    assert shown(50.0) == ""
    lines = shown(120.0).split("\r")
    assert [line.strip().split("|")[0] for line in lines] == ["", "25%", "50%", "75%"]
    assert "1/4" in lines[1] and "40k tokens" in lines[1]
    assert "3/4" in lines[-1] and "60k tokens" in lines[-1] and lines[-1].endswith("\n")
