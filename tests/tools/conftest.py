import pytest

from tests.tools.web_server import serving


@pytest.fixture
def site():
    with serving() as site:
        yield site
