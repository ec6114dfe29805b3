import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.worlds import make_world

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the engine's tests compute")


@pytest.fixture(scope="session")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("worlds"), "kb")


@pytest.fixture(scope="session")
def reach(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("worlds"), "reach")


@pytest.fixture
def rename_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``rename_fails(2)``: of the renamings from now on, the second finds no room."""

    def fail(number: int) -> None:
        rename, renamed = os.rename, 0

        def fails_once(source: Path, target: Path) -> None:
            nonlocal renamed
            renamed += 1
            if renamed == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rename(source, target)

        monkeypatch.setattr(os, "rename", fails_once)

    return fail
