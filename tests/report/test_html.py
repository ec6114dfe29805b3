import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from graphpo_agent.errors import GraphError, RunError
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import Credit
from graphpo_agent.report.charts import MAX_POINTS
from graphpo_agent.report.html import _NEWEST_GRAPHS, _line, choose_graph, write_report
from graphpo_agent.report.panels import PANELS, Panel
from graphpo_agent.report.run_files import read_run
from graphpo_agent.types import StepStatus
from tests.report.sample_run import kb_graph, metric_rows, write_lines, write_sample_run


class _Page(HTMLParser):
    """Counts elements and gathers attributes that could load something, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "class":
                self.classes += (value or "").split()
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def _credit_of(graph: RolloutGraph) -> Credit:
    assert graph.given_classes is not None
    (credit,) = GraphPO().assign_credit([graph], [graph.given_classes])
    return credit


def _report(run_dir: Path) -> tuple[str, _Page]:
    path = write_report(run_dir, _credit_of)
    assert path == run_dir / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, _Page(html)


def test_the_report_shows_headline_curves_graph_and_settings(tmp_path: Path) -> None:
    html, page = _report(write_sample_run(tmp_path / "kb-graphpo", steps=40))

    last = metric_rows(40)[-1]["eval/accuracy"]
    accuracy = f"21.0% → {100 * last:.1f}%"
    gained = f"+{100 * (last - 0.21):.1f} points; last value ±6.5 (95%)"  # 1.96 · 0.033
    for text in ("kb-graphpo", accuracy, "2m36s", "40 steps", "merge_threshold", "git_commit"):
        assert text in page.text
    assert gained in page.text and "runs/kb-graphpo" in page.text
    assert re.search(r"Tokens generated</p>\s*<p class=.tile-value.>576k<", html)
    assert "Held-out accuracy: sampled 21% at step 0" in html
    times = re.search(r"Time per step: rollout ([\d.]+) s at .*?; update ([\d.]+) s at ", html)
    assert times is not None and float(times[1]) > 1.5 > float(times[2])
    assert page.classes.count("chart") == 20
    assert page.classes.count("g-drawing") == 1
    for heading in ("Learning", "Rollouts", "Credit and update", "Cost", "Settings"):
        assert heading in page.text


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    html, page = _report(write_sample_run(tmp_path))

    assert all(link.startswith("#") for link in page.links)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert not re.search(r"@import|url\((?!#)", html)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    run = write_sample_run(tmp_path / "<img src=x>", steps=3)
    graph = kb_graph(evil, seed=4)
    for node in graph["nodes"]:
        node["state"] = evil
        node["key"] += evil
    write_lines(run / "graphs.jsonl", [graph])
    (run / "config.yaml").write_text(json.dumps({"method": {"name": evil}, evil: evil}))
    (run / "manifest.json").write_text(json.dumps({"command": [evil], evil: evil}))
    write_lines(run / "metrics.jsonl", [*metric_rows(2), {"step": 3, evil: 1.0}])

    html, page = _report(run)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert html.count("<script") == 1
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_names_that_no_encoding_holds_have_a_page(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run-\udcff", steps=3)
    write_lines(run / "graphs.jsonl", [kb_graph("task-\ud800", seed=4)])
    _, page = _report(run)
    assert "run-?" in page.text and "task-?" in page.text


def test_tasks_that_all_go_alike_claim_no_width(tmp_path: Path) -> None:
    spread = {"eval/accuracy": 0.0, "eval/standard_error": 0.02}
    write_sample_run(tmp_path)
    for error, shown in ((0.02, True), (0.0, False)):
        last = spread | {"step": 2, "eval/standard_error": error}
        write_lines(tmp_path / "metrics.jsonl", [spread | {"step": 0}, last])
        assert ("last value ±" in _report(tmp_path)[1].text) == shown


def test_accuracies_are_those_of_their_own_rows(tmp_path: Path) -> None:
    """The first evaluation, and the width of the last, may be missing: outages left too little."""
    write_sample_run(tmp_path)
    first = {"step": 1, "eval/accuracy": 0.5, "eval/standard_error": 0.05}
    write_lines(tmp_path / "metrics.jsonl", [first, {"step": 2, "eval/accuracy": 0.9}])
    text = _report(tmp_path)[1].text
    assert "before training unknown" in text and "→" not in text and "last value" not in text
    later = [first | {"step": step, "eval/accuracy": 0.6} for step in (2, 3)]
    write_lines(
        tmp_path / "metrics.jsonl", [{"step": 0}, first | {"eval/standard_error": 1}, *later]
    )
    assert "before training unknown; last value ±9.8 (95%)" in _report(tmp_path)[1].text


def _panel(title: str) -> Panel:
    return next(panel for panel in PANELS if panel.title == title)


def test_a_band_belongs_to_the_evaluations_that_it_surrounds(tmp_path: Path) -> None:
    rows = metric_rows(40)
    evaluated = [row for row in rows if "eval/accuracy" in row]
    for number, row in enumerate(evaluated, start=1):
        row["eval/standard_error"] = number / 100
    write_lines(tmp_path / "metrics.jsonl", rows)
    panel, metrics = _panel("Held-out accuracy"), read_run(tmp_path).metrics
    (sampled,) = _line(panel, metrics, "eval/accuracy", "sampled")
    (greedy,) = _line(panel, metrics, "eval/greedy_accuracy", "greedy")
    assert sampled.half_width == pytest.approx([0.0196 * n for n in range(1, 6)])
    assert sampled.x.tolist() == [0, 10, 20, 30, 40] and greedy.half_width is None


def test_every_status_of_an_edge_has_a_line() -> None:
    names = [name for name, _ in _panel("What became of the edges").metrics]
    assert names == [f"rollout/status/{status}" for status in get_args(StepStatus)]


def test_no_two_lines_of_a_chart_have_one_colour(tmp_path: Path) -> None:
    rows = metric_rows(9)
    rows[3] |= {f"rollout/status/{status}": 0.1 for status in get_args(StepStatus)}
    write_lines(tmp_path / "metrics.jsonl", rows)
    html, _ = _report(tmp_path)
    chart = html.partition("What became of the edges</span>")[2].partition("</figure>")[0]
    colours = re.findall(r'class="series (c\d)"', chart)
    assert len(set(colours)) == len(get_args(StepStatus))
    assert re.findall(r'class="(c\d)"><i>', chart) == colours
    for colour in colours:
        values = re.findall(rf"--{colour}: (#\w+);", html)
        assert len(values) == 2 and f".{colour} {{ --c: var(--{colour}); }}" in html  # light, dark
        assert all(html.count(f": {value};") == 1 for value in values)


def _luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_small_text_stands_out_from_what_is_behind_it(tmp_path: Path) -> None:
    """At 4.5 to 1 and more, as WCAG 2.1 asks (success criterion 1.4.3)."""
    html, _ = _report(write_sample_run(tmp_path, steps=3))
    themes = re.findall(r":root {(.*?)}", html, flags=re.DOTALL)
    assert len(themes) == 2  # light, dark
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): (#\w+);", theme))
        for text in ("ink", "soft", "faint", "accent"):
            for behind in ("page", "surface"):
                dark, light = sorted(_luminance(colours[name]) for name in (text, behind))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, behind)


def test_a_long_run_says_that_its_points_are_means(tmp_path: Path) -> None:
    for steps in (MAX_POINTS - 1, MAX_POINTS):  # and the evaluation before them
        write_lines(tmp_path / "metrics.jsonl", metric_rows(steps))
        assert ("each point is the mean" in _report(tmp_path)[1].text) == (steps == MAX_POINTS)


def test_on_paper_legends_keep_their_colours_and_the_drawing_its_right_end(tmp_path: Path) -> None:
    html, _ = _report(write_sample_run(tmp_path, steps=3))
    printed = html.partition("@media print {")[2].partition("\n}")[0]
    assert ".legend i { print-color-adjust: exact; }" in printed
    assert re.search(r"\.drawing svg {[^}]* max-width: 100%;", printed)


def test_long_names_break_between_words_and_an_identifier_turns_nothing_around(
    tmp_path: Path,
) -> None:
    run = write_sample_run(tmp_path, steps=3)
    write_lines(run / "graphs.jsonl", [kb_graph("\u202eabc", seed=4)])
    html, _ = _report(run)
    assert "<bdi>\u202eabc</bdi>" in html
    assert "search.<wbr>options.<wbr>topk" in html and "efficiency_<wbr>weight" in html


def test_the_numbers_of_a_long_run_end_with_its_last_step(tmp_path: Path) -> None:
    html, _ = _report(write_sample_run(tmp_path, steps=200))
    steps = re.findall(r"<tr><td>(\d+)</td>", html.partition("The numbers behind")[2])
    assert (steps[0], steps[-1]) == ("0", "200") and len(steps) == len(set(steps)) == 60


def test_the_page_counts_right_paths_and_classes(tmp_path: Path) -> None:
    source = kb_graph("g", seed=4)
    ends = [node for node in source["nodes"] if node["terminal"]]
    next(node for node in ends if node["reward"] == 0.0)["reward"] = 0.5  # partly right
    write_sample_run(tmp_path, steps=3)
    write_lines(tmp_path / "graphs.jsonl", [source])
    right = sum(node["reward"] == 1.0 for node in ends)
    sizes = [n for n in Counter(node["class"] for node in source["nodes"]).values() if n > 1]
    text = " ".join(_report(tmp_path)[1].text.split())
    assert f"{right} of {len(ends)} finished paths right" in text
    assert f"{sum(sizes)} nodes in {len(sizes)} equivalence classes of two or more" in text


def test_several_task_files_are_named_as_words(tmp_path: Path) -> None:
    write_sample_run(tmp_path)
    config = {"tasks": {"train": ["worlds/a.jsonl", "worlds/b.jsonl"]}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert "worlds/a.jsonl, worlds/b.jsonl" in _report(tmp_path)[1].text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, steps: int) -> None:
    write_sample_run(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", metric_rows(20)[:steps])
    _, page = _report(tmp_path)
    expected = ["No step has been recorded yet", "One row has been recorded", "Reward in training"]
    assert expected[steps] in page.text
    assert ("chart" in page.classes) == (steps > 0)


@pytest.mark.parametrize("name", ["graphs.jsonl", "config.yaml", "manifest.json", "metrics.jsonl"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_file_that_is_missing_or_empty_is_left_out(
    tmp_path: Path, name: str, empty: bool
) -> None:
    run = write_sample_run(tmp_path, steps=3)
    (run / name).unlink()
    if empty:
        (run / name).touch()
    _, page = _report(run)
    assert ("g-drawing" in page.classes) == (name != "graphs.jsonl")
    assert ("merge_threshold" in page.text) == (name != "config.yaml")
    assert ("git_commit" in page.text) == (name != "manifest.json")
    assert ("chart" in page.classes) == (name != "metrics.jsonl")


def test_any_metric_may_be_missing(tmp_path: Path) -> None:
    rows = metric_rows(4)
    for name in {name for row in rows for name in row} - {"step"}:
        rest = [{k: v for k, v in row.items() if k != name} for row in rows]
        write_lines(tmp_path / "metrics.jsonl", rest)
        _report(tmp_path)


def test_a_status_that_ends_no_edge_of_a_step_is_zero_there(tmp_path: Path) -> None:
    rows = metric_rows(9)
    rows[3]["rollout/status/tool_error"] = 0.3  # of the steps after the evaluation, the third
    panel = _panel("What became of the edges")
    write_lines(tmp_path / "metrics.jsonl", rows)
    metrics = read_run(tmp_path).metrics
    (line,) = _line(panel, metrics, "rollout/status/tool_error", "tool error")
    assert line.x.tolist() == list(range(1, 10))
    assert line.y.tolist() == [0, 0, 0.3, 0, 0, 0, 0, 0, 0]
    assert _line(panel, metrics, "rollout/status/tool_outage", "tool outage") == []


def test_a_run_that_was_killed_within_a_line_has_its_report(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path, steps=3, num_graphs=2)
    before, _ = _report(run)
    logs = [run / "metrics.jsonl", run / "graphs.jsonl"]
    for log in logs:
        line = log.read_text().splitlines()[-1]
        with log.open("a") as file:
            file.write(line[: len(line) // 2])
    assert _report(run)[0] == before
    for log in logs:
        log.write_text('{"st')
    assert "No step has been recorded yet" in _report(run)[1].text


def test_a_malformed_row_leaves_the_old_report_alone(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path, steps=3)
    before, _ = _report(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl:5"):
        write_report(run, _credit_of)
    assert (run / "report.html").read_text(encoding="utf-8") == before


def test_a_malformed_graph_is_named_by_file_and_line(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path, steps=3, num_graphs=2)
    with (run / "graphs.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(GraphError, match=r"graphs\.jsonl.*3"):
        write_report(run, _credit_of)


def test_a_report_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path, steps=3)
    (run / "report.html").mkdir()
    names = sorted(path.name for path in run.iterdir())
    with pytest.raises(RunError, match=r"cannot write .*report\.html"):
        write_report(run, _credit_of)
    assert sorted(path.name for path in run.iterdir()) == names


def _chosen(tmp_path: Path, graphs: list[dict[str, Any]]) -> str:
    write_lines(tmp_path / "graphs.jsonl", graphs)
    choice = choose_graph(tmp_path / "graphs.jsonl")
    assert choice is not None and choice[1] == len(graphs)
    return choice[0].id


def test_the_drawn_graph_is_the_one_that_shows_most(tmp_path: Path) -> None:
    rich = kb_graph("rich", seed=4)
    unmerged = kb_graph("unmerged", seed=4)
    unanimous = kb_graph("unanimous", seed=4)
    for node in unmerged["nodes"]:
        node["class"] = node["id"]
    for node in unanimous["nodes"]:
        node["reward"] = 0.0 if node["terminal"] else None
    large = kb_graph("large", seed=4, schedule=(8, 3, 3, 2, 1))
    assert len(large["nodes"]) > 100

    assert _chosen(tmp_path, [large, unmerged, rich, unanimous]) == "rich"
    assert _chosen(tmp_path, [unanimous, unmerged, large]) == "unmerged"
    assert _chosen(tmp_path, [large]) == "large"
    assert _chosen(tmp_path, [rich, unmerged, kb_graph("later", seed=4)]) == "later"


def test_of_a_long_run_the_newest_graphs_are_looked_at(tmp_path: Path) -> None:
    rich, plain = kb_graph("rich", seed=3), kb_graph("0", seed=3)
    for node in plain["nodes"]:
        node["reward"] = 0.0 if node["terminal"] else None
    later = [plain | {"id": str(i)} for i in range(_NEWEST_GRAPHS - 1)]
    assert _chosen(tmp_path, [kb_graph("none", seed=3), rich, *later]) == "rich"
    assert _chosen(tmp_path, [rich, *later, plain | {"id": "last"}]) == "last"
    write_lines(tmp_path / "metrics.jsonl", metric_rows(2))
    assert "Chosen among the newest 64 recorded graphs" in _report(tmp_path)[1].text


def test_a_graph_that_is_too_large_is_drawn_in_part_and_the_page_says_so(tmp_path: Path) -> None:
    large = kb_graph("large", seed=4, schedule=(8, 3, 3, 2, 1))
    write_lines(tmp_path / "graphs.jsonl", [large])
    write_lines(tmp_path / "metrics.jsonl", metric_rows(2))
    html, page = _report(tmp_path)
    assert "The 100 nodes nearest the prompt are drawn" in page.text
    assert html.count("data-node=") == 100 + 1  # and once in the script
