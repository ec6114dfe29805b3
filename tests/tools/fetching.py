"""What the tests of fetching share: pages, a reader for a test's server, and how a fetch failed."""

import pytest

from graphpo_agent.net.failures import CallFailed
from tests.tools.web_server import LOCAL
from tools.fetch import WebReader

OAK = b"An oak is a tree."
OAK_HTML = b"<title>Oak</title><p>An oak is a tree.</p>"


def reader_for(site, **options):
    """A reader that may visit this site, and this site only."""
    allowed = {
        "allowed_ports": [site.port],
        "allowed_networks": LOCAL,
        "respect_robots": False,
        "deadline_s": 60.0,
        "extraction_s": 60.0,
        "extractors": 1,
        "tries": 1,
    }
    return WebReader(**(allowed | options))


def failure_of(reader, url):
    with pytest.raises(CallFailed) as failed:
        reader.read(url)
    assert "\n" not in str(failed.value)
    return failed.value.kind
