"""Drafts behind long prompts: two real models with every kind of draft that there is for them.

SmolLM2-135M-Instruct (8,192 positions) has the head of examples/, suffix matching, both, and Gemma 3 as a draft of
another tokenizer. Gemma 3 270M (32,768 positions) has suffix matching, and SmolLM2 as a draft. Prompts are beginnings
of a text that the model goes on with: source code of the standard library, or Python's help topics. Each case is the
pair beside its target alone, in turns, greedy, one text at a time. Needs what scripts/real_models makes.

What is compared is the time of a token behind the first one; what the prompt takes is told apart from it.
"""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import click
from tokenizers import Tokenizer

from scripts.benchmarks.real_drafts import HEAD
from specbuild.pair import Pair, PairRequest
from specrun.builder import BuildOptions, QFormat
from specrun.config import DraftKind, DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import bench, machine_of
from specrun.evaluation.bench_results import Result
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.prompt_sets import BenchPrompt

SMOLLM2, GEMMA = "SmolLM2-135M-Instruct", "gemma-3-270m"
CHARACTERS = 400_000
"""Of each text, more than the longest prompt has."""


class Case(NamedTuple):
    """A model and its draft."""

    target: str
    draft: str | None
    lookup: DraftKind | None
    most_tokens: int
    """Tokens of the longest prompt."""


CASES = {
    "SmolLM2, head": Case(SMOLLM2, str(HEAD), None, 8000),
    "SmolLM2, suffix": Case(SMOLLM2, None, "suffix", 8000),
    "SmolLM2, head + suffix": Case(SMOLLM2, str(HEAD), "suffix", 8000),
    "SmolLM2, Gemma 3 as draft": Case(SMOLLM2, GEMMA, None, 8000),
    "Gemma 3, suffix": Case(GEMMA, None, "suffix", 32000),
    "Gemma 3, SmolLM2 as draft": Case(GEMMA, SMOLLM2, None, 8000),
}


def texts() -> dict[str, str]:
    """What prompts are the beginnings of."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = "\n".join(path.read_text() for path in paths)
    return {"code": code[:CHARACTERS], "help topics": "\n\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]}


def beginning(engine: Path, text: str, tokens: int) -> str:
    """So many tokens of a text."""
    encoding = Tokenizer.from_file(str(engine / "tokenizer.json")).encode(text, add_special_tokens=False)
    return text[: encoding.offsets[tokens - 1][1]]


def token_ms_alone(result: Result, output_len: int) -> float:
    """Milliseconds of the target's tokens behind the first one."""
    total = 1e3 * output_len / result.tokens_per_second_alone.median
    return (total - result.first_token_ms_alone.median) / (output_len - 1)


@click.command()
@click.option("--models_dir", type=click.Path(path_type=Path), default=Path(".cache/real_models"), show_default=True)
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, default=list(CASES))
@click.option("--qformat", type=click.Choice(["int8", "int4"]), default="int8", show_default=True)
@click.option("--length", "lengths", type=int, multiple=True, default=(2000, 8000, 32000), show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=2, show_default=True)
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Engines are kept here.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    models_dir: Path,
    cases: tuple[str, ...],
    qformat: QFormat,
    lengths: tuple[int, ...],
    output_len: int,
    repetitions: int,
    work_dir: Path,
    json_file: Path | None,
) -> None:
    """Measure every case behind prompts of each length."""
    os.environ["XDG_CACHE_HOME"] = str(work_dir.absolute())
    results: list[dict[str, Any]] = []
    for name in cases:
        case = CASES[name]
        built = BuildOptions(
            qformat=qformat,
            max_batch_size=1,
            max_draft_len=8,
            max_seq_len=8192 if case.target == SMOLLM2 or case.draft else 32768,
            verify=False,
        )
        draft = case.draft and str(models_dir / case.draft)  # The head's path is absolute.
        engines = Pair(PairRequest(str(models_dir / case.target), draft, built)).engines()
        settings = BenchSettings(
            batch_sizes=[1],
            draft_lens=[None],
            output_len=output_len,
            repetitions=repetitions,
            config=DraftTargetConfig(draft=case.lookup, reuse_blocks=False),
        )
        for length in [length for length in lengths if length <= case.most_tokens]:
            for kind, text in texts().items():
                prompt = beginning(engines["target"], text, min(length, built.max_seq_len or length) - output_len)
                (found,) = bench(engines["target"], engines.get("draft"), [BenchPrompt(prompt, kind)], settings)
                alone = token_ms_alone(found, output_len)
                row = {key: value for key, value in asdict(found).items() if key not in ("example", "by_category")}
                results.append({"case": name, "length": length, "text": kind, "token_ms_alone": alone, **row})
                click.echo(
                    f"{name}, {length} tokens of {kind}: first token {found.first_token_ms_alone.median / 1e3:.1f} s "
                    f"alone, {found.first_token_ms.median / 1e3:.1f} s; then {alone:.2f} -> {found.token_ms:.2f} ms "
                    f"a token, {alone / found.token_ms:.2f}x, {found.tokens_per_round:.2f} tokens a round, "
                    f"identical {found.identical_ids}"
                )
                if json_file:
                    machine = machine_of(open_engine(engines["target"]))
                    json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
