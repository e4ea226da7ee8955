"""Streams to a Triton server, for tests and benchmarks. It runs in .cache/triton/venv, which has a client's packages.

Standard input has one JSON object: ``url``; ``clients``, a list of what each client asks for at once over its one
stream, ``[{"model": .., "inputs": {name: values}}]``; and ``cancel_after``, after how many responses each client
leaves. Standard output gets a list with ``responses`` (by request, tensors by name), ``errors`` and ``seconds`` of each
client.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype


def encode(name: str, given: Any, types: dict[str, str]) -> Any:
    """A tensor of shape [1, n], or as ``given`` says."""
    given = given if isinstance(given, dict) else {"values": given if isinstance(given, list) else [given]}
    kind = given.get("datatype", types.get(name, "BYTES"))
    values = [v.encode("utf-8", "surrogateescape") if isinstance(v, str) else v for v in given["values"]]
    array = np.array(values, triton_to_np_dtype(kind)).reshape(given.get("shape", (1, len(values))))
    tensor = grpc.InferInput(name, array.shape, kind)
    tensor.set_data_from_numpy(array)
    return tensor


def decode(result: Any) -> dict[str, Any]:
    """Tensors as lists."""
    tensors = {output.name: result.as_numpy(output.name).reshape(-1) for output in result.get_response().outputs}
    return {
        name: [v.decode() for v in array] if array.dtype == object else array.tolist()
        for name, array in tensors.items()
    }


def ask(url: str, asks: list[Any], cancel_after: int | None) -> dict[str, Any]:
    """Everything over one stream."""
    came: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    responses: list[list[Any]] = [[] for _ in asks]
    errors: list[str] = []
    with grpc.InferenceServerClient(url) as client:
        # A stream of one request may end with its error, which has a status then.
        headers = {"triton_grpc_error": "true"} if len(asks) == 1 else {}
        client.start_stream(lambda result, error: came.put((result, error)), headers=headers)
        types = {
            model: {tensor.name: tensor.datatype for tensor in client.get_model_metadata(model).inputs}
            for model in {one["model"] for one in asks}
        }
        began = time.perf_counter()
        for number, one in enumerate(asks):
            tensors = [encode(name, given, types[one["model"]]) for name, given in one["inputs"].items()]
            client.async_stream_infer(one["model"], tensors, request_id=str(number), enable_empty_final_response=True)
        left, seen = len(asks), 0
        while left:
            result, error = came.get(timeout=60)
            if error:
                errors.append(str(error))
                left -= 1
                continue
            response = result.get_response()
            responses[int(response.id)].append(decode(result))
            left -= response.parameters["triton_final_response"].bool_param
            seen += 1
            if cancel_after is not None and seen >= cancel_after:
                break
        seconds = time.perf_counter() - began
        client.stop_stream(cancel_requests=cancel_after is not None)
    return {"responses": responses, "errors": errors, "seconds": seconds}


def main() -> None:
    """All clients at once."""
    given = json.load(sys.stdin)
    try:
        with ThreadPoolExecutor(len(given["clients"])) as pool:
            found = list(pool.map(lambda asks: ask(given["url"], asks, given["cancel_after"]), given["clients"]))
    except InferenceServerException as error:
        sys.exit(f"{error}")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
