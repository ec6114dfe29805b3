from numba.core import caching

from graphpo_agent.engines.local.compiled import compiled


def _sum_up_to(n: int) -> int:
    total = 0
    for i in range(n + 1):
        total += i
    return total


def test_where_no_file_can_be_written_it_is_compiled_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(nogil=True)(_sum_up_to)(10) == 55
