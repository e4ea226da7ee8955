"""Programs that others write for servers of this kind: LangChain, lm-eval's log-likelihoods, and AIPerf's counts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.client_environments import environment_with
from tests.helpers.server_process import serving
from tests.helpers.servers import Server

pytestmark = pytest.mark.slow("the API's shapes: serve/test_answers.py, serve/test_requests.py")

KEY = SecretStr("none")
TASK = """\
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity, aggregation: perplexity}}]
"""
EVALUATE = """\
import json, pathlib, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
model, folder, output = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)
results = simple_evaluate("local-completions", model_args=model, tasks=["ours"], task_manager=tasks, bootstrap_iters=0)
answers = [sample["resps"][0][0] for sample in results["samples"]["ours"]]
pathlib.Path(output).write_text(json.dumps(answers))
"""


def test_langchain(server: Server) -> None:
    base = f"{server.url}/v1"
    chat = ChatOpenAI(base_url=base, api_key=KEY, model="target", temperature=0, max_completion_tokens=12)
    messages = [{"role": "user", "content": "the cat"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    answer = chat.invoke("the cat")
    assert answer.content == expected
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream("the cat")) == expected
    complete = OpenAI(base_url=base, api_key=KEY, model="target", temperature=0, max_tokens=12)
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 12}
    assert complete.invoke("the cat") == server.post("/v1/completions", body).json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def lm_eval() -> Path:
    """A Python that has it, in an environment of its own."""
    return environment_with("lm_eval", "lm_eval[api]==0.4.13") / "python"


def test_lm_evals_log_likelihoods_are_hugging_faces(server: Server, hf: Path, lm_eval: Path, tmp_path: Path) -> None:
    """A task of its own kind. Its command would read thousands of other tasks first."""
    asked = [
        ("the cat sat on", " the mat"),
        ("the quick brown", " fox jumps over the lazy dog"),
        ("draft tokens", " are"),
    ]
    lines = [json.dumps({"context": context, "continuation": continuation}) for context, continuation in asked]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "ours.yaml").write_text(TASK.format(data=tmp_path / "asked.jsonl"))
    asks = f"model=target,base_url={server.url}/v1/completions,tokenizer={hf / 'target'},max_length=64"
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [str(lm_eval), "-c", EVALUATE, asks, str(tmp_path), str(tmp_path / "answers.json")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    found = json.loads((tmp_path / "answers.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(hf / "target")
    model = AutoModelForCausalLM.from_pretrained(hf / "target", dtype=torch.float32)
    for (context, continuation), (likelihood, is_greedy) in zip(asked, found, strict=True):
        ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
        tokens = torch.tensor(ids[start:])
        assert likelihood == pytest.approx(scores[range(len(tokens)), tokens].sum().item(), abs=1e-3)
        assert is_greedy == bool((scores.argmax(-1) == tokens).all())


def test_aiperf_counts_what_the_server_does(engines: Path, hf: Path, tmp_path: Path) -> None:
    """NVIDIA's benchmark reads what speculation did from the streams' last chunks; the server counts it by itself."""
    aiperf, own = environment_with("aiperf", "aiperf==0.13.0") / "aiperf", tmp_path / "aiperf"
    load = ["--request-count", "6", "--concurrency", "2", "--isl", "8", "--osl", "16", "--streaming"]
    output = ["--ui", "none", "--artifact-dir", str(own), "--endpoint-type", "completions"]
    with serving(engines, "--draft_len", "3") as server:
        asked = ["--model", "target", "--url", server.url, "--tokenizer", str(hf / "target")]
        said = subprocess.run([aiperf, "profile", *asked, *load, *output], capture_output=True, text=True)
        assert said.returncode == 0, said.stdout + said.stderr
        page = httpx.get(f"{server.url}/metrics").text
    counted = dict(re.findall(r"^specrun:(\w+)_total\{.*\} (\S+)$", page, re.MULTILINE))
    found = json.loads((own / "profile_export_aiperf.json").read_text())
    names = {
        "total_spec_decode_steps": "spec_decode_num_drafts",
        "total_draft_tokens": "spec_decode_num_draft_tokens",
        "total_accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    }
    assert {name: found[name]["avg"] for name in names} == {name: float(counted[own]) for name, own in names.items()}
    assert found["total_draft_tokens"]["avg"] > 20
