"""Where a server listens: Unix sockets, TLS, pages of other origins, and paths below a proxy's."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, RequestError
from specrun.serve.engine import EngineThread, QueueFullError
from specrun.serve.keys import ApiKey
from specrun.serve.listening import ListenOptions
from tests.helpers.server_process import serving
from tests.helpers.servers import running
from tests.serve.test_abuse import until

PEM = Path(__file__).parent / "localhost.pem"
"""A key and its certificate, of localhost and 127.0.0.1, signed by itself."""
LOCKED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgAC/SBj4UV7wICA+gw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEFv2TGp2SphVKMKgPU6HiUYEgZBg
2toavxM1jTOo+AaxKJY9jYNCMP/z98i6ITkiwKW3DKKU05IF8M1rSh9wf11JUq43
TQhiQRClb54rl5041CyiXw2vXSWeNTFBVW9SQxMubVuYUbXZlA5llbOrULaYSeFu
Ow8x1KYBVgDOSEI901SpTLY78zqtWV07KeI0HG/IG+PI9tHnP9bzJ+CUYqYbC+M=
-----END ENCRYPTED PRIVATE KEY-----
"""
"""The key with a password."""
BODY = {"prompt": "the cat", "max_tokens": 2}
PAGE = "https://ui.example:8443"
Open = Callable[[], SpeculativeDecoder]


def options(**given: Any) -> ListenOptions:
    return ListenOptions(port=0, **given)


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization, x-own"}
    return {"Origin": origin, **asked}


@pytest.mark.parametrize("keys", [(), (ApiKey(b"secret"),)], ids=["open", "key"])
def test_pages_of_allowed_origins_use_the_server(open_pair: Open, keys: tuple[ApiKey, ...]) -> None:
    """Browsers ask before without a key, and read errors too. Other pages are told nothing."""
    headers = {"Authorization": "Bearer secret"} if keys else {}
    with running(open_pair(), keys=keys, listening=options(allowed_origins=f"{PAGE}, http://other.example")) as server:
        path = f"{server.url}/v1/completions"
        for method in ("POST", "DELETE"):
            told = httpx.options(path, headers=preflight(PAGE, method))
            assert told.status_code == 200 and told.headers["access-control-allow-origin"] == PAGE
            assert method in told.headers["access-control-allow-methods"]
            assert "x-own" in told.headers["access-control-allow-headers"]
        found = server.post("/v1/completions", BODY, headers={**headers, "Origin": PAGE})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id, x-ratelimit" in found.headers["access-control-expose-headers"]
        wrong = server.post("/v1/completions", {}, headers={**headers, "Origin": PAGE})
        assert wrong.status_code == 400 and wrong.headers["access-control-allow-origin"] == PAGE
        assert httpx.options(path, headers=preflight("https://evil.example")).status_code == 400
        evil = server.post("/v1/completions", BODY, headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in evil.headers
        assert evil.status_code == 403


def test_all_origins_and_none(open_pair: Open) -> None:
    with running(open_pair(), listening=options(allowed_origins="*")) as server:
        found = server.post("/v1/completions", BODY, headers={"Origin": PAGE})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "*"
    with running(open_pair()) as server:
        assert server.post("/v1/completions", BODY, headers={"Origin": PAGE}).status_code == 403
        assert httpx.options(f"{server.url}/v1/completions", headers=preflight(PAGE)).status_code in (403, 405)


def test_tls(open_pair: Open) -> None:
    context = ssl.create_default_context(cafile=PEM)
    with running(open_pair(), listening=options(ssl_certfile=PEM)) as server:
        assert server.url.startswith("https://")
        whole = httpx.post(f"{server.url}/v1/completions", json={**BODY, "temperature": 0}, verify=context)
        assert whole.status_code == 200
        stream = {**BODY, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, verify=context) as answer:
            text = "".join(answer.iter_text())
        assert text.endswith("data: [DONE]\n\n") and whole.json()["usage"]["completion_tokens"] == 2
        with pytest.raises(httpx.ConnectError, match=r"self.signed"):
            httpx.get(f"{server.url}/health", verify=ssl.create_default_context())
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_who_does_not_read_over_tls_is_ended_too(open_pair: Open) -> None:
    """One that reads gets megabytes."""
    context = ssl.create_default_context(cafile=PEM)
    body = {"prompt": "the cat", "n": 56, "max_tokens": 100, "ignore_eos": True, "logprobs": 20}
    with running(open_pair(), listening=options(ssl_certfile=PEM), write_seconds=0.4) as server:
        url = f"{server.url}/v1/completions"
        whole = httpx.post(url, json=body, verify=context, timeout=60)
        assert whole.text.count('"finish_reason":"length"') == 56 and len(whole.content) > 2_000_000
        with httpx.stream("POST", url, json={**body, "stream": True}, verify=context, timeout=60) as answer:
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]

            def is_open() -> bool:
                own = psutil.Process().net_connections()
                return any(one.raddr and one.raddr.port == port and one.status == "ESTABLISHED" for one in own)

            assert is_open() and until(lambda: not is_open())


