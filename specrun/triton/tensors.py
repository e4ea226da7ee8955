"""The tensors of a Triton model: their names and types, and input tensors as requests.

Names and types are those of TensorRT-LLM's backend (``tensorrt_llm_bls``), so its clients work.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.arguments import show
from specrun.errors import RequestError
from specrun.openai.body import token_biases
from specrun.request.factory import Prompt
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams

Array = npt.NDArray[Any]


class TensorType(NamedTuple):
    """A tensor of the model. Inputs have one more dimension than ``dims``: a batch of 1."""

    name: str
    data_type: str
    dims: str = "1"


INPUTS = (
    TensorType("text_input", "TYPE_STRING"),
    TensorType("input_ids", "TYPE_INT32", "-1"),
    TensorType("max_tokens", "TYPE_INT32"),
    TensorType("min_tokens", "TYPE_INT32"),
    TensorType("stream", "TYPE_BOOL"),
    TensorType("temperature", "TYPE_FP32"),
    TensorType("top_k", "TYPE_INT32"),
    TensorType("top_p", "TYPE_FP32"),
    TensorType("min_p", "TYPE_FP32"),
    TensorType("random_seed", "TYPE_UINT64"),
    TensorType("repetition_penalty", "TYPE_FP32"),
    TensorType("presence_penalty", "TYPE_FP32"),
    TensorType("frequency_penalty", "TYPE_FP32"),
    TensorType("stop_words", "TYPE_STRING", "-1"),
    TensorType("end_id", "TYPE_INT32"),
    TensorType("pad_id", "TYPE_INT32"),
    TensorType("num_draft_tokens", "TYPE_INT32"),
    TensorType("use_draft_logits", "TYPE_BOOL"),
    TensorType("return_log_probs", "TYPE_BOOL"),
    TensorType("exclude_input_in_output", "TYPE_BOOL"),
    TensorType("logit_bias", "TYPE_STRING"),
    TensorType("guided_decoding_guide_type", "TYPE_STRING"),
    TensorType("guided_decoding_guide", "TYPE_STRING"),
    TensorType("beam_width", "TYPE_INT32"),
    TensorType("num_return_sequences", "TYPE_INT32"),
)
OUTPUTS = (
    TensorType("text_output", "TYPE_STRING"),
    TensorType("output_ids", "TYPE_INT32", "-1"),
    TensorType("output_log_probs", "TYPE_FP32", "-1, -1"),
    TensorType("cum_log_probs", "TYPE_FP32"),
    TensorType("finish_reason", "TYPE_STRING"),
    TensorType("total_draft_tokens", "TYPE_INT32"),
    TensorType("total_accepted_draft_tokens", "TYPE_INT32"),
    TensorType("acceptance_rate", "TYPE_FP32"),
)

_SAMPLING = {field.name: field.name for field in fields(SamplingParams) if field.name != "logit_bias"} | {
    "seed": "random_seed"
}
"""Names of inputs by fields of ``SamplingParams``."""
_OPTIONS = {
    "max_output_len": "max_tokens",
    "min_output_len": "min_tokens",
    "draft_len": "num_draft_tokens",
    "stop": "stop_words",
}
_GUIDES = ("json", "json_schema", "regex", "choice", "grammar")
"""Values of ``guided_decoding_guide_type``. The first three are TensorRT-LLM's."""
_ERROR_NAMES = {"seed": "random_seed", "stop_ids": "end_id", **_OPTIONS}
"""Names of inputs by fields in the decoder's errors, where they differ."""
_PARAMETERS = ("model",)
"""Parameters of a request that are ignored: some clients send them."""


@dataclass(frozen=True)
class ParsedRequest:
    """The values of a request's inputs."""

    prompt: Prompt
    prompt_name: str
    params: SamplingParams
    options: RequestOptions
    stream: bool
    is_probe: bool
    """True for a probe whether the engine works (``max_tokens`` 0)."""


def read_inputs(tensors: Mapping[str, Array], parameters: Iterable[str] = ()) -> ParsedRequest:
    """Read ``tensors``. parameters: names of other parameters. Raises RequestError, naming the input."""
    _refuse_parameters(parameters)
    values = {name: _value(name, array) for name, array in tensors.items()}
    prompts = [name for name in ("text_input", "input_ids") if name in values]
    if len(prompts) != 1:
        raise RequestError(f"text_input: {'given beside input_ids' if prompts else 'missing'}; give one of the two")
    for name in ("beam_width", "num_return_sequences"):
        if values.get(name, 1) != 1:
            raise RequestError(f"{name} {values[name]}: expected 1; send several requests with seeds of their own")
    options = {field: values[name] for field, name in _OPTIONS.items() if name in values}
    if is_probe := options.get("max_output_len") == 0:
        options["max_output_len"] = 1
    stream = values.get("stream", False)
    if "end_id" in values:
        options["stop_ids"] = (values["end_id"],)
    if "use_draft_logits" in values:
        options["acceptance"] = "logits" if values["use_draft_logits"] else "tokens"
    if values.get("return_log_probs"):
        options["logprobs"] = 0
    options |= _constraint(values)
    options["echo"] = not values.get("exclude_input_in_output", True) and not stream
    sampling = {field: values[name] for field, name in _SAMPLING.items() if name in values}
    if "logit_bias" in values:
        sampling["logit_bias"] = token_biases("logit_bias", _json("logit_bias", values["logit_bias"]))
    params = SamplingParams(**sampling)
    return ParsedRequest(values[prompts[0]], prompts[0], params, RequestOptions(**options), stream, is_probe)


def _constraint(values: Mapping[str, Any]) -> dict[str, Any]:
    """The option that constrains the output; empty without a constraint."""
    name, guide = "guided_decoding_guide", values.get("guided_decoding_guide")
    kind = values.get(f"{name}_type")
    if kind is None and guide is None:
        return {}
    if kind not in _GUIDES:
        raise RequestError(f"{name}_type {show(kind)}: expected one of {', '.join(_GUIDES)}")
    if kind == "json":
        return {"json_object": True}
    if guide is None:
        raise RequestError(f"{name}: missing; {name}_type {kind} needs it")
    return {kind: _json(name, guide) if kind == "choice" else guide}


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} {show(text)}: expected JSON ({error})") from error


def input_error(error: Exception) -> str:
    """The message of an error of the decoder, with the name of the input at fault."""
    message, param = str(error) or repr(error), getattr(error, "param", None)
    return message.replace(param, _ERROR_NAMES[param], 1) if param in _ERROR_NAMES else message


def _value(name: str, array: Array) -> Any:
    """The value of a tensor: a text, texts, numbers or one number. Raises RequestError for texts that are not UTF-8."""
    items = array.reshape(-1).tolist()
    if array.dtype == np.object_:
        items = [_text(name, item) for item in items]
    return items if name in ("input_ids", "stop_words") else items[0]


def _text(name: str, data: bytes | str) -> str:
    try:
        return data.decode() if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 at byte {error.start}; write the text as UTF-8") from error


def _refuse_parameters(names: Iterable[str]) -> None:
    """Raise RequestError for unknown parameters: Triton's ``generate`` makes them of misspelt inputs."""
    inputs = [tensor.name for tensor in INPUTS]
    for name in names:
        if name not in _PARAMETERS and not name.startswith(("triton_", "sequence_")):
            nearest = difflib.get_close_matches(name, inputs, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"expected some of {', '.join(inputs)}"
            raise RequestError(f"{name}: no such input; {hint}")
