#!/usr/bin/env python3
"""Whether a model answers: exit status 0 or 1. For liveness probes, as Kubernetes has them; it needs only Python.

Triton's own /v2/health paths report success when a model's process has died. This program asks for an answer: the model
decodes one token and drops it. While it decodes other texts, it only checks that its steps end, so a busy server does
not fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request


def main() -> int:
    """Send one request, and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server's HTTP port is")
    parser.add_argument("--model", default="speculative")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    args = parser.parse_args()
    body = json.dumps({"input_ids": [0], "max_tokens": 0}).encode()
    address = f"{args.url}/v2/models/{args.model}/generate"
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=args.timeout) as answer:
            reason = json.load(answer)["finish_reason"]
    except Exception as error:
        body_text = error.read().decode(errors="replace") if hasattr(error, "read") else ""
        print(f"{address}: {error} {body_text}".strip(), file=sys.stderr)
        return 1
    print(f"{args.model}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
