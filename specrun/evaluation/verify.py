"""Whether a pair writes what its target alone writes, measured on the pair itself.

Ids: every token of a text must be the target's own choice after the tokens before it: greedy and, for token acceptance,
seeded.
Distribution: short texts of many seeds, drawn by the real loop, against the target's exact probabilities.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from specrun.builder import BuildOptions, engines_of
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import EngineConfig, read_config
from specrun.errors import BackendError, EngineDirError, RequestError
from specrun.evaluation.fit import Fit, chi_squared, ranked
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.penalties import TokenCounts, apply_penalties
from specrun.sampling.sampler import Floats, SamplingParams, probabilities, sample
from specrun.speculative.round import TargetLogits
from specrun.text.grammar import Grammar, Mask
from specrun.text.masks import apply_mask

DRAFT_LEN = 4
"""The default: with ``auto`` the loop might find that drafting does not pay, and nothing would be checked."""
LENGTH = 32
"""Tokens of a text whose ids are compared."""
FEWEST = 64
"""Draws that are made however long they take."""
ROWS = 32
"""Most texts at a time; bounds the memory for their logits."""
DRAWN_PROMPTS = 4
"""Draws share few prompts, so that each prompt's first token is drawn often."""
BINS = 20
WARM = SamplingParams(temperature=0.8)
"""The default: greedy texts alone would show less."""
BLIND = 0.25
"""The largest misplaced share of the probability that may go unseen; beyond it a test by draws is inconclusive."""
Outcome = Literal["good", "wrong", "inconclusive"]


@dataclass
class Part:
    """One comparison with the target, filled as it goes on."""

    name: str
    texts: int = 0
    evaluated: int = 0
    accepted: int = 0
    identical: int | None = None
    """Texts that are byte for byte the target's own; None where texts are not compared."""
    wrong: int = 0
    """Number of tokens that are not the target's (draws: that it cannot draw)."""
    example: str = ""
    fits: dict[str, Fit] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether the target may have written this."""
        return self.wrong == 0 and all(fit.good for fit in self.fits.values())

    @property
    def blind(self) -> str:
        """Why an error could not have shown; empty where it could."""
        if self.accepted == self.evaluated:
            return "no draft token was rejected" if self.evaluated else "no draft token was evaluated"
        if self.fits and (hidden := min(fit.visible for fit in self.fits.values())) > BLIND:
            return f"{hidden:.0%} of the probability could be out of place"
        return ""

    def add(self, requests: Sequence[Request]) -> None:
        """Count finished texts and their draft tokens."""
        self.texts += len(requests)
        self.evaluated += sum(request.stats.evaluated for request in requests)
        self.accepted += sum(request.stats.accepted for request in requests)

    def differ(self, where: str, token: int, expected: int, logits: Floats) -> None:
        """Count a token that is not the target's own; logits [V] are the target's."""
        self.wrong += 1
        if self.wrong == 1:
            self.example = (
                f"{where}: {token} (logit {logits[token]:g}), the target has {expected} ({logits[expected]:g})"
            )

    def lines(self) -> list[str]:
        """The result in lines for people."""
        drafts = f"{self.accepted} of {self.evaluated} drafts accepted"
        if self.identical is not None:
            drafts += f", {self.identical} equal byte for byte"
        wrong = [f"  {self.wrong} tokens are not the target's; {self.example}"] if self.wrong else []
        fits = [f"  {name}: {fit}" for name, fit in self.fits.items()]
        verdict = ("cannot tell: " + self.blind if self.blind else "good") if self.good else "WRONG"
        return [f"{self.name}: {self.texts} texts, {drafts}: {verdict}", *wrong, *fits]


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found: greedy texts, then seeded texts and draws where the settings have them."""

    parts: tuple[Part, ...]
    seconds: float

    @property
    def outcome(self) -> Outcome:
        """``wrong`` where something told the pair from its target, ``inconclusive`` where nothing could have."""
        if not all(part.good for part in self.parts):
            return "wrong"
        return "inconclusive" if any(part.blind for part in self.parts) else "good"

    @property
    def good(self) -> bool:
        """Whether nothing told the pair from its target, though it could have."""
        return self.outcome == "good"

    def lines(self) -> list[str]:
        """The result in lines for people; the verdict comes last."""
        verdict = {
            "good": "no difference from the target alone",
            "wrong": "NOT what the target alone writes",
            "inconclusive": "no difference, but an error could not have shown; give another draft, more --seconds, "
            "or shorter prompts",
        }[self.outcome]
        return [
            *(line for part in self.parts for line in part.lines()),
            f"{verdict} ({self.seconds:.0f} s)",
        ]


