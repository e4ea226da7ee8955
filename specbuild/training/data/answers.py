"""Who answers prompts: the target's engines through specrun, a server with OpenAI's API, or the target in PyTorch.

Each is a function of an iterator of prompts to (prompt, answer) in any order; an answer that cannot be given is the
error that says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.training.data.conversations import Example
from specrun.batch.lines import Place
from specrun.errors import BackendError, RequestError, SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbuild.training.data.rows import RowMaker
    from specrun.request.request import Request
    from specrun.text.token_bytes import TokenBytes

KEY_VARIABLE = "OPENAI_API_KEY"
_TRIES = 5
_BUSY = (429, 502, 503, 504)
"""Statuses of a server that may be asked again."""
_REFUSED = (400, 413, 422)
"""Statuses that say something of one prompt only."""


@dataclass(frozen=True)
class Prompt:
    """A line of a file of prompts."""

    position: Place
    example: Example


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    max_output_len: int
    temperature: float
    seed: int
    """A prompt's is this plus its line."""


Answer = tuple[Prompt, str | SpecError]
Answerer = Callable[[Iterator[Prompt]], Iterator[Answer]]


def answer_with_engines(
    target: Path, draft: Path | None, sampling: Sampling, prompts: Iterator[Prompt]
) -> Iterator[Answer]:
    """Through ``specrun``, with full batches. Raises SpecError where the pair cannot be opened."""
    from specrun.batch.batch import Batch
    from specrun.batch.lines import ParsedRequest, Question
    from specrun.decoder import SpeculativeDecoder
    from specrun.request.options import RequestOptions
    from specrun.sampling.sampler import SamplingParams

    class TextAnswer:
        """An ``AnswerForm`` whose answers are texts."""

        def __init__(self, prompt: Prompt) -> None:
            self.prompt = prompt

        def answer(
            self, requests: Sequence[Request], parsed: ParsedRequest, names: TokenBytes | None
        ) -> dict[str, Any]:
            return {"text": requests[0].text}

        def failure(self, error: SpecError) -> dict[str, Any]:
            return {"error": str(error)}

    def question(prompt: Prompt) -> Question:
        example = prompt.example
        asked: Any = example.messages if example.text is None else example.text
        params = SamplingParams(temperature=sampling.temperature, seed=sampling.seed + prompt.position.line)
        options = RequestOptions(max_output_len=sampling.max_output_len)
        return Question(TextAnswer(prompt), ParsedRequest([asked], params, options, 1))

    with SpeculativeDecoder.open(target, draft) as decoder:
        for ended in Batch(decoder, map(question, prompts)).answer():
            for answered in ended:
                form = answered.question.form
                assert isinstance(form, TextAnswer)
                yield form.prompt, answered.error or answered.requests[0].text or RequestError("the answer is empty")


def answer_with_server(
    url: str, model: str | None, concurrency: int, sampling: Sampling, prompts: Iterator[Prompt]
) -> Iterator[Answer]:
    """Through a server with OpenAI's API; its key is in ``OPENAI_API_KEY``.

    model: its name there; None: the first that the server has. Raises BackendError where it does not answer.
    """
    import httpx

    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BackendError(f"--server {url}: {error}; expected an address like http://localhost:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BackendError(f"--server {url}: expected an address like http://localhost:8000")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    client = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(600, connect=10))

    def call(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        for left in reversed(range(_TRIES)):
            try:
                answer = client.request(method, path, json=body)
                if answer.status_code in _BUSY and left:
                    time.sleep(2.0 ** (_TRIES - left) / 4)
                    continue
                if answer.status_code in _REFUSED:
                    raise RequestError(f"--server {url}: {' '.join(answer.text.split())[:300]}")
                answer.raise_for_status()
                return answer.json()
            except (httpx.HTTPError, ValueError) as error:
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise BackendError(
                    f"--server {url}: no answer ({said}); see that it runs, then give --resume"
                ) from error
        raise AssertionError

    def ask(prompt: Prompt, name: str) -> Answer:
        example = prompt.example
        body = {
            "model": name,
            "max_tokens": sampling.max_output_len,
            "temperature": sampling.temperature,
            "seed": sampling.seed + prompt.position.line,
        }
        try:
            if example.text is not None:
                output = call("POST", "completions", {**body, "prompt": example.text})["choices"][0]["text"]
            else:
                output = call("POST", "chat/completions", {**body, "messages": example.messages})["choices"][0][
                    "message"
                ]["content"]
        except RequestError as error:
            return prompt, error
        except (KeyError, IndexError, TypeError) as error:
            raise BackendError(f"--server {url}: its answer is none of OpenAI's API ({error!r})") from error
        return prompt, output if isinstance(output, str) else RequestError("the answer has no text")

    with client, ThreadPoolExecutor(concurrency) as pool:
        pending: set[Future[Answer]] = set()
        try:
            name = model or str(call("GET", "models", None)["data"][0]["id"])
            for prompt in prompts:
                pending.add(pool.submit(ask, prompt, name))
                if len(pending) == concurrency:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except (KeyError, IndexError, TypeError) as error:
            raise BackendError(f"--server {url}: names no model; give --model") from error
        finally:
            for future in pending:
                future.cancel()


def answer_with_model(
    model: PreTrainedModel, maker: RowMaker, batch_size: int, sampling: Sampling, prompts: Iterator[Prompt]
) -> Iterator[Answer]:
    """In PyTorch, in batches; a prompt and its answer have ``maker.max_length`` tokens at most."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    torch.manual_seed(sampling.seed)
    manner: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        manner = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    end = model.generation_config.eos_token_id
    generate: Any = model.generate
    ends = [] if end is None else end if isinstance(end, list) else [end]
    while batch := [prompt for _, prompt in zip(range(batch_size), prompts, strict=False)]:
        rows: list[tuple[Prompt, torch.Tensor]] = []
        for prompt in batch:
            ids = maker.prompt(prompt.example)
            if len(ids) < maker.max_length:
                rows.append((prompt, ids))
            else:
                yield prompt, RequestError(f"{prompt.example.where}: {len(ids)} tokens, and no room for an answer")
        if not rows:
            continue
        ids, mask = (
            pad_sequence(column, batch_first=True, padding_side="left").long()
            for column in ([column for _, column in rows], [torch.ones_like(column) for _, column in rows])
        )
        width = ids.shape[1]
        most = min(sampling.max_output_len, maker.max_length - width)
        with torch.no_grad():
            generated = generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=most,
                pad_token_id=min(ends, default=0),
                **manner,
            )
        for (prompt, _), output in zip(rows, generated[:, width:].tolist(), strict=True):
            length = next((index for index, token in enumerate(output) if token in ends), len(output))
            yield prompt, maker.text(output[:length])
