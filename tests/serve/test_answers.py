"""What clients of OpenAI's API get: the texts of the decoder itself, in that API's shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams
from tests.helpers.servers import Server, events, running

ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": 0, "max_tokens": 12}
CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def text(
    server: Server, prompt: Any, temperature: float = 0.0, seed: int | None = None, n: int = 1, **options: Any
) -> list[str]:
    params = SamplingParams(temperature, seed=seed)
    found = server.decoder.generate(prompt, params, RequestOptions(max_output_len=12, **options), n=n)
    return [str(request.text) for request in found]


def test_a_completion_is_the_decoders_text(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "the cat", **GREEDY}).json()
    (choice,) = answer["choices"]
    assert choice["text"] == text(server, "the cat")[0] and choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion" and answer["model"] == "target"
    used = answer["usage"]
    assert used["completion_tokens"] == 12 and used["total_tokens"] == 12 + used["prompt_tokens"]
    assert answer["speculation"]["drafted_tokens"] >= answer["speculation"]["accepted_tokens"] >= 0


def test_what_speculation_did_has_vllms_names(server: Server) -> None:
    """In one piece and in the last chunk of a stream; of all answers together; not where nothing drafts."""
    body = {"prompt": "the cat", "n": 2, "temperature": 0.9, "seed": 5, "max_tokens": 12, "draft_len": 3}
    ways = {
        "/v1/completions": body,
        "/v1/chat/completions": {**body, "messages": CHAT, "prompt": None},
    }
    for path, asked in ways.items():
        whole = server.post(path, asked).json()
        found, ours = whole["metrics"]["speculative_decoding"], whole["speculation"]
        last = events(server.post(path, {**asked, "stream": True, "stream_options": {"include_usage": True}}))[-1]
        assert last["metrics"] == whole["metrics"]
        assert (found["num_draft_tokens"], found["num_accepted_draft_tokens"]) == (
            ours["drafted_tokens"],
            ours["accepted_tokens"],
        )
        assert found["num_spec_tokens"] == 3 and len(found["acceptance_histogram"]) == 4
        assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] > 0
    answer = server.post("/v1/responses", {"input": "the cat", "max_output_tokens": 12}).json()
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 10
    assert "metrics" not in server.post("/v1/completions", {**body, "draft_len": 0}).json()


def test_prompts_of_every_kind_with_several_answers_each(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "a dog"}).json()["tokens"]
    body = {"prompt": ["the cat", ids], "n": 2, "temperature": 0.9, "seed": 5, "max_tokens": 12}
    answer = server.post("/v1/completions", body).json()
    expected = text(server, "the cat", 0.9, 5, 2) + text(server, ids, 0.9, 5, 2)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 48


def test_a_stream_adds_up_to_the_whole_answer(server: Server) -> None:
    body = {"prompt": ["the cat", "a dog"], "n": 2, "seed": 1, "max_tokens": 12, "logprobs": 2, "echo": True}
    whole = server.post("/v1/completions", body).json()
    chunks = events(server.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}))
    *parts, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [*chain.from_iterable(part["logprobs"][name] for part in own)] == choice["logprobs"][name]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


def test_a_chat_through_openais_client(server: Server, client: Any) -> None:
    parts = [{"role": "developer", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    plain = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(
        model="target", messages=parts, max_completion_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    message = whole.choices[0].message
    assert message.content == text(server, plain)[0] and message.role == "assistant" and message.refusal is None
    scores = whole.choices[0].logprobs.content
    assert len(scores) == 12 and all(len(score.top_logprobs) == 3 for score in scores)
    assert all(score.logprob == score.top_logprobs[0].logprob for score in scores)
    stream = client.chat.completions.create(
        model="target",
        messages=plain,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *rest, last = list(stream)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == message.content
    assert rest[-1].choices[0].finish_reason == "length" and rest[-1].choices[0].delta.content is not None
    assert last.usage and last.usage.completion_tokens == 12


def test_the_bytes_of_tokens_spell_the_text(server: Server) -> None:
    body = {"messages": CHAT, "max_tokens": 40, "seed": 9, "logprobs": True}
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    spelt = b"".join(bytes(score["bytes"]) for score in choice["logprobs"]["content"])
    assert spelt.decode(errors="replace") == choice["message"]["content"]


def test_stop_texts_biases_and_seeds_reach_the_decoder(server: Server) -> None:
    whole = text(server, "the cat")[0]
    body = {"prompt": "the cat", **GREEDY, "stop": whole[4:6]}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == whole[: whole.index(whole[4:6])] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == whole[4:6]
    biased = {"prompt": "the cat", **GREEDY, "logit_bias": {"70": 100}, "max_tokens": 3, "logprobs": 0}
    (choice,) = server.post("/v1/completions", biased).json()["choices"]
    assert len(set(choice["logprobs"]["tokens"])) == 1
    seeded = {"prompt": "the cat", "seed": 4, "max_tokens": 12}
    assert len({server.post("/v1/completions", seeded).text.split('"text":')[1][:30] for _ in range(3)}) == 1


def test_speculation_changes_no_text(server: Server) -> None:
    body = {"prompt": "the cat", "seed": 3, "max_tokens": 30}
    answers = [server.post("/v1/completions", body | {"draft_len": length}).json() for length in (0, 1, 4)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert answers[0]["speculation"]["drafted_tokens"] == 0 < answers[2]["speculation"]["drafted_tokens"]


def test_the_prompts_log_probabilities_are_hugging_faces(server: Server, hf: Path) -> None:
    """As lm-eval's local-completions asks for them: the prompt is scored, and one token is written or none."""
    prompt = "the cat sat on the mat and looked"
    ids = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    model = AutoModelForCausalLM.from_pretrained(hf / "target", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logits[place, token].item() for place, token in enumerate(ids[1:])]
    for longest in (0, 1):
        body = {"prompt": [ids, prompt], "max_tokens": longest, "temperature": 0, "logprobs": 1, "echo": True}
        answer = server.post("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == 2 * longest
        for choice in answer["choices"]:
            scores = choice["logprobs"]
            assert scores["token_logprobs"][0] is None and len(scores["tokens"]) == len(ids) + longest
            assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
            best = [max(top.values()) for top in scores["top_logprobs"][1:]]
            greedy = [score == top for score, top in zip(scores["token_logprobs"][1:], best, strict=True)]
            assert greedy[: len(ids) - 1] == [
                int(row.argmax()) == token for row, token in zip(logits, ids[1:], strict=False)
            ]
            assert choice["text"].startswith(prompt) and math.isfinite(sum(best))


def test_many_clients_get_their_own_texts(server: Server) -> None:
    def ask(number: int) -> str:
        body = {"prompt": f"client {number}", "seed": number, "max_tokens": 12, "stream": number % 2 == 0}
        answer = server.post("/v1/completions", body)
        chunks = events(answer) if number % 2 == 0 else [answer.json()]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(36)))
    assert found == [text(server, f"client {number}", 1.0, number)[0] for number in range(36)]
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0


