"""Programs that others write for servers of this kind: LangChain, and lm-eval's log-likelihoods.

lm-eval's test runs where it is installed (``pip install 'lm_eval[api]'``). It is none of our test's packages: it brings
scikit-learn, which transformers then imports in every process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.conftest import Server

KEY = SecretStr("none")


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


def test_lm_evals_log_likelihoods_are_hugging_faces(server: Server, hf: Path) -> None:
    instance = pytest.importorskip("lm_eval.api.instance", reason="lm-eval is not installed")
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    asked = [
        ("the cat sat on", " the mat"),
        ("the quick brown", " fox jumps over the lazy dog"),
        ("draft tokens", " are"),
    ]
    client = completions.LocalCompletionsAPI(
        model="target", base_url=f"{server.url}/v1/completions", tokenizer=str(hf / "target"), max_length=64
    )
    requests = [
        instance.Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=index)
        for index, arguments in enumerate(asked)
    ]
    found = client.loglikelihood(requests)
    tokenizer = AutoTokenizer.from_pretrained(hf / "target")
    model = AutoModelForCausalLM.from_pretrained(hf / "target", dtype=torch.float32)
    for (context, continuation), (likelihood, is_greedy) in zip(asked, found, strict=True):
        ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
        tokens = torch.tensor(ids[start:])
        assert likelihood == pytest.approx(scores[range(len(tokens)), tokens].sum().item(), abs=1e-3)
        assert is_greedy == bool((scores.argmax(-1) == tokens).all())
