"""What a device knows of the rows of a round: their texts, how they choose tokens, and how far they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray, swap
from specrun.kernels import MAX_VOCAB, MEETING_BYTES, team_blocks
from specrun.request import MAX_STOP_IDS, Request
from specrun.sampling import MAX_BIASES

# As in kernels/round.cu.
SAMPLING = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("min_p", "<f4"),
        ("use_logits", "<i4"),
        ("draft_len", "<i4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("biases", "<i4"),
        ("stops", "<i4"),
        ("free_length", "<i4"),
        ("logprobs", "<i4"),
    ]
)
PROGRESS = np.dtype([("length", "<i4"), ("remaining", "<i4")])
DISTRIBUTION = np.dtype(
    [("peak", "<f4"), ("best", "<i4"), ("temperature", "<f4"), ("smallest", "<f4"), ("total", "<f4")]
)
TOKEN_VALUE = np.dtype([("id", "<i4"), ("value", "<f4")])

IN_PROMPT = np.uint32(1 << 31)


class DeviceRows:
    """The rows of a round on one device. The target's device decides; a draft's own device commits what it is told.

    width: tokens of a row, drafts included; positions: of a row that one kernel works on, at most; max_draft_len and
    use_logits: for requests that do not say.
    """

    def __init__(
        self,
        device: Device,
        max_rows: int,
        width: int,
        vocab: int,
        positions: int,
        max_draft_len: int,
        use_logits: bool,
    ) -> None:
        self.device = device
        self.max_rows = max_rows
        self.width = width
        self.vocab = vocab
        self.max_draft_len = max_draft_len
        self.use_logits = use_logits
        rows = max_rows
        self.tokens = device.zeros((rows, width), np.int64)
        self.progress = device.zeros((rows,), PROGRESS)
        self.sampling = device.zeros((rows,), SAMPLING)
        self.stop_ids = device.zeros((rows, MAX_STOP_IDS), np.int64)
        self._meetings = device.zeros((rows * positions, MEETING_BYTES), np.uint8)
        # How often tokens are in each row's text, and its biases: of rows whose logits are adjusted.
        self.counts = device.zeros((rows, vocab), np.uint32)
        self.biases = device.zeros((rows, MAX_BIASES), TOKEN_VALUE)

    def on(self, device: Device) -> DeviceRows:
        """Rows of the same sizes on another device, for a drafter there."""
        return DeviceRows(device, self.max_rows, self.width, self.vocab, 1, self.max_draft_len, self.use_logits)

    def batch_size(self, count: int) -> int:
        """The size of the round for ``count`` requests: 1, 2, 4, .., which bounds how many kinds there are to prepare.

        What the rows behind them hold rests, or belongs to nobody.
        """
        return min(1 << (count - 1).bit_length(), self.max_rows)

    def begin(self, first: int, requests: Sequence[Request]) -> None:
        """Write down the first state of the rows from ``first`` on, which rest until ``wake``."""
        tokens = np.zeros((len(requests), self.width), np.int64)
        progress, sampling = np.zeros(len(requests), PROGRESS), np.zeros(len(requests), SAMPLING)
        stop_ids = np.zeros((len(requests), MAX_STOP_IDS), np.int64)
        for row, request in enumerate(requests):
            tokens[row, : len(request.tokens)] = request.tokens
            progress[row] = (len(request.tokens), 0)
            sampling[row] = _sampling(request, self.max_draft_len, self.use_logits)
            stop_ids[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        written = (self.tokens, tokens), (self.progress, progress), (self.sampling, sampling), (self.stop_ids, stop_ids)
        for array, values in written:
            self._write(array, first, values)
        for row, request in enumerate(requests, first):
            if request.adjusts:
                self._begin_adjusting(row, request)

    def wake(self, row: int, request: Request) -> None:
        """Let rounds work on ``row``: its prompt has been read."""
        self._write(self.progress, row, np.array([(len(request.tokens), request.remaining)], PROGRESS))

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        arrays = (self.tokens, self.progress, self.sampling, self.stop_ids, self.counts, self.biases)
        for array in arrays:
            row = math.prod(array.shape[1:])
            swap(self.device, *(array.part(number * row, (row,)) for number in (one, other)))

    def place_drafts(self, batch: int, draft_len: int, uploads: DeviceArray, distributions: DeviceArray) -> None:
        """Queue the host's draft tokens: ``uploads`` [batch, 1 + draft_len], how many of a row and which.

        ``distributions`` [batch, draft_len] become certainty.
        """
        own = (uploads, self.tokens, self.width, self.progress, draft_len, self.sampling, distributions)
        self.device.launch("place_drafts", (batch, 1, 1), *own)

    def move_drafts(self, batch: int, draft_len: int, packed: DeviceArray, unpacking: bool) -> None:
        """Queue a copy of the draft tokens of ``batch`` rows to ``packed`` [batch, draft_len], or from it."""
        own = (self.tokens, self.width, self.progress)
        self.device.launch("move_drafts", (batch, 1, 1), *own, draft_len, packed, int(unpacking))

    def commit(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        """Queue the commit of what another device's rows have committed: ``records`` [batch, 3 + draft_len]."""
        own = (self.stop_ids, self.counts, self.vocab, records)
        self.device.launch("commit_records", (batch, 1, 1), *self.state(draft_len), *own)

    def state(self, draft_len: int) -> tuple[DeviceArray | int, ...]:
        """What kernels are told of the rows in a round of ``draft_len``."""
        return self.tokens, self.width, self.progress, draft_len, self.sampling

    def launch(self, kernel: str, batch: int, positions: int, *arguments: DeviceArray | int) -> None:
        """Queue a kernel with a team for every one of ``positions`` positions of ``batch`` rows."""
        blocks = team_blocks(batch * positions, self.vocab, self.device.multiprocessors)
        self.device.launch(kernel, (batch, positions, blocks), *arguments, self._meetings)

    def adjust(self, logits: DeviceArray, vocab: int, first: int, draft_len: int, adjusted: DeviceArray) -> None:
        """Queue the adjustment of ``logits`` [B, positions, V], of which ``vocab`` ids count.

        The first position is behind ``first`` draft tokens. ``adjusted`` may be the same memory; nothing is written for
        rows that adjust nothing.
        """
        batch, positions, stride = logits.shape
        own = (*self.state(draft_len), self.counts, self.vocab, self.biases, self.stop_ids)
        self.launch("adjust", batch, positions, logits, stride, vocab, positions, first, *own, adjusted)

    def _begin_adjusting(self, row: int, request: Request) -> None:
        prompt, counts = np.array(request.prompt, np.int64), np.zeros(self.vocab, np.uint32)
        counts[prompt[prompt < self.vocab]] = IN_PROMPT
        self._write(self.counts, row, counts[None])
        biases = np.zeros((1, MAX_BIASES), TOKEN_VALUE)
        biases[0, : len(request.params.logit_bias)] = [*request.params.logit_bias.items()]
        self._write(self.biases, row, biases)

    def _write(self, array: DeviceArray, first: int, values: npt.NDArray[Any]) -> None:
        self.device.write(array.part(first * math.prod(array.shape[1:]), values.shape), values)


def _sampling(request: Request, draft_len: int, use_logits: bool) -> tuple[float, ...]:
    """A request's SAMPLING."""
    params = request.params
    temperature = 0 if params.greedy else min(max(params.temperature, 1e-37), 1e38)  # In float32 neither 0 nor inf.
    return (
        params.seed,
        params.top_p,
        temperature,
        min(params.top_k, MAX_VOCAB),
        params.min_p,
        request.wants_logits(use_logits),
        draft_len if request.draft_len is None else min(request.draft_len, draft_len),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        len(params.logit_bias),
        len(request.stop_ids),
        len(request.prompt) + request.min_output_len,
        -1 if request.logprobs is None else request.logprobs,
    )
