import pytest

from tests.tools.sandboxes import LIMITS, WORKING
from tests.tools.web_server import serving
from tools.sandbox import Sandbox


@pytest.fixture
def site():
    with serving() as site:
        yield site


@pytest.fixture(scope="session", params=WORKING)
def sandbox(request):
    return Sandbox(request.param, limits=LIMITS)


@pytest.fixture(scope="session", params=[*WORKING, "none"])
def any_sandbox(request):
    return Sandbox(request.param, limits=LIMITS)