def test_a_unix_socket(open_pair: Open, tmp_path: Path) -> None:
    """One that a server left is replaced, and one that is served is not; at the end it is gone."""
    given = ListenOptions(uds=tmp_path / "socket")
    given.listen().close()
    assert (tmp_path / "socket").is_socket()
    with running(open_pair(), listening=given) as server:
        assert server.url == f"unix:{tmp_path / 'socket'}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(given.uds)), base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 2
            stream = client.post("/v1/completions", json={**BODY, "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
        with pytest.raises(BackendError, match=r"--uds .*in use"):
            given.listen()
    assert not (tmp_path / "socket").exists()
    (tmp_path / "file").touch()
    for path in ("file", "nowhere/socket", "long" * 40):
        with pytest.raises(BackendError, match="--uds"):
            ListenOptions(uds=tmp_path / path).listen()
    assert (tmp_path / "file").exists()


def test_paths_below_that_of_a_proxy(open_pair: Open) -> None:
    with running(open_pair(), keys=(ApiKey(b"secret"),), listening=options(root_path="/llm/a")) as server:
        key = {"Authorization": "Bearer secret"}
        for root in ("", "/llm/a"):
            assert server.get(f"{root}/health").status_code == 200
            assert server.get(f"{root}/v1/models").status_code == 401
            assert server.get(f"{root}/v1/models", headers=key).json()["data"][0]["id"] == "target"
            assert server.post(f"{root}/v1/messages", {}, headers=key).json()["type"] == "error"
        for path in ("/llm/v1/models", "/llm/ab/v1/models", "/llm/a/llm/a/v1/models"):
            assert server.get(path, headers=key).status_code == 404


def test_a_server_is_ready_while_it_takes_requests(open_pair: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise QueueFullError("requests wait, in /home/somebody/engines")

    with running(open_pair(), keys=(ApiKey(b"secret"),)) as server:
        assert server.get("/ready").json() == {"status": "ok"}
        monkeypatch.setattr(EngineThread, "problem", lambda _: "it hangs")
        assert server.get("/ready").status_code == 503
        monkeypatch.undo()
        monkeypatch.setattr(EngineThread, "require_room", full)
        found = server.get("/ready")
        assert found.status_code == 503 and found.json()["reason"] == "requests wait, in engines"
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"root_path": "/"}, "root_path"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"allowed_origins": "ui.example"}, "allowed_origins ui.example"),
        ({"allowed_origins": "https://"}, "allowed_origins"),
        ({"allowed_origins": f"{PAGE}/index"}, "allowed_origins"),
        ({"ssl_keyfile": PEM}, "needs ssl_certfile"),
        ({"ssl_certfile": Path("nowhere")}, "ssl_certfile nowhere"),
        ({"ssl_certfile": Path(__file__)}, "ssl_certfile"),
        ({"port": 65536}, "port"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        ListenOptions(**given)


def test_a_key_with_a_password_is_refused(tmp_path: Path) -> None:
    """Nobody is there to type it."""
    certificate = PEM.read_text().partition("-----BEGIN CERTIFICATE")
    (tmp_path / "locked.pem").write_text(LOCKED + "".join(certificate[1:]))
    with pytest.raises(RequestError, match="without a password"):
        ListenOptions(ssl_certfile=tmp_path / "locked.pem")


def test_the_command_has_the_options(engines: Path) -> None:
    with serving(engines, "--root_path", "/llm", "--allowed_origins", PAGE) as server:
        found = httpx.get(f"{server.url}/llm/v1/models", headers={"Origin": PAGE})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == PAGE
