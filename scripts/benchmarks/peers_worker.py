"""The side of peers.py that runs in the peers' own environment (scripts/benchmarks/peers_setup makes it).

    peers_worker.py versions                              as JSON
    peers_worker.py gguf LLAMA_CPP_SOURCE CHECKPOINT OUT  a checkpoint as float32 GGUF
    peers_worker.py generate TARGET DRAFT DRAFT_LEN [NAME=VALUE ..]  OpenVINO GenAI; requests and answers are JSON
    peers_worker.py openvino_logits MODEL TEXTS OUT [NAME=VALUE ..]
    peers_worker.py llama_cpp_logits MODEL TEXTS OUT

TEXTS is an array [n, S] of tokens, OUT gets the logits [n, S, V]; texts are read CHUNK tokens at a time.
"""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import sys
from typing import Any

import numpy as np

CHUNK = 64
THREADS = 2


def versions() -> None:
    """Of OpenVINO's packages."""
    names = ("openvino", "openvino-genai", "optimum-intel", "nncf")
    print(json.dumps({name: importlib.metadata.version(name) for name in names}))


def gguf(source: str, checkpoint: str, out: str) -> None:
    """llama.cpp's converter knows tokenizers by what they make of a text; the demo's is GPT-2's kind, newly trained."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


def properties(given: tuple[str, ...]) -> dict[str, Any]:
    """OpenVINO's properties from NAME=VALUE."""
    return {"INFERENCE_NUM_THREADS": THREADS, **dict(pair.split("=", 1) for pair in given)}


def generate(target: str, draft: str, draft_len: str, *given: str) -> None:
    """Two pipelines, alone and with the draft; a request is {ids, output_len, drafted}, the answer a list of ids."""
    import openvino
    import openvino_genai as genai

    options = properties(given)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipelines = {
        False: genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **options),
        True: genai.LLMPipeline(
            target,
            "CPU",
            scheduler_config=scheduler,
            draft_model=genai.draft_model(draft, "CPU", **options),
            **options,
        ),
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request["output_len"], True, False
        config.apply_chat_template = False
        if request["drafted"]:
            config.num_assistant_tokens = int(draft_len)
        ids = openvino.Tensor(np.array([request["ids"]], np.int64))
        print(json.dumps(list(pipelines[request["drafted"]].generate(ids, config).tokens[0])), flush=True)


def openvino_logits(model: str, texts: str, out: str, *given: str) -> None:
    """The network alone gives every logit; the pipelines do not."""
    import openvino

    compiled = openvino.Core().compile_model(f"{model}/openvino_model.xml", "CPU", properties(given))
    found, request = [], compiled.create_infer_request()
    for text in np.load(texts):
        request.reset_state()
        for start in range(0, len(text), CHUNK):
            ids = text[None, start : start + CHUNK]
            end = start + ids.shape[1]
            inputs = {
                "input_ids": ids,
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(start, end)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            names = {name for port in compiled.inputs for name in port.names}
            request.infer({name: value for name, value in inputs.items() if name in names})
            found.append(request.get_tensor("logits").data[0].copy())
    np.save(out, np.concatenate(found).reshape(*np.load(texts).shape, -1))


def llama_cpp_logits(model: str, texts: str, out: str) -> None:
    """By llama-cpp-python, which is given the library that was built for the server (LLAMA_CPP_LIB_PATH)."""
    from llama_cpp import Llama

    rows = np.load(texts)
    sizes = {"n_ctx": 512, "n_batch": CHUNK, "n_ubatch": CHUNK, "n_threads": THREADS, "n_threads_batch": THREADS}
    llama = Llama(model, logits_all=True, verbose=False, **sizes)
    found = []
    for text in rows:
        llama.reset()
        llama.eval(text.tolist())
        found.append(llama.scores[: len(text)].copy())
    np.save(out, np.stack(found))


if __name__ == "__main__":
    commands: dict[str, Any] = {
        own.__name__: own for own in (versions, gguf, generate, openvino_logits, llama_cpp_logits)
    }
    commands[sys.argv[1]](*sys.argv[2:])
