"""The builds of the bindings that the tests know, each by a name: a version of TensorRT, or ``tensorrt_rtx``."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.bindings.api import Api
from tests.bindings.installed import TENSORRT_VERSIONS, DownloadError, bindings, describe

TENSORRT_RTX = "tensorrt_rtx"
BUILDS = (*TENSORRT_VERSIONS, TENSORRT_RTX)


@functools.cache
def _fetched(version: str) -> Path | DownloadError:
    """One try, however many tests ask: without network it takes a while to fail."""
    try:
        return bindings(version)
    except DownloadError as error:
        return error


def folder(build: str) -> Path | None:
    """Where a build is imported from; None for TensorRT-RTX, which is installed."""
    if build == TENSORRT_RTX:
        pytest.importorskip(TENSORRT_RTX)
        return None
    found = _fetched(build)
    if isinstance(found, Path):
        return found
    if "CI" in os.environ:
        raise found
    pytest.skip(str(found))


def module(build: str) -> str:
    """Its name in ``import``."""
    return TENSORRT_RTX if build == TENSORRT_RTX else "tensorrt_bindings"


@functools.cache
def api(build: str) -> Api:
    """What it offers. Skips the test where the build cannot be had; in CI that is an error."""
    return describe(module(build), folder(build))
