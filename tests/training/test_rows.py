"""Files of conversations to rows of tokens: which tokens are an answer's, and one-line errors for bad files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbuild.training.data.conversations import read_examples, read_prompt
from specbuild.training.data.rows import Data, Row, RowMaker, join, read_data
from specrun.errors import BuildConfigError
from tests.helpers.character_model import write_lines

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}
NEXT, LAST = {"role": "user", "content": "and"}, {"role": "assistant", "content": "so on"}


def make(target: Path, max_length: int = 100) -> RowMaker:
    return RowMaker(target, max_length, 320, False)


def answers(maker: RowMaker, path: Path) -> list[str]:
    """What is wanted of each row."""
    rows = [row for example in read_examples(path, "--data") for row in maker.rows(example)]
    return [maker.text(row.ids[row.wanted].tolist()) for row in rows]


def test_only_answers_are_wanted(target: Path, tmp_path: Path) -> None:
    share_gpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good day"}]
    path = write_lines(
        tmp_path / "data.jsonl",
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER, NEXT, LAST, NEXT]},
        {"conversations": share_gpt},
        {"text": "all of it"},
    )
    assert answers(make(target), path) == ["good day;", "good day;so on;", "good day;", "all of it"]


def test_templates_that_render_earlier_answers_differently(target: Path, tmp_path: Path) -> None:
    """An earlier answer is counted only where the text has it as the target would have written it."""
    path = write_lines(tmp_path / "data.jsonl", {"messages": [USER, ANSWER, NEXT, LAST]})
    (tmp_path / "model").mkdir()
    for file in target.glob("*.json"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert answers(make(tmp_path / "model"), path) == ["so on"]
    # One that ends with the beginning of an answer, whether it is asked to or not.
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    assert answers(make(tmp_path / "model"), path)[0].startswith("good day<")


def test_long_texts_are_cut(target: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"text": "a" * 25}, {"messages": [USER, ANSWER]})
    rows = [row for example in read_examples(path, "--data") for row in make(target, 10).rows(example)]
    assert [len(row.ids) for row in rows] == [10, 10, 5, 10]


def test_batches(target: Path, tmp_path: Path) -> None:
    """Every row comes once an epoch, in another order each, and never what is held out."""
    texts = [{"text": "ab" * (n + 3)} for n in range(23)]
    data = read_data(write_lines(tmp_path / "data.jsonl", *texts, {"text": "a"}), "--data", make(target))
    assert (len(data.rows), len(data.held_out), data.skipped) == (22, 1, 1)
    epochs = []
    for epoch in range(2):
        batches = [data.batch(step, 4, seed=1).mask.sum(1).tolist() for step in range(epoch * 6, epoch * 6 + 6)]
        assert all(max(lengths) - min(lengths) <= 8 for lengths in batches), "little is filled up"
        lengths = [length for batch in batches for length in batch]
        epochs.append(lengths)
        assert sorted(lengths) == sorted(len(row.ids) for row in data.rows)
    assert data.num_batches(4) == 6
    assert epochs[0] != epochs[1]
    batch = join(data.rows[:2])
    assert (int(batch.mask.sum()), int(batch.wanted.sum())) == (14, 14)
    assert batch.wanted[0].tolist() == [True] * 6 + [False] * 2


def test_the_commonest_tokens() -> None:
    import torch

    row = Row(torch.tensor([7, 7, 3, 5, 5, 5]).int(), torch.tensor([0, 1, 1, 1, 1, 1]).bool())
    assert Data([row], [], 0).commonest(2, 10).tolist() == [3, 5]
    assert Data([row], [], 0).commonest(4, 10).tolist() == [0, 3, 5, 7]


BAD: list[tuple[Any, str]] = [
    ({"messages": [USER]}, "line 2: no assistant turn"),
    ({"messages": []}, "line 2: expected 'messages'"),
    ({"messages": ["hi"]}, "line 2: message 1 has no role"),
    ({"messages": [USER, {"role": "assistant"}]}, "line 2: message 2 has no content"),
    ({"messages": [USER, ANSWER], "tools": "all"}, "line 2: tools"),
    ({"other": 1}, "line 2: expected 'messages'"),
    ([1], "line 2: expected a JSON object"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_lines(tmp_path: Path, line: Any, said: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"messages": [USER, ANSWER]}, line)
    with pytest.raises(BuildConfigError, match=said) as caught:
        list(read_examples(path, "--data"))
    assert str(caught.value).startswith(f"--data {path}: line 2: ")


def test_bad_files(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for content, said in [
        (b"", "is empty"),
        (b'{"text": "abcdef"}\n{"text": \n', "line 2: not readable JSON"),
        (b"\xff\xfe\n", "cannot be read as UTF-8"),
        (b'{"text": "ab"}\n{"text": "abcdef"}\n', "1 of 2 texts are long enough"),
    ]:
        path.write_bytes(content)
        with pytest.raises(BuildConfigError, match=said):
            read_data(path, "--data", make(target))


def test_prompts(tmp_path: Path) -> None:
    """A conversation up to the last turn of the user; a line of a plain file is one."""
    example = read_prompt(json.dumps({"messages": [USER, ANSWER, NEXT, LAST]}), "here", True)
    assert list(example.messages) == [USER, ANSWER, NEXT]
    assert read_prompt(" hi \n", "here", False).messages == ({"role": "user", "content": "hi"},)
    assert read_prompt(json.dumps({"prompt": "hi"}), "here", True).messages == (USER,)
    assert read_prompt(json.dumps({"text": "hi"}), "here", True).text == "hi"
    for line, said in [({"messages": [ANSWER]}, "no user's turn"), ({"prompt": "a", "tools": [{}]}, "tools")]:
        with pytest.raises(BuildConfigError, match=said):
            read_prompt(json.dumps(line), "here", True)
