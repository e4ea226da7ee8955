"""One model behind Ray Serve: each replica runs a server of its own, and Ray replaces a replica whose server has ended.

    pip install 'ray[serve]' httpx
    python examples/ray_serve.py TARGET DRAFT REPLICAS

Clients ask http://127.0.0.1:8000/v1, as they ask 'specrun serve'. Ctrl+C ends it.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment(max_ongoing_requests=64, health_check_period_s=5)
class Specrun:
    """A server on a Unix socket, and what passes requests on to it."""

    def __init__(self, target: str, draft: str) -> None:
        socket = f"{tempfile.mkdtemp()}/socket"
        self.server = subprocess.Popen([sys.executable, "-m", "specrun", "serve", target, draft, "--uds", socket])
        transport = httpx.AsyncHTTPTransport(uds=socket)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://localhost") as client:
            while not self.is_ready(client):
                time.sleep(0.5)

    def is_ready(self, client: httpx.Client) -> bool:
        """Whether the server takes requests. Raises RuntimeError if it has ended."""
        self.check_health()
        try:
            return client.get("/ready").is_success
        except httpx.TransportError:
            return False

    def check_health(self) -> None:
        """Ray calls this every few seconds, and replaces a replica that raises."""
        if self.server.poll() is not None:
            raise RuntimeError(f"specrun serve has ended with exit code {self.server.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and the answer back as it comes."""
        headers = [(name, value) for name, value in request.headers.items() if name != "host"]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self.client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await self.client.send(sent, stream=True)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:  # A client that leaves ends its answer.
                await answer.aclose()

        return StreamingResponse(pieces(), answer.status_code, answer.headers)

    def __del__(self) -> None:
        self.server.terminate()


if len(sys.argv) != 4:
    sys.exit(__doc__)

target, draft, replicas = sys.argv[1:]
application = Specrun.options(num_replicas=int(replicas)).bind(target, draft)  # type: ignore[attr-defined]
serve.run(application, blocking=True)
