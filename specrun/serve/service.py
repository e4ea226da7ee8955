"""The state that handlers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from specrun.serve.bodies import BodyReader
from specrun.serve.departure import unless_client_leaves
from specrun.serve.keys import ApiKey
from specrun.serve.listening import ListenOptions
from specrun.serve.model import Model
from specrun.serve.models import Models
from specrun.serve.rate_limits import RateLimits
from specrun.serve.response_store import ResponseStore
from specrun.serve.tracing import Tracing

T = TypeVar("T")


@dataclass
class Service:
    """The models of a server, and who may use them."""

    models: Models
    keys: Sequence[ApiKey]
    """API keys that may use the server; empty: no key is needed."""
    allowed_hosts: Collection[str] | None
    """Host names that the server answers to, besides those of this machine. None: all."""
    listening: ListenOptions
    log_prompts: bool
    responses: ResponseStore
    tracing: Tracing | None
    """Sender of traces; None: none are sent."""
    rates: RateLimits = field(default_factory=RateLimits)
    bodies: BodyReader = field(default_factory=BodyReader)

    async def read(self, request: Request, handle: Callable[[Model, Any], T]) -> T:
        """Call ``handle`` in a worker thread, with the model that a body names and the body's JSON.

        The request has the model until it is answered. Raises ApiError, QueueFullError, EngineStoppedError, and
        ClientLeftError where the client leaves while the model is loaded.
        """

        async def acquire(name: str | None) -> Model:
            future = self.models.acquire(name)
            model = await (future if future.done() else unless_client_leaves(request.receive, future))
            request.state.model = model
            return model

        return await self.bodies.read(request, acquire, handle, self.models.names.max_prompt_lens)
