"""What the demo pairs learn: texts that every Python installation carries.

As a command it writes them down: ``python -m scripts.corpora --corpus edits --prompts_file prompts.jsonl``.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import click

from scripts.benchmarks.prompts import PROMPTS, SENTENCES

HELP_CHARACTERS, EDIT_CHARACTERS = 150_000, 45_000
"""With more, the models see each text too seldom to learn it. Of an edit they must know every name."""
NUM_PROMPTS, NUM_PARTS = 1024, 4096
PART_CHARACTERS = 800
"""About 220 tokens."""
FUNCTION_CHARACTERS = range(200, 500)
"""Of the functions that are edited."""
DOCSTRING_CHARACTERS = range(120, 2000)


def help_topics() -> list[str]:
    """Those of Python's documentation, shortest first. A paragraph is kept once: many topics quote one another."""
    seen: set[str] = set()
    texts: list[str] = []
    for topic in sorted(topics.values(), key=lambda text: (len(text), text)):
        paragraphs = [text for text in re.split(r"\n\n+", topic.strip()) if text not in seen]
        seen.update(paragraphs)
        if paragraphs:
            texts.append("\n\n".join(paragraphs) + "\n")
        if sum(map(len, texts)) > HELP_CHARACTERS:
            break
    return texts


def docstrings() -> list[str]:
    """Those of the standard library's modules, classes and functions, in the order of the files."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) in DOCSTRING_CHARACTERS and text not in texts:
                    texts.append(f"{text}\n")
        if sum(map(len, texts)) > HELP_CHARACTERS:
            break
    return texts


def docstring_beginnings() -> list[str]:
    """The first three words of docstrings, drawn at random, each once."""
    beginnings = sorted({" ".join(text.split()[:3]) for text in docstrings()})
    random.Random(0).shuffle(beginnings)
    return beginnings[:NUM_PROMPTS]


def code() -> list[str]:
    """Functions of the standard library, written as ``ast`` does, without comments."""
    texts: list[str] = []
    for text, _ in _functions(Path(sysconfig.get_paths()["stdlib"])):
        texts.append(f"{text}\n")
        if sum(map(len, texts)) > HELP_CHARACTERS:
            break
    return texts


def code_beginnings() -> list[str]:
    """First lines of the functions, drawn at random, each once."""
    beginnings = sorted({text.partition("\n")[0] for text in code()})
    random.Random(0).shuffle(beginnings)
    return beginnings[:NUM_PROMPTS]


def sentence_beginnings() -> list[str]:
    """Two to four words with which sentences of the topics begin; none that begin as the benchmarks' prompts do."""
    asked = tuple(" ".join(text.split(" ")[:2]) for text in (*PROMPTS, *SENTENCES))
    found = {
        found for text in help_topics() for found in re.findall(r"(?:^|\n|\. +)([A-Z][a-z]*(?: [a-z]+){1,3})", text)
    }
    generator = random.Random(0)
    beginnings = [sentence.split(" ") for sentence in sorted(found)]
    drawn = generator.choices(beginnings, k=2 * NUM_PROMPTS)
    made = (" ".join(words[: generator.randint(2, len(words))]) for words in drawn)
    return [text for text in made if not text.startswith(asked)][:NUM_PROMPTS]


def parts(texts: Sequence[str]) -> list[str]:
    """Parts of a corpus, each from a random line on."""
    whole = "".join(texts)
    generator = random.Random(0)
    starts = (generator.randrange(len(whole) - 2 * PART_CHARACTERS) for _ in range(NUM_PARTS))
    lines = (whole.index("\n", start) + 1 for start in starts)
    return [whole[line : line + PART_CHARACTERS] for line in lines]


def edits() -> list[tuple[str, str]]:
    """Code edits, as people ask assistants for them: a function of the standard library, and the same with a new name.

    Of each the question and its answer.
    """
    generator = random.Random(0)
    functions = list(_functions(Path(sysconfig.get_paths()["stdlib"])))
    generator.shuffle(functions)
    names = sorted({name for _, own in functions for name in own})
    made: list[tuple[str, str]] = []
    for text, own in functions:
        old, new = generator.choice(own), generator.choice(names)
        answer = re.sub(rf"\b{old}\b", new, text)
        made.append((f"{text}\n\n# The same with {old} renamed to {new}:\n\n", f"{answer}\n"))
        if sum(len(question) + len(answer) for question, answer in made) > EDIT_CHARACTERS:
            break
    return made


def _functions(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Functions of the modules in a directory, each with the names that it uses more than once."""
    for path in sorted(directory.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and len(text := ast.unparse(node)) in FUNCTION_CHARACTERS:
                names = sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)})
                if own := [name for name in names if name != "self" and len(re.findall(rf"\b{name}\b", text)) > 1]:
                    yield text, own


class Corpus(NamedTuple):
    """See ``CORPORA``."""

    characters: int
    """About so many in all texts."""
    texts: Callable[[], list[str]]
    prompts: Callable[[], list[str]]
    """What a model that has learnt the texts can go on with."""


CORPORA = {
    "help": Corpus(HELP_CHARACTERS, help_topics, sentence_beginnings),
    "docstrings": Corpus(HELP_CHARACTERS, docstrings, docstring_beginnings),
    "code": Corpus(HELP_CHARACTERS, code, code_beginnings),
    "edits": Corpus(
        EDIT_CHARACTERS, lambda: ["".join(edit) for edit in edits()], lambda: [question for question, _ in edits()]
    ),
}


@click.command()
@click.option("--corpus", type=click.Choice(list(CORPORA)), default="help", show_default=True)
@click.option("--prompts_file", type=click.Path(path_type=Path), help="Gets beginnings of its texts.")
@click.option("--parts_file", type=click.Path(path_type=Path), help="Gets parts of it, for specbuild train_draft.")
def main(corpus: str, prompts_file: Path | None, parts_file: Path | None) -> None:
    """Write lines of JSON with text."""
    for file, texts in ((prompts_file, CORPORA[corpus].prompts), (parts_file, lambda: parts(CORPORA[corpus].texts()))):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))


if __name__ == "__main__":
    main()
