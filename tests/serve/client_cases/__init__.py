"""Cases of client libraries. ``test_client_libraries.py`` runs each file with the Python that has its library."""

from __future__ import annotations

import os
from typing import Any

import httpx

URL = os.environ.get("SPECRUN_TEST_URL", "")
BASE = f"{URL}/v1"
KEY = "none"
ENDS: dict[str, Any] = {"logit_bias": {"0": 100}, "min_tokens": 4, "seed": 3}
"""A random model ends its text only if it is made to: token 0 does, as soon as it may."""
PROMPT = "the weather"
CITIES = ("Paris", "Rome")


def answer(path: str, body: dict[str, Any]) -> Any:
    """What the server says to a plain body."""
    found = httpx.post(f"{BASE}/{path}", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


def chat_text(**fields: Any) -> str:
    """The text of an answer to the prompt, in a chat."""
    messages = [{"role": "user", "content": PROMPT}]
    text: str = answer("chat/completions", {"messages": messages, **fields})["choices"][0]["message"]["content"]
    return text
