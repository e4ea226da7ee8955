"""Random requests through random pairs, beside the target alone: how many texts differ in any token?

Everything that shapes an engine's passes is random: prompts and their common beginnings, lengths, draft lengths, what
drafts, batches, order and time of arrival, the prefix cache. The target alone decodes one request at a time without a
prefix cache. Small random models are made, in every form. The control is in ``tests/backends/test_bit_exact.py``: an
engine whose bits depend on the shape of a pass.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.driver import why_no_gpu
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams, TokenLogprob

RESULTS = Path(__file__).parent / "benchmarks" / "results" / "fuzz_bit_exact.json"
FEW_BITS: dict[str, dict[str, Any]] = {
    "int8": {"qformat": "int8"},
    "int4": {"qformat": "int4"},
    "int4 by 64": {"qformat": "int4", "group_size": 64},
}
FAMILIES = {
    "recurrent": ("qwen3_5", 4),
    "experts": ("qwen3_moe", 3),
    "latent attention": ("deepseek_v2", 3),
    "chunks": ("llama4", 2),
}
"""Family and layers of targets that are no dense Llama."""
FORMS = (
    *("float32", *FEW_BITS, "recurrent", "recurrent int8", "experts", "experts int4", "latent attention"),
    *("latent attention int8", "chunks", "2 ranks", "2 ranks int8", "2 ranks int4", "cuda", "cuda int4"),
    *("cuda fp8", "cuda nvfp4", "cuda experts", "float16 cache", "float16 cache int8"),
)
"""Targets and the form of their weights; of "2 ranks" two processes compute a dense one.

cuda: for our own CUDA kernels, in bfloat16, which run on the simulator where there is no GPU."""
GROUP = 24
"""Requests that one pair decodes."""
LONGEST_OUTPUT = 32


@dataclass
class Tally:
    """What was decoded, and how much of it differs from the target alone."""

    requests: int = 0
    different_texts: int = 0
    different_logprobs: int = 0
    """Requests of which any token's log-probability differs by a bit: finer than texts."""
    output_tokens: int = 0
    rounds: int = 0
    evaluated: int = 0
    accepted: int = 0
    cached_prompt_tokens: int = 0

    def add(self, request: Request, own: Request) -> None:
        """Count a finished request; ``own`` is the target's."""
        stats = request.stats
        self.requests += 1
        self.different_texts += request.output != own.output
        self.different_logprobs += _logprobs(request) != _logprobs(own)
        self.output_tokens += len(request.output)
        self.rounds += stats.rounds
        self.evaluated += stats.evaluated
        self.accepted += stats.accepted
        self.cached_prompt_tokens += stats.cached


def _logprobs(request: Request) -> list[TokenLogprob | None]:
    return [token.logprob for token in request.token_outputs]


def fuzz(
    target: Path,
    drafts: Sequence[Path],
    count: int,
    seed: int,
    report: Callable[[Tally], None] = lambda _: None,
    rank_hosts: tuple[str, ...] = (),
) -> Tally:
    """Decode ``count`` random requests with ``target`` and random drafters: one of ``drafts``, or suffix matching.

    rank_hosts: the machines of the pair's ranks; the target alone has all of its ranks here. Raises what opening and
    decoding raise.
    """
    tally = Tally()
    alone_config = DraftTargetConfig(reuse_blocks=False)
    with SpeculativeDecoder.open(target, config=alone_config) as alone:
        dice = random.Random(seed)
        beginnings = [_tokens(dice, alone, 80) for _ in range(6)]
        while tally.requests < count:
            dice = random.Random(f"{seed}, {tally.requests}")
            make = [_request(dice, alone, beginnings) for _ in range(min(GROUP, count - tally.requests))]
            config, draft = _pair(dice, drafts, alone.target.build_config.max_draft_len)
            settled = replace(config, rank_hosts=rank_hosts)
            with SpeculativeDecoder.open(target, draft, settled) as pair:
                requests = [request() for request in make]
                _decode(dice, pair, requests)
            for request, again in zip(requests, make, strict=True):
                own = again()
                own.options = replace(own.options, draft_len=None)
                _decode(dice, alone, [own])
                tally.add(request, own)
            report(tally)
    return tally


def _tokens(dice: random.Random, decoder: SpeculativeDecoder, length: int) -> list[int]:
    return dice.choices(range(decoder.target.graph.vocab_size), k=length)


def _request(
    dice: random.Random, decoder: SpeculativeDecoder, beginnings: Sequence[Sequence[int]]
) -> Callable[[], Request]:
    """A function that makes a request, always the same. Many prompts begin alike; some have a single token."""
    build = decoder.target.build_config
    output = dice.randint(1, LONGEST_OUTPUT)
    most = min(build.max_input_len, build.max_seq_len - output)
    prompt = list(dice.choice(beginnings)[: dice.randint(0, most)]) if dice.random() < 0.7 else []
    prompt = (prompt + _tokens(dice, decoder, dice.randint(1, 24)))[:most]
    if dice.random() < 0.1:  # Up to the last position.
        output = build.max_seq_len - len(prompt)
    params = SamplingParams(seed=dice.randrange(1 << 32))
    if dice.random() < 0.5:
        params = replace(params, temperature=dice.choice((0.3, 0.8, 1.2)), top_p=dice.choice((0.9, 1.0)))
    draft_len = dice.choice((None, None, None, 0, 1))
    return lambda: Request(prompt, params, output, options=RequestOptions(draft_len=draft_len, logprobs=0))


