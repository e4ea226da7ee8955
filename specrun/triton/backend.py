"""The model that Triton's Python backend runs: tensors to requests of the engine thread, its updates to responses.

Only the server's Python process has the module ``triton_python_backend_utils``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError
from specrun.request.stats import Stats
from specrun.request.updates import Ended, Update
from specrun.serve.engine import EngineStoppedError, EngineThread
from specrun.serve.log import log
from specrun.triton.answer import UnsentAnswer
from specrun.triton.metrics import TritonMetrics
from specrun.triton.repository import DRAFT, MAX_QUEUE, TARGET, TOKENIZER
from specrun.triton.responses import Response, ResponseThread
from specrun.triton.tensors import ParsedRequest, read_inputs

READERS = 4
"""Number of threads that encode and submit requests."""
DRAIN_SECONDS = 20.0
"""Seconds for answers to end when the model is unloaded; tritonserver kills the process 30 s after it stops."""


class TritonPythonModel:
    """The class that Triton's backend calls. ``execute`` must not raise, and nothing may end the process.

    Triton reports a model whose process has died as ready, and starts no new one.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engines beside ``model.py``. Raises SpecError, which the server shows."""
        _require_numpy()
        directory = Path(args["model_repository"]) / args["model_version"]
        parameters = json.loads(args["model_config"])["parameters"]
        settings = {name: json.loads(value["string_value"]) for name, value in parameters.items()}
        max_queue = settings.pop(MAX_QUEUE)
        target, draft, tokenizer = (directory / name for name in (TARGET, DRAFT, TOKENIZER))
        self.decoder = SpeculativeDecoder.open(
            target,
            draft if draft.exists() else None,
            DraftTargetConfig(**settings, shared_thread_pool=True),  # No other model uses the process.
            tokenizer if tokenizer.exists() else None,
        )
        for note in self.decoder.notes:
            log.warning(note)
        self.metrics = TritonMetrics(args["model_name"])
        self.responses = ResponseThread()
        self.engine = EngineThread(self.decoder, self.responses.deliver, max_queue)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self.responses.start()
        self.engine.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start reading the requests in other threads, which submit them. The response thread sends responses."""
        for request in requests:
            response = Response(request.get_response_sender(), self.metrics)
            self.responses.begin(response)
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                parsed = read_inputs(tensors, json.loads(request.parameters() or "{}"))
                self._readers.submit(self._submit, parsed, response)
            except Exception as error:
                self.responses.do(partial(response.fail, error))

    def finalize(self) -> None:
        """Let answers end, and close the engines."""
        self._readers.shutdown()
        self.engine.stop(DRAIN_SECONDS)
        self.responses.stop(DRAIN_SECONDS)

    def _submit(self, parsed: ParsedRequest, response: Response) -> None:
        """Encode and submit a request, in a reader thread, because a long prompt takes seconds."""
        try:
            self._encode_and_submit(parsed, response)
        except BaseException as error:  # Panics of the tokenizer are no Exceptions.
            self.responses.do(partial(response.fail, error))

    def _encode_and_submit(self, parsed: ParsedRequest, response: Response) -> None:
        request = self.decoder.request(parsed.prompt, parsed.params, parsed.options, name=parsed.prompt_name)
        response.answer = UnsentAnswer(
            parsed.stream, request.options.logprobs is not None, request.echo, len(request.prompt), parsed.is_probe
        )
        if parsed.is_probe and self._is_busy():
            ended = Ended("length", 0, Stats(), None)
            self.responses.do(partial(response.receive, 0, Update((), (), (), ended)))
        else:
            response.submission = self.engine.submit([request], response.receive)

    def _is_busy(self) -> bool:
        """Whether the engine works and other requests run. Raises EngineStoppedError where it does not work."""
        if problem := self.engine.problem():
            raise EngineStoppedError(problem)
        return self.engine.num_running > 0


def _require_numpy() -> None:
    """Raise BackendError where the backend misreads arrays, as builds for numpy 1 do with numpy 2."""
    numbers = np.arange(3, dtype=np.int32)
    try:
        if np.array_equal(pb_utils.Tensor("numbers", numbers).as_numpy(), numbers):
            return
    except Exception as error:
        log.warning("numpy %s: %s", np.__version__, error)
    raise BackendError(f"this server's Python backend cannot read arrays of numpy {np.__version__}: install 'numpy<2'")
