"""A model of the server: its specification, and, once it is loaded, its decoder and its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specrun.builder import OnStart
from specrun.decoder import SpeculativeDecoder
from specrun.openai.answers import Answer
from specrun.openai.body import DEFAULTS, OpenAIBody
from specrun.sampling.sampler import SamplingParams
from specrun.serve.engine import EngineThread
from specrun.serve.keys import ApiKey
from specrun.serve.metrics import Metrics


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with the model's sampling defaults."""

    decoder: SpeculativeDecoder
    defaults: SamplingParams = DEFAULTS
    """Sampling parameters for a body that does not set them."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that may be loaded. Two are equal if loading them gives the same."""

    name: str
    load: Callable[[OnStart], LoadedModel] = field(compare=False)
    """Function that loads it, and builds its engines if needed. Any thread may call it."""
    build: Callable[[OnStart], object] | None = field(default=None, compare=False)
    """Function that builds its engines if needed, before others make room for it; None: they are there."""
    aliases: tuple[str, ...] = field(default=(), compare=False)
    """Further names that bodies may use."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings on which loading depends."""
    max_queue: int = 256
    """Number of requests that may wait for a row."""
    timeout: float | None = None
    """Seconds after which an answer ends as it is."""


class Model:
    """A model that is loaded. Worker threads may call it."""

    def __init__(self, spec: ModelSpec, loaded: LoadedModel, engine: EngineThread, metrics: Metrics) -> None:
        self.name, self._timeout = spec.name, spec.timeout
        self.decoder, self.defaults = loaded.decoder, loaded.defaults
        self.engine, self.metrics = engine, metrics

    @property
    def max_input_len(self) -> int:
        """Number of tokens that a prompt may have."""
        return self.decoder.target.build_config.max_input_len

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.decoder.target.build_config.max_seq_len

    def prompt_ids(self, body: OpenAIBody) -> list[int]:
        """The ids of a body's first prompt. Raises RequestError."""
        return self.decoder.token_ids(body.prompts[0], body.options)

    def fits(self, body: OpenAIBody) -> bool:
        """Whether the engine has room for the one prompt and its output. Raises ContextLengthError and RequestError."""
        length = len(self.prompt_ids(body))
        longest = body.options.max_output_len
        least = longest if isinstance(longest, int) else 1
        return length <= self.max_input_len and length + least <= self.max_seq_len

    def answers(self, body: OpenAIBody, key: ApiKey | None) -> list[Answer]:
        """New answers to ``body``, still empty: n for each prompt, prompt by prompt.

        Encodes texts and renders templates, so it may take a while: call it in a worker thread.
        Raises QueueFullError, EngineStoppedError and RequestError; then nothing of the body is decoded.
        """
        self.engine.require_room(len(body.prompts) * body.n)
        options = replace(
            body.options,
            max_output_len=body.options.max_output_len or "max",
            timeout=self._timeout,
            reuse_blocks=key is None or key.reuse_blocks,
        )
        requests = self.decoder.requests(body.prompts, body.params, options, n=body.n)
        for request in requests:
            if request.error:
                raise request.error
        names = self.decoder.token_bytes
        return [Answer(request, names, body.response_options, is_streamed=body.stream) for request in requests]
