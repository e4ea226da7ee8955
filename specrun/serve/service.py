"""What the server serves: one decoder under one name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.openai_body import DEFAULTS, OpenAIBody
from specrun.request import Request
from specrun.sampling import SamplingParams
from specrun.serve.answers import Answer
from specrun.serve.engine import EngineThread
from specrun.serve.errors import ApiError
from specrun.serve.keys import ApiKey
from specrun.serve.metrics import Metrics
from specrun.token_bytes import TokenBytes


@dataclass
class Service:
    """Everything that handlers share."""

    decoder: SpeculativeDecoder
    engine: EngineThread
    metrics: Metrics
    model: str
    keys: Sequence[ApiKey] = ()
    """None: everybody may use the server."""
    timeout: float | None = None
    """Seconds after which an answer ends as it is."""
    log_prompts: bool = False
    defaults: SamplingParams = DEFAULTS
    """What holds where a body does not say how to sample."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.decoder.target.build_config.max_seq_len

    @cached_property
    def names(self) -> TokenBytes | None:
        """The texts of single tokens; None without a tokenizer."""
        try:
            return TokenBytes(self.decoder.tokenizer)
        except RequestError:
            return None

    def require_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name not in (None, "", self.model):
            raise ApiError(
                404, f"model {name!r} is not served here; this is {self.model!r}", "model", "model_not_found"
            )

    def answers(self, body: OpenAIBody, key: ApiKey | None) -> list[Answer]:
        """The answers to ``body``, before anything of them has come: its prompts' n answers, prompt by prompt.

        Encodes texts and renders templates, so it may take a while: call it in a worker thread.
        Raises ApiError and RequestError; then nothing of the body is decoded.
        """
        self.require_model(body.model)
        if body.constraints:
            name = next(iter(body.constraints))
            raise ApiError(400, f"{name}: not supported yet; leave it out", name)
        options = replace(body.options, timeout=self.timeout, reuse_blocks=key is None or key.reuse_blocks)
        is_dropped = options.max_output_len == 0
        if is_dropped:  # The decoder writes one token at least.
            options = replace(options, max_output_len=1)
        if options.echo and options.logprobs is not None:
            options = replace(options, prompt_logprobs=options.logprobs)
        requests = self.decoder.requests(body.prompts, body.params, options, n=body.n)
        for request in requests:
            if request.error:
                raise request.error
            if options.max_output_len is None:
                request.max_output_len = self.max_seq_len - len(request.prompt)
        return [Answer(request, self.names, is_dropped) for request in requests]


def requests_of(answers: Sequence[Answer]) -> list[Request]:
    """The requests behind ``answers``."""
    return [answer.request for answer in answers]