def verify(
    target: str | Path,
    draft: str | Path | None,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | None = None,
    config: DraftTargetConfig | None = None,
    seconds: float = 60,
    report: Callable[[str], None] = lambda _: None,
    options: RequestOptions | None = None,
    tokenizer_dir: str | Path | None = None,
    build: BuildOptions | None = None,
) -> Verdict:
    """Check that a pair writes what its target alone would, for about ``seconds`` after loading.

    ``target``, ``draft`` and ``build`` are as ``SpeculativeDecoder.open`` takes them; prompts are texts or token ids.
    ``params`` are the settings of all texts, greedy ones at temperature 0; draws count seeds up from its seed. One
    batch of texts and FEWEST draws take their time in any case. ``report`` hears what is going on. Of ``options``,
    constraints count: then the target's logits are masked, by a matcher that no draft token has moved.
    Raises RequestError, BackendError where rounding may change the target's texts, and what opening the pair raises.
    """
    params, config = (params or WARM).seeded(), config or DraftTargetConfig()
    target_dir, draft_dir = engines_of(target, draft, build)
    engine = read_config(target_dir, EngineConfig, EngineDirError, "specbuild engine")
    if not engine.is_batch_invariant:
        raise BackendError(
            f"{target_dir}: an engine of {engine.backend.name} for GPUs, whose texts are exact up to near-ties only; "
            "verify compares byte for byte: give one for the CPU, or of --backend cuda"
        )
    if config.fixed_draft_len is None:
        config = replace(config, draft_len=min(DRAFT_LEN, engine.build_config.max_draft_len) or None)
    with SpeculativeDecoder.open(target_dir, draft_dir, config, tokenizer_dir) as decoder:
        rounds = decoder.scheduler.round
        for note in decoder.notes:
            report(f"note: {note}")
        asked = enumerate(prompts, 1)
        texts = [decoder.request(each, max_output_len=1, name=f"prompt {n}").prompt for n, each in asked]
        check = _Check(decoder, rounds.target_logits(), texts)
        if options and options.constraint:
            check.grammar = decoder.request(texts[0], options=options, max_output_len=1).grammar
        began = time.perf_counter()
        report("greedy texts, against the target's own")
        parts = [check.ids("greedy", replace(params, temperature=0.0), began + seconds / 4)]
        if not params.greedy and not config.use_logits:
            report("seeded texts, against the target's own")
            parts.append(check.ids("seeded", params, began + seconds / 2))
        if not params.greedy:
            report("short texts of many seeds, against the target's distribution")
            length = LENGTH if check.grammar else 2 * (rounds.max_draft_len + 1)  # Many may be forced.
            parts.append(check.draws("distribution", params, length, began + seconds))
        return Verdict(tuple(parts), time.perf_counter() - began)


