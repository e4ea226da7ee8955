"""Large bodies are looked at in a process of its own, before the server reads them.

Reading megabytes of JSON holds the interpreter's lock, and every stream waits. A body whose fields are refused, for a
million ids say, is never read by the server itself. What takes the model or the tokenizer to see, the server finds.
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
"""Streams come first, before its imports too. Beside them it has a quarter of a processor; with 10 it had a tenth."""
_SECONDS = 60.0
"""A look takes tenths of a second; after so many the process is ended."""


class LargeBodies:
    """The process, which begins with the first large body and ends with the server. Not for two bodies at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._works = False
        """Whether the process has answered once."""

    async def check(self, path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]) -> str | None:
        """The model that ``data`` names, the body of a request for ``path``. Raises ApiError where fields are refused.

        max_prompt_lens: as for ``BodyReader.read``. Where no process can be started, or none that answers, the server
        has to find out itself.
        """
        try:
            process = self._process = self._process or await _start()
        except OSError:
            return await _name_of(data)
        try:
            found = await asyncio.wait_for(_ask(process, path, data, max_prompt_lens), _SECONDS)
        except BaseException as error:  # Its answer would be taken for that to the next body.
            await self.close()
            if not isinstance(error, Exception):
                raise
            if self._works:
                raise ApiError(400, "the body could not be read; send a smaller one") from error
            return await _name_of(data)
        self._works = True
        if "status" in found:
            raise ApiError(**found)
        name: str | None = found["model"]
        return name

    async def close(self) -> None:
        """End the process. The next body begins another one."""
        process, self._process = self._process, None
        if process:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _name_of(data: bytes) -> str | None:
    return await to_thread.run_sync(lambda: model_name(parse(data)))


async def _start() -> Process:
    # -P: nothing is imported from the working directory.
    command = (sys.executable, "-P", "-c", _PROGRAM)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


async def _ask(
    process: Process, path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]
) -> dict[str, Any]:
    """What the process says of a body: see ``look``."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([path, [*max_prompt_lens.items()], len(data)]).encode() + b"\n")
    process.stdin.write(data)
    await process.stdin.drain()
    reply: dict[str, Any] = json.loads(await process.stdout.readline())
    return reply


def look(path: str, data: bytes, max_prompt_lens: Mapping[str | None, int | None]) -> dict[str, Any]:
    """The model that a body names, or why its fields are refused, as arguments of ApiError."""
    try:
        body = parse(data)
        name = model_name(body)
        if path in _READERS:
            _READERS[path](body, DEFAULTS, max_prompt_lens.get(name or None))
    except (ApiError, RequestError) as error:
        answer = as_api_error(error)
        return {"status": answer.status, "message": answer.message, "param": answer.param, "code": answer.code}
    return {"model": name if name in max_prompt_lens or name is None else shown(name)}


def main() -> None:
    """Look at bodies until the server closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Of a terminal, which the server gets too.
    while line := sys.stdin.buffer.readline():
        path, max_prompt_lens, size = json.loads(line)
        answer = look(path, sys.stdin.buffer.read(size), dict(max_prompt_lens))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        return_freed()
