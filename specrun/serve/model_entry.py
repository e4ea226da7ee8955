"""One of a server's models, loaded or not, and the requests that wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from specrun.engine_dir.config import BuildConfig
from specrun.serve.metrics import Metrics
from specrun.serve.model import Model, ModelSpec

State = Literal["asleep", "building", "loading", "loaded", "closing"]


class ModelEntry:
    """One model, loaded or not."""

    def __init__(self, spec: ModelSpec, metrics: Metrics) -> None:
        self.spec, self.metrics = spec, metrics
        self.state: State = "asleep"
        self.is_built = spec.build is None
        """Whether its engines are on disk, as far as is known."""
        self.model: Model | None = None
        """The model while it is loaded."""
        self.build_config: BuildConfig | None = None
        """The target's limits; None before it was loaded for the first time."""
        self.stop_build: Callable[[], None] = lambda: None
        self.num_users = 0
        """Number of requests that have the model."""
        self.waiters: deque[asyncio.Future[Model]] = deque()
        """Futures of requests that wait for the model, and some that were cancelled."""
        self.requested = 0
        """Turn in which the first of the waiting requests came."""
        self.last_used = 0
        """Turn in which a request last acquired or released the model."""

    @property
    def max_prompt_len(self) -> int | None:
        """Number of tokens that a prompt may have; None if it is not known yet."""
        return self.build_config.max_input_len if self.build_config else None

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the model."""
        return sum(not waiter.done() for waiter in self.waiters)

    def give(self, turn: int) -> None:
        """Give the loaded model to the requests that wait for it."""
        assert self.model
        while self.waiters:
            if not (waiter := self.waiters.popleft()).done():
                self.num_users += 1
                self.last_used = turn
                waiter.set_result(self.model)

    def fail(self, error: Exception) -> None:
        """Fail the requests that wait for the model."""
        while self.waiters:
            if not (waiter := self.waiters.popleft()).done():
                waiter.set_exception(error)

    def description(self, created: int) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it. created: seconds since 1970."""
        return {
            "id": self.spec.name,
            "object": "model",
            "created": created,
            "owned_by": "specrun",
            "max_model_len": self.build_config and self.build_config.max_seq_len,
            "aliases": [*self.spec.aliases],
            "loaded": self.model is not None,
        }
