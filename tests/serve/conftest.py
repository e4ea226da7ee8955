"""A server in a thread of this process, on a free port of the loopback address."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrun.decoder import SpeculativeDecoder
from tests.helpers.engines import once
from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import make_long_pair


@pytest.fixture(scope="package", autouse=True)
def certificates() -> Iterator[None]:
    """Are read once. httpx reads all of them for each client, which takes longer than most requests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def open_pair(engines: Path) -> Callable[[], SpeculativeDecoder]:
    return lambda: SpeculativeDecoder.open(engines / "target", engines / "draft")


@pytest.fixture(scope="module")
def server(engines: Path) -> Iterator[Server]:
    with running(SpeculativeDecoder.open(engines / "target", engines / "draft")) as server:
        yield server


@pytest.fixture(scope="session")
def long_pair(shared: Path) -> Path:
    return once(shared / "long_pair", make_long_pair)