def _pair(dice: random.Random, drafts: Sequence[Path], max_draft_len: int) -> tuple[DraftTargetConfig, Path | None]:
    draft = dice.choice([*drafts, None])
    length = dice.choice((None, *range(1, max_draft_len + 1)))
    kept = dice.choice((None, None, 0, 64))
    return DraftTargetConfig(length, draft=None if draft else "suffix", max_tokens_in_kv_cache=kept), draft


def _decode(dice: random.Random, decoder: SpeculativeDecoder, requests: Sequence[Request]) -> None:
    """Add them one by one or several at a time, while those before them are decoded."""
    waiting = list(requests)
    while waiting or any(request.finish_reason is None for request in requests):
        for _ in range(dice.choice((0, 0, 1, 1, 2, 6)) if len(requests) > 1 else 1):
            if waiting:
                decoder.scheduler.add(waiting.pop(0))
        decoder.scheduler.step()
    for request in requests:
        if request.error:
            raise request.error


def make_engines(root: Path, form: str) -> tuple[Path, list[Path]]:
    """A random target in ``form``, and drafts: one that often agrees, itself, and one that never does."""
    from tests.helpers.engines import make_engine, make_onnx
    from tests.helpers.families import save_checkpoint

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384}
    if form.startswith("cuda"):
        bits, family = form.removeprefix("cuda").strip(), "qwen3"
        if bits == "experts":
            bits, family = "", "gpt_oss"
        return _make_cuda_engines(root, family, {"qformat": bits} if bits else {}, sizes)
    ranks = 2 if form.startswith("2 ranks") else 1
    bits = next((bits for bits in FEW_BITS if form.endswith(bits)), "")
    family, layers = next((of for name, of in FAMILIES.items() if form.startswith(name)), ("llama3", 3))
    cache = "float16" if form.startswith("float16 cache") else "auto"
    sizes |= {"head_dim": 32} if cache == "float16" else {}  # Narrower heads have no cache in 16 bits.
    hf = save_checkpoint(root / "hf", family, seed=1, num_hidden_layers=layers, **sizes)
    checkpoint = make_onnx(hf, root / "onnx", verify=False, **FEW_BITS.get(bits, {}))
    other_hf = save_checkpoint(root / "other_hf", "lfm2" if family == "qwen3_5" else "qwen2", seed=2)
    other = make_onnx(other_hf, root / "other_onnx", verify=False)
    rough = make_onnx(hf, root / "rough_onnx", verify=False, qformat="int8" if bits.startswith("int4") else "int4")
    sizes = {"max_draft_len": 7, "max_batch_size": 5, "tp_size": ranks, "kv_cache_dtype": cache}
    target = make_engine(checkpoint, root / "target", **sizes)
    sources = {"rough": rough, "itself": checkpoint, "other": other}
    return target, [make_engine(source, root / name, max_batch_size=5) for name, source in sources.items()]


def _make_cuda_engines(
    root: Path, family: str, options: dict[str, Any], sizes: dict[str, Any]
) -> tuple[Path, list[Path]]:
    """A target for our own CUDA kernels, and drafts: itself, and one that never agrees."""
    from tests.helpers.engines import make_engine, make_onnx
    from tests.helpers.families import save_checkpoint

    if why_no_gpu():
        from tests.gpu_simulator import gpus

        gpus.start(1)
    hf = {name: save_checkpoint(root / name / "hf", name, seed=1, **sizes) for name in (family, "gemma3")}
    options = {"verify": False, "dtype": "bfloat16", **options}
    onnx = {name: make_onnx(path, root / name / "onnx", **options) for name, path in hf.items()}
    target = make_engine(onnx[family], root / "target", max_draft_len=5, max_batch_size=4, backend="cuda")
    other = make_engine(onnx["gemma3"], root / "other", max_batch_size=4, backend="cuda")
    return target, [target, other]


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--form", "forms", type=click.Choice(FORMS), multiple=True, default=FORMS, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=3000, show_default=True, help="Of each form.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output_file", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(forms: tuple[str, ...], requests: int, seed: int, output_file: Path) -> None:
    """Count texts that differ from the target's own; exit status 1 where any does."""
    import onnxruntime
    from transformers.utils import logging

    logging.disable_progress_bar()
    results: dict[str, Any] = json.loads(output_file.read_text()) if output_file.is_file() else {}
    failed = False
    for form in forms:
        with tempfile.TemporaryDirectory() as work:
            target, drafts = make_engines(Path(work), form)
            exact_on = open_engine(target).exact_on
            click.echo(f"{form}: exact to the bit on {exact_on}", err=True)
            tally = fuzz(target, drafts, requests, seed, lambda so_far: click.echo(so_far, err=True))
        results[form] = {
            "machine": describe_processor(),
            "python": platform.python_version(),
            "onnxruntime": onnxruntime.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": seed,
            "exact_on": exact_on,
            **asdict(tally),
        }
        failed |= tally.different_texts + tally.different_logprobs > 0
        output_file.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
