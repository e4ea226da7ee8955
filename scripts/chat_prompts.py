"""Questions to an assistant, for a draft to learn what a chat model answers: ``python -m scripts.chat_prompts -h``.

Every task is asked about every subject; what quotes and code need comes from the standard library. Subjects and
library texts behind the first ones are held out: they are asked in comparisons only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import click

from scripts.corpora import docstrings, edits

SUBJECTS = """
the water cycle; black holes; bees; the French Revolution; sourdough bread; photosynthesis; electric cars; chess;
volcanoes; the human heart; jazz; the Roman Empire; coral reefs; vaccines; the moon landing; inflation; haiku; penguins;
tea; the printing press; earthquakes; yoga; solar panels; the Great Wall of China; dreams; sharks; public libraries;
the immune system; origami; glaciers; Shakespeare; bicycles; gravity; coffee; the Silk Road; migration of birds; memory;
rainforests; the Olympic Games; recycling; dinosaurs; lighthouses; budgeting; the stock market; meditation; wolves;
the Renaissance; chocolate; tides; radio; the periodic table; gardening; elections; whales; fire safety; the violin;
deserts; DNA; trains; time management; the pyramids; bridges; honesty; sleep; submarines; impressionism; rice; robots;
mountains; the alphabet; football; friendship; the Industrial Revolution; spiders; wine; poetry; satellites; job
interviews; Antarctica; magnets; folk tales; hurricanes; paper; swimming; the brain; democracy; bread; clouds; castles;
insurance; the Amazon river; comets; cats; marathon running; cooking pasta; wind energy; the Vikings; butterflies;
mathematics; the ozone layer; camping; antibiotics; ballet; online shopping; the Second World War; owls; salt; maps;
artificial intelligence; pottery; rivers; weather forecasts; dogs; photography; nutrition; trade unions; clocks; cotton;
the solar system; stress; kites; tropical fruit; courts of law; noise; the telephone; horses; icebergs; novels; bamboo;
public transport; lightning; parenting; the Mediterranean Sea; caves; cheese; passwords; telescopes; elephants; museums;
vegetable soup; the Renaissance in Florence; knitting; fossils; water pollution; airports; drums; mushrooms; islands
"""
TASKS = """
Explain {} to a child.
What is important to know about {}?
Write a short story about {}.
Write a poem about {}.
Give me five tips about {}.
List some interesting facts about {}.
What are common misunderstandings about {}?
Write an email to a colleague who asked about {}.
What questions would an expert on {} ask?
Describe the history of {} in a few sentences.
Compare {} with something similar.
Why do people care about {}?
Write a dialogue between two friends about {}.
How would you teach {} in school?
Plan a day trip with {} as its theme.
Write an introduction to an essay about {}.
"""
LIBRARY = ("Write a Python function with this docstring:\n\n{}", "Summarize this:\n\n{}", "Explain this:\n\n{}")
HELD_OUT = 16
"""Subjects, and texts of the library, for comparisons."""
NUM_PROMPTS = 2048


def subjects() -> list[str]:
    """All of them, in an order that does not follow the list's."""
    found = [" ".join(subject.split()) for subject in SUBJECTS.split(";")]
    random.Random(0).shuffle(found)
    return found


def prompts(*, held_out: bool = False) -> Iterator[tuple[str, str]]:
    """The kind of each prompt (chat, library, edit) and its text, in an order drawn at random."""
    part = slice(HELD_OUT) if held_out else slice(HELD_OUT, None)
    texts = [text for text in docstrings() if len(text) < 1200]
    random.Random(0).shuffle(texts)
    found = [("chat", task.format(subject)) for task, subject in product(TASKS.split("\n")[1:-1], subjects()[part])]
    found += [("library", LIBRARY[index % len(LIBRARY)].format(text)) for index, text in enumerate(texts[part])]
    found += [("edit", question) for question, _ in edits()[part]]
    random.Random(1).shuffle(found)
    return iter(found)


@click.command()
@click.option("--prompts_file", required=True, type=click.Path(path_type=Path), help="A line of JSON each.")
@click.option("--count", default=NUM_PROMPTS, show_default=True)
@click.option("--held_out", is_flag=True, help="The others, which nothing is trained on.")
def main(prompts_file: Path, count: int, held_out: bool) -> None:
    """Write prompts for specbuild prepare_data."""
    prompts_file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt": text}) + "\n" for _, text in islice(prompts(held_out=held_out), count))
    prompts_file.write_text("".join(lines))


if __name__ == "__main__":
    main()