def test_metrics_count_what_was_done(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair()) as server:
        bodies = [{"prompt": "the cat sat", "seed": seed, "max_tokens": 10, "draft_len": 3} for seed in range(4)]
        answers = [server.post("/v1/completions", body).json() for body in bodies]
        did = [answer["speculation"] for answer in answers]
        assert server.metric("generation_tokens_total") == 40
        assert server.metric("spec_decode_num_draft_tokens_total") == sum(one["drafted_tokens"] for one in did)
        assert server.metric("spec_decode_num_accepted_tokens_total") == sum(one["accepted_tokens"] for one in did)
        assert server.metric("time_to_first_token_seconds_count") == 4
        assert server.metric("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in answers)
        page = server.get("/metrics").text
        assert 'specrun:request_success_total{finished_reason="length",model_name="target"} 4.0' in page


def test_the_dashboard_asks_for_metrics_that_are_there(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 2}).status_code == 200
    asked = set(re.findall(r"\$\{prefix\}:(\w+)", (ROOT / "docs" / "grafana.json").read_text()))
    given = {name.replace("specrun:", "") for name in re.findall(r"^specrun:\w+", server.get("/metrics").text, re.M)}
    assert len(asked) > 12
    assert asked - given <= {"spec_decode_num_accepted_tokens_per_pos_total"}, "that one comes with the first draft"


def test_models_version_and_texts_of_ids(server: Server, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["target"] and client.models.retrieve(
        "target"
    ).id == "target"
    ids = server.post("/tokenize", {"prompt": "the cat"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "the cat"}
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    assert (
        chat["count"] == len(chat["tokens"]) > len(ids)
        and chat["max_model_len"] == server.decoder.target.build_config.max_seq_len
    )
    assert server.get("/health").json() == {"status": "ok"} and "version" in server.get("/version").json()