class _Check:
    """A pair under test. Between batches of the loop, its target's own runner gives the exact logits."""

    def __init__(self, decoder: SpeculativeDecoder, target: TargetLogits, prompts: Sequence[Sequence[int]]) -> None:
        build = decoder.target.build_config
        self.decoder, self.target, self.prompts = decoder, target, prompts
        self.grammar: Grammar | None = None
        self.rows, self.positions = min(ROWS, build.max_batch_size), build.max_seq_len
        if not prompts:
            raise RequestError("no prompts: expected one or more")

    def ids(self, name: str, params: SamplingParams, deadline: float) -> Part:
        """Decode prompts until ``deadline``, batch by batch, and walk the target alone along what was written."""
        part = Part(name, identical=0)
        while not part.texts or (part.texts < len(self.prompts) and time.perf_counter() < deadline):
            prompts = self.prompts[part.texts : part.texts + self.rows]
            batch = [self._request(prompt, params, min(LENGTH, self.positions - len(prompt))) for prompt in prompts]
            differing = set()
            for row, position, logits in self._alone(self._run(batch)):
                token, expected = batch[row].tokens[position], sample(logits, params, position)
                if token != expected:
                    differing.add(row)
                    where = f"prompt {part.texts + row + 1}, token {position - len(prompts[row]) + 1}"
                    part.differ(where, token, expected, logits)
            part.add(batch)
            part.identical = (part.identical or 0) + len(batch) - len(differing)
        return part

    def draws(self, name: str, params: SamplingParams, length: int, deadline: float) -> Part:
        """Draw until ``deadline`` after the shortest prompts, ``length`` tokens or what fits after all of them."""
        prompts = sorted(self.prompts, key=len)[:DRAWN_PROMPTS]
        length = min(length, self.positions - len(prompts[-1]))
        part, generator = Part(name), np.random.default_rng(0)
        firsts = np.zeros((len(prompts), self.target.vocab_size), np.int64)
        expected = np.zeros(firsts.shape)
        ranks = np.zeros((1, BINS), np.int64)
        while part.texts < FEWEST or time.perf_counter() < deadline:
            numbers = range(part.texts, part.texts + self.rows)
            batch = [self._request(prompts[n % len(prompts)], params.seeded(n), length) for n in numbers]
            for number, request, logits in zip(numbers, self._run(batch), self._whole(batch), strict=True):
                params_at = [request.params.at(len(request.prompt) + at) for at in range(len(logits))]
                drawn, probs = np.array(request.output), np.stack(list(map(probabilities, logits, params_at)))
                # Where a grammar forces the first tokens, the first one that is drawn; it is at the same place always.
                first = int((np.count_nonzero(probs, axis=1) > 1).argmax())
                firsts[number % len(prompts), drawn[first]] += 1
                expected[number % len(prompts)] += probs[first]
                ranks += np.histogram(ranked(drawn, probs, generator.random(len(drawn))), BINS, (0, 1))[0]
                for at in np.flatnonzero(probs[np.arange(len(drawn)), drawn] == 0):
                    token, row = int(drawn[at]), logits[at]
                    part.differ(f"draw {number + 1}, token {at + 1}", token, int(row.argmax()), row)
            part.add(batch)
        part.fits["first tokens"] = chi_squared(firsts, expected)
        part.fits["all tokens by rank"] = chi_squared(ranks, np.full(ranks.shape, ranks.mean()))
        return part

    def _request(self, prompt: Sequence[int], params: SamplingParams, length: int) -> Request:
        return Request(prompt, params, length, grammar=self.grammar)

    def _run(self, requests: list[Request]) -> list[Request]:
        for event in self.decoder.run(requests):
            if event.request.error:
                raise event.request.error
        return requests

    def _alone(self, requests: Sequence[Request]) -> Iterator[tuple[int, int, Floats]]:
        """Row, position and the target's logits [V] there, as the request changes them, for every output token.

        One token a step, as if alone.
        """
        self.target.reserve(len(requests), max(len(request.tokens) for request in requests))
        processors = [_processors(request) for request in requests]
        for step in range(max(len(request.output) for request in requests)):
            active = [step < len(request.output) for request in requests]
            logits = self.target.forward([r.tokens[: len(r.prompt) + step] for r in requests], list(map(int, active)))
            for row, request in enumerate(requests):
                if active[row]:
                    yield row, len(request.prompt) + step, next(processors[row])(logits[row, 0])

    def _whole(self, requests: Sequence[Request]) -> list[list[Floats]]:
        """The target's logits [V] for each request's output tokens, as it changes them, all in one pass."""
        self.target.reserve(len(requests), max(len(request.tokens) for request in requests))
        lengths = [len(request.output) for request in requests]
        logits = self.target.forward([request.tokens[:-1] for request in requests], lengths)
        return [
            [process(row) for process, row in zip(_processors(request), row_logits, strict=False)]
            for request, row_logits in zip(requests, logits, strict=True)
        ]


def _processors(request: Request) -> Iterator[Callable[[Floats], Floats]]:
    """What the request does to the logits [V] of each token of its output, found from the text before it alone."""
    counts = itertools.accumulate(
        request.output, TokenCounts.add, initial=TokenCounts.of(request.prompt, request.breakers)
    )
    matcher = request.grammar.start() if request.grammar else None
    for token, seen in zip(request.output, counts, strict=False):
        mask = matcher.mask(()) if matcher else None
        yield functools.partial(_process, params=request.params, seen=seen, mask=mask)
        if matcher:
            try:
                matcher.commit(token)
            except RequestError:  # The logits have shown that the token is wrong; there is no way on from it.
                matcher = None


def _process(logits: Floats, params: SamplingParams, seen: TokenCounts, mask: Mask | None) -> Floats:
    adjusted = apply_penalties(logits, params, seen)
    return adjusted if mask is None else apply_mask(adjusted, mask)
