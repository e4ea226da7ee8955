#!/usr/bin/env python3
"""Whether a model answers: exit status 0 or 1. For Kubernetes and others that must know; it needs Python alone.

Triton's own /v2/health paths say that all is well when a model's process has died. This asks for an answer: one token
is decoded and thrown away, or, where texts are being decoded, the engine's word that its steps end is enough, so that a
busy server is not taken for a dead one.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request


def main() -> int:
    """Ask once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server's HTTP port is")
    parser.add_argument("--model", default="speculative")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    given = parser.parse_args()
    body = json.dumps({"input_ids": [0], "max_tokens": 0}).encode()
    address = f"{given.url}/v2/models/{given.model}/generate"
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=given.timeout) as answer:
            reason = json.load(answer)["finish_reason"]
    except Exception as error:
        said = error.read().decode(errors="replace") if hasattr(error, "read") else ""
        print(f"{address}: {error} {said}".strip(), file=sys.stderr)
        return 1
    print(f"{given.model}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
