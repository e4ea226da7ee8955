"""Client libraries in environments of their own. Their cases are in ``client_cases``, a file for each."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.client_environments import ROOT, environment_with
from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import open_thinking_pair

pytestmark = pytest.mark.slow("the API's shapes: serve/test_responses.py, serve/test_tools.py, serve/test_langchain.py")

ENVIRONMENTS = {
    "clients": ("litellm==1.110.2", "openai-agents==0.24.0", "pydantic-ai-slim[openai]==2.68.0"),
    "clients_of_openai_2": ("instructor==1.17.0", "llama-index-llms-openai-like==0.8.1"),
}
"""Environments by name. Two of the libraries need an older openai than ours."""
CASES = {
    "openai_agents": ("clients", 10),
    "pydantic_ai": ("clients", 14),
    "litellm": ("clients", 13),
    "instructor": ("clients_of_openai_2", 8),
    "llama_index": ("clients_of_openai_2", 7),
}
"""Environment and number of cases of each library."""


@pytest.fixture(scope="module")
def server(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(open_thinking_pair(long_pair, tmp_path_factory.mktemp("clients"))) as server:
        yield server


@pytest.mark.parametrize("library", CASES)
def test_all_cases_of_a_library_pass(server: Server, library: str) -> None:
    environment, count = CASES[library]
    python = environment_with(environment, *ENVIRONMENTS[environment]) / "python"
    # Without the project's fixtures, which import torch. Nothing is loaded from elsewhere.
    options = ["--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    command = [str(python), "-m", "pytest", *options, f"tests/serve/client_cases/{library}_cases.py"]
    more = {"SPECRUN_TEST_URL": server.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    said = subprocess.run(command, env=variables | more, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    assert re.findall(r"^(\d+) passed in", said.stdout, re.MULTILINE) == [str(count)], said.stdout
