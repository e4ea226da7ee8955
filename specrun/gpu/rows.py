"""The rows of a round in device memory: their tokens, sampling parameters and progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import BARRIER, IN_PROMPT, MAX_VOCAB, PROGRESS, SAMPLING, TOKEN_VALUE
from specrun.request.request import Request
from specrun.sampling.limits import MAX_BIASES, MAX_STOP_IDS


class DeviceRows:
    """The rows of a round on one device. A draft on another device has a copy, which commits the same tokens.

    token_stride: tokens for which a row has memory, draft tokens included. positions: the most positions of a row that
    one kernel works on. max_draft_len, use_logits: for requests that do not set them.
    """

    def __init__(
        self,
        device: Device,
        max_rows: int,
        token_stride: int,
        vocab: int,
        positions: int,
        max_draft_len: int,
        use_logits: bool,
    ) -> None:
        self.device = device
        self.max_rows = max_rows
        self.token_stride = token_stride
        self.vocab = vocab
        self.max_draft_len = max_draft_len
        self.use_logits = use_logits
        self.tokens = device.zeros((max_rows, token_stride), np.int64)
        self.progress = device.zeros((max_rows,), PROGRESS)
        self.sampling = device.zeros((max_rows,), SAMPLING)
        self.stop_ids = device.zeros((max_rows, MAX_STOP_IDS), np.int64)
        self.barriers = device.zeros((max_rows * positions,), BARRIER)
        # Token counts and biases of each row. They are valid only for requests with logits processors.
        self.counts = device.zeros((max_rows, vocab), np.uint32)
        self.biases = device.zeros((max_rows, MAX_BIASES), TOKEN_VALUE)

    def on(self, device: Device) -> DeviceRows:
        """Rows of the same sizes on another ``device``, for its drafter."""
        return DeviceRows(device, self.max_rows, self.token_stride, self.vocab, 1, self.max_draft_len, self.use_logits)

    def batch_size(self, count: int) -> int:
        """The batch size of a round for ``count`` requests: the next power of 2, so that few sizes must be captured.

        The rows beyond ``count`` take part without a decoding request.
        """
        return min(1 << (count - 1).bit_length(), self.max_rows)

    def begin(self, first: int, requests: Sequence[Request]) -> None:
        """Write the state of new ``requests`` from row ``first`` on. Rounds skip a row until ``activate_row``."""
        tokens = np.zeros((len(requests), self.token_stride), np.int64)
        progress = np.zeros(len(requests), PROGRESS)
        stop_ids = np.zeros((len(requests), MAX_STOP_IDS), np.int64)
        for row, request in enumerate(requests):
            tokens[row, : len(request.tokens)] = request.tokens
            progress[row] = (len(request.tokens), 0)
            stop_ids[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        sampling = np.array([_sampling(request, self.max_draft_len, self.use_logits) for request in requests], SAMPLING)
        self._write(self.tokens, first, tokens)
        self._write(self.progress, first, progress)
        self._write(self.stop_ids, first, stop_ids)
        self._write(self.sampling, first, sampling)
        for row, request in enumerate(requests, first):
            if request.has_logits_processors:
                self._write_penalties(row, request)

    def activate_row(self, row: int, request: Request) -> None:
        """Include ``row`` in rounds, because its prompt is prefilled."""
        self._write(self.progress, row, np.array([(len(request.tokens), request.remaining)], PROGRESS))

    def deactivate_row(self, row: int) -> None:
        """Exclude ``row`` from rounds, because its request has ended, perhaps on the host as at a stop text."""
        self._write(self.progress, row, np.zeros(1, PROGRESS))

    def swap(self, row: int, second: int) -> None:
        """Exchange two rows."""
        for array in (self.tokens, self.progress, self.sampling, self.stop_ids, self.counts, self.biases):
            size = math.prod(array.shape[1:])
            calls.swap(self.device, array=array.part(row * size, (size,)), other=array.part(second * size, (size,)))

    def _write_penalties(self, row: int, request: Request) -> None:
        prompt, counts = np.array(request.prompt, np.int64), np.zeros(self.vocab, np.uint32)
        counts[prompt[prompt < self.vocab]] = IN_PROMPT
        self._write(self.counts, row, counts[None])
        biases = np.zeros((1, MAX_BIASES), TOKEN_VALUE)
        biases[0, : len(request.params.logit_bias)] = [*request.params.logit_bias.items()]
        self._write(self.biases, row, biases)

    def _write(self, array: DeviceArray, first: int, values: npt.NDArray[Any]) -> None:
        self.device.write(array.part(first * math.prod(array.shape[1:]), values.shape), values)


def _sampling(request: Request, draft_len: int, use_logits: bool) -> tuple[float, ...]:
    """The SAMPLING struct of a request. draft_len, use_logits: for requests that do not set them."""
    params = request.params
    if request.options.fixed_draft_len is not None:
        draft_len = min(request.options.fixed_draft_len, draft_len)
    # In float32 it must be neither 0 nor infinite.
    temperature = 0 if params.greedy else min(max(params.temperature, 1e-37), 1e38)
    return (
        params.seed or 0,  # A request always has a seed.
        params.top_p,
        temperature,
        min(params.top_k, MAX_VOCAB),
        params.min_p,
        request.accepts_by_logits(use_logits),
        draft_len,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        len(params.logit_bias),
        len(request.stop_ids),
        len(request.prompt) + request.options.min_output_len,
        -1 if request.options.logprobs is None else request.options.logprobs,
        request.matcher is not None,
    )
