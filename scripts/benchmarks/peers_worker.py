"""The side of peers.py that runs in the peers' own environment (scripts/benchmarks/peers_setup makes it).

    peers_worker.py versions                              as JSON
    peers_worker.py gguf LLAMA_CPP_SOURCE CHECKPOINT OUT  a checkpoint as float32 GGUF
    peers_worker.py openvino TARGET DRAFT DRAFT_LEN [NAME=VALUE ..]
    peers_worker.py genai TARGET DRAFT DRAFT_LEN          ONNX Runtime GenAI
    peers_worker.py transformers TARGET DRAFT DRAFT_LEN
    peers_worker.py openvino_logits MODEL TEXTS OUT [NAME=VALUE ..]
    peers_worker.py llama_cpp_logits MODEL TEXTS OUT

The three write texts: a request is a line of JSON {prompts, output_len, drafted}, and so is its answer, a list of ids
for each prompt. TEXTS is an array [n, S] of tokens, OUT gets the logits [n, S, V]; it is read CHUNK tokens at a time.
"""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 64
THREADS = 2


def versions() -> None:
    """Of the peers' packages."""
    names = ("openvino", "openvino-genai", "optimum-intel", "nncf", "onnxruntime-genai", "transformers", "torch")
    print(json.dumps({name: importlib.metadata.version(name) for name in names}))


def gguf(source: str, checkpoint: str, out: str) -> None:
    """llama.cpp's converter knows tokenizers by what they make of a text; the demo's is GPT-2's kind, newly trained."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", "f32"]
    if json.loads((Path(checkpoint) / "config.json").read_text())["model_type"].startswith("qwen3_5"):
        sys.argv.append("--no-mtp")  # Else it wants a multi-token prediction layer, which ours has not.
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


def properties(given: tuple[str, ...]) -> dict[str, Any]:
    """OpenVINO's properties from NAME=VALUE."""
    return {"INFERENCE_NUM_THREADS": THREADS, **dict(pair.split("=", 1) for pair in given)}


def answer(generate: Callable[[list[list[int]], int, bool], Any]) -> None:
    """Requests from standard input, until it ends."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        texts = generate(request["prompts"], request["output_len"], request["drafted"])
        print(json.dumps([[int(token) for token in text] for text in texts]), flush=True)


def openvino(target: str, draft: str, draft_len: str, *given: str) -> None:
    """Two pipelines, alone and with the draft; ``-``: alone only."""
    import openvino
    import openvino_genai as genai

    options = properties(given)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    ways = {False: options}
    if draft != "-":
        ways[True] = {**options, "draft_model": genai.draft_model(draft, "CPU", **options)}
    pipelines = {
        drafted: genai.ContinuousBatchingPipeline(target, scheduler, "CPU", own) for drafted, own in ways.items()
    }

    def generate(prompts: list[list[int]], output_len: int, drafted: bool) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        config.apply_chat_template = False
        if drafted:
            config.num_assistant_tokens = int(draft_len)
        texts = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return [found.m_generation_ids[0] for found in pipelines[drafted].generate(texts, [config] * len(texts))]

    answer(generate)


def genai(target: str, draft: str, draft_len: str) -> None:
    """The pair is a model of its own, whose configuration names both graphs."""
    import onnxruntime_genai as genai

    folders = {role: Path(path) for role, path in (("decoder", target), ("draft", draft))}
    configs = {role: json.loads((path / "genai_config.json").read_text()) for role, path in folders.items()}
    for role in folders:
        own = configs[role]["model"]["decoder"]
        own["session_options"]["intra_op_num_threads"] = THREADS
        configs["decoder"]["model"][role] = own | {"filename": f"{role}/{own['filename']}"}
    with tempfile.TemporaryDirectory() as work:
        for role, path in folders.items():
            (Path(work) / role).symlink_to(path.absolute())
        for file in folders["decoder"].glob("*token*"):
            shutil.copyfile(file, Path(work) / file.name)
        configs["decoder"]["speculative"] = {"max_draft_tokens": int(draft_len)}
        (Path(work) / "genai_config.json").write_text(json.dumps(configs["decoder"]))
        models = {False: genai.Model(target), True: genai.Model(work)}

    def generate(prompts: list[list[int]], output_len: int, drafted: bool) -> Any:
        ids = np.array(prompts, np.int32)  # All prompts are of one length.
        params = genai.GeneratorParams(models[drafted])
        length = ids.shape[1] + output_len
        params.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(prompts))
        generator = genai.Generator(models[drafted], params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row)[ids.shape[1] :] for row in range(len(prompts))]

    answer(generate)


def transformers(target: str, draft: str, draft_len: str) -> None:
    """Assisted generation with as many draft tokens in every round."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assistant: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    assistant.generation_config.num_assistant_tokens = int(draft_len)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def generate(prompts: list[list[int]], output_len: int, drafted: bool) -> Any:
        options = {"do_sample": False, "max_new_tokens": output_len, "min_new_tokens": output_len}
        ids = torch.tensor(prompts)  # All prompts are of one length.
        mask = torch.ones_like(ids)
        texts = model.generate(
            ids, attention_mask=mask, **options, **({"assistant_model": assistant} if drafted else {})
        )
        return texts[:, ids.shape[1] :].tolist()

    answer(generate)


def openvino_logits(model: str, texts: str, out: str, *given: str) -> None:
    """The network alone gives every logit; the pipelines do not."""
    import openvino

    compiled = openvino.Core().compile_model(f"{model}/openvino_model.xml", "CPU", properties(given))
    rows, request, found = np.load(texts), compiled.create_infer_request(), None
    for row, text in enumerate(rows):
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
            logits = request.get_tensor("logits").data[0]
            found = _array(out, rows, logits.shape[-1]) if found is None else found
            found[row, start:end] = logits


def llama_cpp_logits(model: str, texts: str, out: str) -> None:
    """By llama-cpp-python, which is given the library that was built for the server (LLAMA_CPP_LIB_PATH)."""
    from llama_cpp import Llama

    rows = np.load(texts)
    sizes = {"n_ctx": 512, "n_batch": CHUNK, "n_ubatch": CHUNK, "n_threads": THREADS, "n_threads_batch": THREADS}
    llama = Llama(model, logits_all=True, verbose=False, **sizes)
    found = _array(out, rows, llama.n_vocab())
    for row, text in enumerate(rows):
        llama.reset()
        llama.eval(text.tolist())
        found[row] = llama.scores[: len(text)]


def _array(out: str, rows: Any, vocab: int) -> Any:
    """Logits [n, S, V] in a file: of many tokens and a large vocabulary they are gigabytes."""
    return np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=(*rows.shape, vocab))


if __name__ == "__main__":
    commands: dict[str, Any] = {
        own.__name__: own for own in (versions, gguf, openvino, genai, transformers, openvino_logits, llama_cpp_logits)
    }
    commands[sys.argv[1]](*sys.argv[2:])
