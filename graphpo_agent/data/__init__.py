"""Task files, demonstrations and the generated toy worlds."""

KINDS = ("search-r1", "asearcher", "webdancer", "math", "gpqa", "livecodebench", "benchmark")
"""Whose files ``graphpo data prepare`` reads (``graphpo_agent.data.sources``)."""
