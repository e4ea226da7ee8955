"""Checks large bodies in a separate process, before the server reads them.

Reading megabytes of JSON holds the interpreter's lock, and every stream waits. The server never reads a body whose
fields are refused, for example one with a million ids. It makes only the checks that need a model or a tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from anyio import to_thread

from specrun.errors import RequestError
from specrun.kv_cache.host_memory import return_freed
from specrun.openai.body import DEFAULTS, model_name, read_either
from specrun.openai.messages import MessageShape
from specrun.openai.responses import ResponseShape
from specrun.openai.shapes import ChatShape, CompletionShape
from specrun.sampling.sampler import SamplingParams
from specrun.serve.errors import ApiError, as_api_error
from specrun.serve.json_body import parse
from specrun.serve.log import shown

_READERS: Mapping[str, Callable[[object, SamplingParams, int | None], object]] = {
    "/v1/completions": CompletionShape().read,
    "/v1/chat/completions": ChatShape().read,
    "/v1/responses": ResponseShape().read,
    "/v1/responses/input_tokens": ResponseShape().read,
    "/v1/messages": MessageShape().read,
    "/tokenize": read_either,
}
_PROGRAM = "import os; os.nice(4); from specrun.serve.large_body import main; main()"
"""``nice`` before the imports, so that streams come first. With 4 it gets a quarter of a busy processor, with 10 a
tenth."""
_TIMEOUT_SECONDS = 60.0
"""Seconds after which the process is ended; a check takes tenths of a second."""


class LargeBodies:
    """Owns the process, which starts with the first large body. Checks one body at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._has_replied = False
        """True once the process has replied."""

    async def check(self, path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]) -> str | None:
        """The model that a body ``data`` names, sent to ``path``. Raises ApiError where fields are refused.

        max_prompt_lens: as for ``BodyReader.read``. Without a process that replies, only the name is read, in this one.
        """
        try:
            process = self._process = self._process or await _start()
        except OSError:
            return await _name_of(data)
        try:
            reply = await asyncio.wait_for(_exchange(process, path, data, max_prompt_lens), _TIMEOUT_SECONDS)
        except BaseException as error:  # A late reply would be taken for that to the next body.
            await self.close()
            if not isinstance(error, Exception):
                raise
            if self._has_replied:
                raise ApiError(400, "the body could not be read; send a smaller one") from error
            return await _name_of(data)
        self._has_replied = True
        if "status" in reply:
            raise ApiError(**reply)
        name: str | None = reply["model"]
        return name

    async def close(self) -> None:
        """End the process. The next body starts another one."""
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _name_of(data: bytes) -> str | None:
    return await to_thread.run_sync(lambda: model_name(parse(data)))


async def _start() -> Process:
    # -P: Python imports nothing from the working directory.
    command = (sys.executable, "-P", "-c", _PROGRAM)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


async def _exchange(
    process: Process, path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]
) -> dict[str, Any]:
    """Send a body to the process. Returns the reply of ``check_body``."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([path, [*max_prompt_lens.items()], len(data)]).encode() + b"\n")
    process.stdin.write(data)
    await process.stdin.drain()
    reply: dict[str, Any] = json.loads(await process.stdout.readline())
    return reply


def check_body(path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]) -> dict[str, Any]:
    """The name of a body's model, or the error of its fields, as arguments of ApiError."""
    try:
        body = parse(data)
        name = model_name(body)
        if path in _READERS:
            _READERS[path](body, DEFAULTS, max_prompt_lens.get(name or None))
    except (ApiError, RequestError) as error:
        refusal = as_api_error(error)
        return {"status": refusal.status, "message": refusal.message, "param": refusal.param, "code": refusal.code}
    return {"model": name if name in max_prompt_lens or name is None else shown(name)}


def main() -> None:
    """Check bodies from standard input until the server closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the server too.
    while line := sys.stdin.buffer.readline():
        path, max_prompt_lens, size = json.loads(line)
        reply = check_body(path, sys.stdin.buffer.read(size), dict(max_prompt_lens))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        return_freed()
