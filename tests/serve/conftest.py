"""A server in a thread of this process, on a free port of the loopback address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrun.decoder import SpeculativeDecoder
from tests.helpers.engines import once
from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import make_long_pair


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
