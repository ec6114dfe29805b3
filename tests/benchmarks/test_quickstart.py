"""The committed page is what the benchmark makes of the committed numbers."""

import json

from benchmarks.quickstart import RESULTS, page


def test_the_committed_page_is_that_of_the_committed_numbers():
    result = json.loads((RESULTS / "quickstart.json").read_text())
    assert (RESULTS / "quickstart.md").read_text() == page(result)


def test_a_whole_that_was_not_timed_has_no_number():
    row = {"seed": 0, "before": 0.25, "after": 0.5, "greedy before": 1.0, "greedy after": 1.0}
    row |= {"generated tokens": 1200, "training seconds": 9}
    result = {"machine": "here", "how": "by hand", "rows": [row, row | {"all seconds": 12}]}
    *_, first, second = page(result).splitlines()
    assert first == "| 0 | 25.0% | 50.0% | 100.0% | 100.0% | 1,200 | 9 s | – |"
    assert second == first.replace("–", "12 s")
