"""What the server serves: one decoder under one name."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from specrun.arguments import show
from specrun.decoder import SpeculativeDecoder
from specrun.openai.answers import Answer
from specrun.openai.body import DEFAULTS, OpenAIBody
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.serve.bodies import BodyReader
from specrun.serve.engine import EngineThread
from specrun.serve.errors import ApiError
from specrun.serve.keys import ApiKey
from specrun.serve.limits import MAX_STORED_RESPONSES
from specrun.serve.listening import ListenOptions
from specrun.serve.metrics import Metrics
from specrun.serve.response_store import ResponseStore


@dataclass
class Service:
    """Everything that handlers share."""

    decoder: SpeculativeDecoder
    engine: EngineThread
    metrics: Metrics
    model: str
    keys: Sequence[ApiKey] = ()
    """API keys that may use the server; empty: no key is needed."""
    allowed_hosts: Collection[str] | None = None
    """Host names that the server answers to, besides those of this machine. None: all."""
    listening: ListenOptions = field(default_factory=ListenOptions)
    timeout: float | None = None
    """Seconds after which an answer ends as it is."""
    log_prompts: bool = False
    defaults: SamplingParams = DEFAULTS
    """Sampling parameters for a body that does not set them."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(MAX_STORED_RESPONSES))
    bodies: BodyReader = field(default_factory=BodyReader)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_input_len(self) -> int:
        """Number of tokens that a prompt may have."""
        return self.decoder.target.build_config.max_input_len

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.decoder.target.build_config.max_seq_len

    def require_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name not in (None, "", self.model):
            raise ApiError(
                404, f"model {show(name)} is not served here; this is {self.model!r}", "model", "model_not_found"
            )

    def fits(self, body: OpenAIBody) -> bool:
        """Whether the engine has room for the one prompt and its output. Raises ContextLengthError and RequestError."""
        length = len(self.decoder.token_ids(body.prompts[0], body.options))
        longest = body.options.max_output_len
        least = longest if isinstance(longest, int) else 1
        return length <= self.max_input_len and length + least <= self.max_seq_len

    def answers(self, body: OpenAIBody, key: ApiKey | None) -> list[Answer]:
        """The answers to ``body``, before anything of them has come: its prompts' n answers, prompt by prompt.

        Encodes texts and renders templates, so it may take a while: call it in a worker thread.
        Raises ApiError, QueueFullError, EngineStoppedError and RequestError; then nothing of the body is decoded.
        """
        self.require_model(body.model)
        self.engine.require_room(len(body.prompts) * body.n)
        options = replace(
            body.options,
            max_output_len=body.options.max_output_len or "max",
            timeout=self.timeout,
            reuse_blocks=key is None or key.reuse_blocks,
        )
        requests = self.decoder.requests(body.prompts, body.params, options, n=body.n)
        for request in requests:
            if request.error:
                raise request.error
        names = self.decoder.token_bytes
        return [Answer(request, names, body.response_options, is_streamed=body.stream) for request in requests]


def requests_of(answers: Sequence[Answer]) -> list[Request]:
    """The requests behind ``answers``."""
    return [answer.request for answer in answers]
