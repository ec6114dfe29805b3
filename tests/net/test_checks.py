import math

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_address, check_counts, check_rate, check_seconds


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1", None])
def test_what_is_no_count_is_named(count):
    check_counts("tool", topk=1, tries=9)
    check_counts("tool", least=0, cached=0)
    with pytest.raises(ToolError, match="tool: tries must be a whole number of at least 1, found"):
        check_counts("tool", topk=1, tries=count)


@pytest.mark.parametrize("seconds", [0, 0.0, -1, True, math.inf, math.nan, "1", None])
def test_what_is_no_time_and_no_rate_is_named(seconds):
    check_seconds("tool", deadline_s=1, pause_s=0.5)
    check_rate("tool", None)
    with pytest.raises(ToolError, match="tool: deadline_s must be a number above 0, found"):
        check_seconds("tool", deadline_s=seconds)
    if seconds is not None:
        with pytest.raises(ToolError, match="tool: per_second must be a number above 0, found"):
            check_rate("tool", seconds)


@pytest.mark.parametrize("url", ["host:80", "ftp://host", "http://me:word@host", "//host", ""])
def test_what_is_no_address_of_a_service_is_refused(url):
    assert check_address("HTTPS://host:80/a?b=c@d") == "HTTPS://host:80/a?b=c@d"
    with pytest.raises(ValueError, match="address"):
        check_address(url)
