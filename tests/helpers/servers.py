"""A server in a thread of this process, on a free port of the loopback address."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from specrun.decoder import SpeculativeDecoder
from specrun.openai.body import DEFAULTS
from specrun.serve.listening import ListenOptions
from specrun.serve.model import LoadedModel, ModelSpec
from specrun.serve.server import serve


@dataclass
class Client:
    """A client of a server that runs."""

    url: str

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    def metric(self, name: str, model: str = "") -> float:
        """A metric without labels of its own. model: not needed where there is one."""
        lines = self.get("/metrics").text.splitlines()
        start = f'specrun:{name}{{model_name="{model}'
        (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(start)]
        return float(value)


@dataclass
class Server(Client):
    """One that serves ``decoder``."""

    decoder: SpeculativeDecoder


@contextmanager
def running(decoder: SpeculativeDecoder, **options: Any) -> Iterator[Server]:
    """A server of ``decoder``, which is closed at the end."""
    loaded = LoadedModel(decoder, options.pop("defaults", DEFAULTS))
    limits = {"max_queue": options.pop("max_queue", 64), "timeout": options.pop("timeout", None)}
    spec = ModelSpec(options.pop("model", "target"), lambda _: loaded, **limits)
    with running_models([spec], loaded={spec.name: loaded}, **options) as client:
        yield Server(client.url, decoder)


@contextmanager
def running_models(specs: Sequence[ModelSpec], **options: Any) -> Iterator[Client]:
    """A server of models."""
    listening = options.setdefault("listening", ListenOptions(port=0))
    listener = listening.listen()
    settings: dict[str, Any] = {
        "keys": (),
        "allowed_hosts": frozenset(),
        "drain_seconds": 5,
        "metrics_prefix": "specrun",
        "log_prompts": False,
    }
    url = listening.url(listener)  # While it is open.
    before = threading.enumerate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(specs, listener, **settings | options))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield Client(url)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()
    assert not thread.is_alive()
    assert not any(other.name == "engine" for other in threading.enumerate() if other not in before)


def events(answer: Any) -> list[dict[str, Any]]:
    """The chunks of a stream of server-sent events."""
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
