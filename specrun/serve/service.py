"""Everything that handlers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from specrun.serve.bodies import BodyReader
from specrun.serve.departure import unless_client_leaves
from specrun.serve.keys import ApiKey
from specrun.serve.limits import MAX_STORED_RESPONSES
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
    keys: Sequence[ApiKey] = ()
    """API keys that may use the server; empty: no key is needed."""
    allowed_hosts: Collection[str] | None = None
    """Host names that the server answers to, besides those of this machine. None: all."""
    listening: ListenOptions = field(default_factory=ListenOptions)
    log_prompts: bool = False
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(MAX_STORED_RESPONSES))
    tracing: Tracing | None = None
    """Sender of traces; None: none are sent."""
    rates: RateLimits = field(default_factory=RateLimits)
    bodies: BodyReader = field(default_factory=BodyReader)

    async def read(self, request: Request, use: Callable[[Model, Any], T]) -> T:
        """What ``use`` makes of the model that a body names and of the body's JSON, in a worker thread.

        The request has the model until it has been answered. Raises ApiError, QueueFullError, EngineStoppedError, and
        ClientLeftError where the client leaves while the model is loaded.
        """

        async def take(name: str | None) -> Model:
            asked = self.models.ask(name)
            coming: Awaitable[Model] = asked if asked.done() else unless_client_leaves(request.receive, asked)
            request.state.model = await coming
            return request.state.model  # type: ignore[no-any-return]

        return await self.bodies.read(request, take, use, self.models.max_prompt_lens)
