"""Open a pair of engines, check that they fit each other, and decode requests with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Unpack

from tokenizers import Tokenizer
from typing_extensions import override

from specrun import arguments
from specrun.arguments import path, show
from specrun.builder import BuildOptions, engines_of
from specrun.config import Check, DraftTargetConfig
from specrun.engine_dir.config import EngineConfig, open_engine
from specrun.errors import BackendError, EngineDirError, PairError, RequestError
from specrun.loader import open_round
from specrun.request.factory import Prompt, RequestFactory, as_prompts
from specrun.request.options import Keywords, RequestOptions, combine
from specrun.request.request import Request, TokenOutput
from specrun.sampling.sampler import SamplingParams
from specrun.scheduler.scheduler import Event, Scheduler
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.loader import Engine
from specrun.speculative.pair_checks import check_draft_len, check_fit, check_head, describe_sizes, find_translator
from specrun.speculative.round import AnyRound
from specrun.speculative.round_times import ExpectedTimes, expected_by_passes
from specrun.text.reasoning import ReasoningChoice
from specrun.text.retokenizer import Translator
from specrun.text.token_bytes import TokenBytes
from specrun.text.tokenizer import require_own_tokenizer
from specrun.text.tool_formats.base import ToolFormat


class SpeculativeDecoder:
    """A target, or a target and its draft, ready to decode.

    with SpeculativeDecoder.open("engines/target", "engines/draft") as decoder:
        for request in decoder.generate(["Once upon a time"], SamplingParams(temperature=0.8, seed=1)):
            print(request.text, request.stats.acceptance_rate)

    Any thread may use it at any time, and requests of several threads share batches. Servers may drive ``scheduler``
    themselves: ``add`` requests at any time, call ``step``, read their ``token_outputs``.
    """

    def __init__(
        self,
        rounds: AnyRound,
        lengths: DraftLength,
        target: EngineConfig,
        max_batch_size: int,
        tokenizer_dir: Path | None = None,
        chat_template: Path | None = None,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningChoice = "auto",
        translator: Translator | None = None,
        sizes: str = "",
        name: str = "engines",
    ) -> None:
        """translator: of a draft whose tokenizer is not the target's. sizes: what is odd about the draft's.

        name: what was opened, for people.
        """
        self._factory = RequestFactory(
            target, rounds.max_draft_len, tokenizer_dir, chat_template, tool_format, reasoning_format
        )
        self.scheduler = Scheduler(rounds, lengths, max_batch_size, self._factory.check)
        self.target = target
        self.max_batch_size = max_batch_size
        self._translator = translator
        self._sizes = sizes
        self._name = name

    @override
    def __repr__(self) -> str:
        rows, draft_len = self.max_batch_size, self.scheduler.round.max_draft_len
        exact = "exact to the bit" if self.is_exact else "exact up to near-ties"
        return f"<{type(self).__name__} of {self._name}: {rows} rows, up to {draft_len} draft tokens, {exact}>"

    @classmethod
    def open(
        cls,
        target_dir: str | Path,
        draft_dir: str | Path | None = None,
        config: DraftTargetConfig | None = None,
        tokenizer_dir: str | Path | None = None,
        on_warm_up: Callable[[int, int], None] = lambda _done, _of: None,
        chat_template: str | Path | None = None,
        tool_format: ToolFormat | None = None,
        build: BuildOptions | None = None,
        reasoning_format: ReasoningChoice = "auto",
    ) -> SpeculativeDecoder:
        """Check everything about the pair, then load it. The tokenizer is the target's unless told otherwise.

        Both models are engine directories, directories of Hugging Face checkpoints or Hub IDs. Engines of checkpoints
        are built as ``build`` says, in a process of its own, and kept in the user's cache.

        ``chat_template`` is a file with a template in jinja's language, instead of the tokenizer's own. ``tool_format``
        is how the model writes calls of tools, where its template does not show it; ``reasoning_format`` is how it
        writes thoughts, or ``none`` where thoughts are not separated from answers.

        ``on_warm_up`` is called with the number of finished warm-up steps on GPUs, and the number of all.
        Raises EngineDirError, PairError, BackendError, and RequestError for arguments of the wrong type; nothing is
        loaded before all checks have passed.
        """
        config = DraftTargetConfig() if config is None else config
        if not isinstance(config, DraftTargetConfig):
            raise RequestError(f"config {show(config)}: expected DraftTargetConfig")
        if not callable(on_warm_up):
            raise RequestError(f"on_warm_up {show(on_warm_up)}: expected a function")
        if not isinstance(build, BuildOptions | None):
            raise RequestError(f"build {show(build)}: expected BuildOptions")
        draft_dir = None if draft_dir is None else _model("draft_dir", draft_dir)
        target_dir, draft_dir = engines_of(_model("target_dir", target_dir), draft_dir, build, check=config.check)
        tokenizer_dir = target_dir if tokenizer_dir is None else path("tokenizer_dir", tokenizer_dir)
        chat_template = None if chat_template is None else path("chat_template", chat_template)
        engine, draft, draft_len = check_pair(target_dir, draft_dir, config)
        rows = min(opened.config.build_config.max_batch_size for opened in (engine, draft) if opened)
        rounds = open_round(engine, draft if draft_len else None, draft_len, rows, config, on_warm_up)
        lengths = DraftLength(
            draft_len,
            config.fixed_draft_len if draft_len else 0,
            _expected_times(rounds, config),
            rounds.skips_unused_tokens,
            rounds.looks_up,
        )
        translator = draft.translator if draft else None
        sizes = describe_sizes(engine.config, draft.config) if draft else ""
        name = " and ".join(str(directory) for directory in (target_dir, draft_dir) if directory)
        return cls(
            rounds,
            lengths,
            engine.config,
            rows,
            tokenizer_dir,
            chat_template,
            tool_format,
            reasoning_format,
            translator,
            sizes,
            name,
        )

    def close(self) -> None:
        """Close the engines and free their memory. Requests that have not ended fail, and so do calls from then on.

        A step of another thread ends first.
        """
        self.scheduler.close()

    def __enter__(self) -> SpeculativeDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_exact(self) -> bool:
        """Whether a text is the target's own to the byte: on CPUs, and with our own kernels on GPUs."""
        return self.target.is_batch_invariant

    @property
    def notes(self) -> list[str]:
        """What people should know of the pair, a line each: how exact its texts are, what its draft is."""
        draft = f"the draft has another tokenizer; it {self._translator.description}" if self._translator else ""
        exact = "" if self.is_exact else "engines on GPUs are not exact to the bit: texts are exact up to near-ties"
        return [note for note in (exact, self.scheduler.round.note, draft, self._sizes) if note]

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises RequestError where there is none."""
        return self._factory.tokenizer

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes and texts of single tokens; None where there is no tokenizer."""
        try:
            return TokenBytes(self.tokenizer)
        except RequestError:
            return None

    def token_ids(self, prompt: Prompt, options: RequestOptions | None = None) -> list[int]:
        """The ids of a prompt, as a request would have them. Raises RequestError."""
        return self._factory.token_ids(prompt, options or RequestOptions())

    def require_chat_template(self) -> None:
        """Raise RequestError where the tokenizer has none, or one that fails."""
        self._factory.require_chat_template()

    def prepare_constraints(self) -> None:
        """Index the tokenizer for constraints now: with a large vocabulary the first of them would wait for seconds.

        Raises RequestError where llguidance is missing, and where there is no tokenizer or none that it can read.
        """
        self._factory.prepare_constraints()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        name: str = "prompt",
        **keywords: Unpack[Keywords],
    ) -> Request:
        """A request for one prompt: a text, token ids, or the messages of a conversation.

        keywords: sampling and options, in place of those in ``params`` and ``options``. name: the prompt's, in error
        messages.
        Raises RequestError, with the parameter's name, before anything runs.
        """
        params, options = combine(params, options, keywords)
        (request,) = self._factory.requests(prompt, params, options, name=name)
        return request

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: int = 1,
        **keywords: Unpack[Keywords],
    ) -> list[Request]:
        """``n`` requests for every prompt, or for a single one, in order; options and keywords as in ``request``.

        The n requests of a prompt have the seeds seed, seed + 1, ... Without a seed every prompt draws its own.
        A request that cannot be served has failed (``finish_reason`` error, ``error``) without harm to the others.
        Raises the RequestError where no prompt can be served, and for arguments of the wrong type.
        """
        params, chosen = combine(params, options, keywords)
        n = arguments.at_least(1).check("n", arguments.whole("n", n))
        requests: list[Request] = []
        for number, prompt in enumerate(as_prompts(prompts), 1):
            try:
                requests += self._factory.requests(prompt, params, chosen, n, f"prompt {number}")
            except RequestError as error:
                failed = [Request((), params, 1) for _ in range(n)]
                for request in failed:
                    request.fail(error)
                requests += failed
        return _require_one(requests)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        n: int = 1,
        **keywords: Unpack[Keywords],
    ) -> list[Request]:
        """The finished requests, in order: ``text``, ``output`` (ids), ``finish_reason``, ``stats``.

        Arguments as in ``requests``. A prompt's text does not depend on the other prompts, and one that fails
        (``finish_reason`` error, ``error``) fails alone. Raises the first one's error where all of them fail.
        """
        requests = self.requests(prompts, params, options, n=n, **keywords)
        for _ in self.run(requests):
            pass
        return _require_one(requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **keywords: Unpack[Keywords],
    ) -> Iterator[TokenOutput]:
        """The tokens of one prompt as they are committed: id, text, whether the draft proposed it, log-probability.

        Arguments as in ``request``. Streams may run side by side; one that is closed early cancels its request.
        """
        request = self.request(prompt, params, options, **keywords)
        for event in self.run([request]):
            yield from event.token_outputs
        if request.error:
            raise request.error

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, as many at a time as the engines take; yields what each round commits."""
        return self.scheduler.run(requests)


def check_pair(
    target_dir: Path, draft_dir: Path | None, config: DraftTargetConfig
) -> tuple[Engine, Engine | None, int]:
    """A target and its draft that fit each other and ``config``, and the most draft tokens of a round.

    Nothing is loaded. Raises EngineDirError, PairError and BackendError.
    """
    target = _open("target", target_dir, config.target_devices, config.check, config.rank_hosts)
    if target.config.graph.is_head:
        raise PairError(f"{target_dir}: is a draft head; give it with --draft_engine_dir, together with its target")
    if draft_dir is None:
        draft_len = check_draft_len(target_dir, target.config, config.fixed_draft_len) if config.draft else 0
        return target, None, draft_len
    draft = _open("draft", draft_dir, config.draft_devices, config.check)
    if draft.config.graph.is_head:
        check_head(target, draft)
    draft_len = check_fit(target_dir, target.config, draft_dir, draft.config, config.fixed_draft_len)
    return target, replace(draft, translator=find_translator(target, draft)), draft_len


def _model(name: str, value: str | Path) -> str | Path:
    """A model as it was given: a text may be a Hub ID. Raises RequestError for what is no path."""
    checked = path(name, value)
    return value if isinstance(value, str) else checked


def _require_one(requests: list[Request]) -> list[Request]:
    """Raise the first one's error where all have failed."""
    if requests and all(request.error for request in requests) and (error := requests[0].error):
        raise error
    return requests


def _number(ranks: int) -> str:
    return "one device" if ranks == 1 else f"{ranks} ranks, each on a device of its own"


def _open(
    role: str, directory: Path, devices: tuple[int, ...], check: Check, rank_hosts: tuple[str, ...] = ()
) -> Engine:
    """Check an engine directory and the device it is to run on."""
    config = open_engine(directory, every_byte=check == "full")
    require_own_tokenizer(directory, config.tokenizer, EngineDirError)
    ranks = config.build_config.tp_size
    if config.backend.device != "cpu" and len(devices) != ranks:
        raise BackendError(
            f"{role}_model_device_list {list(devices)}: {directory} is for {_number(ranks)}; give as many, like "
            f"{list(range(ranks))}"
        )
    if len(set(devices)) < len(devices):
        raise BackendError(f"{role}_model_device_list {list(devices)}: expected every device once")
    if config.backend.device == "cpu" and devices != (0,):
        raise BackendError(
            f"{role}_model_device_list {list(devices)}: no such device; this onnxruntime engine runs on the CPU, "
            "device 0"
        )
    if rank_hosts and (config.backend.device != "cpu" or ranks == 1):
        raise BackendError(f"rank_hosts: {directory} is no engine of several ranks for CPUs; leave it out")
    if rank_hosts and len(rank_hosts) != ranks:
        named = "1 machine is" if len(rank_hosts) == 1 else f"{len(rank_hosts)} machines are"
        raise BackendError(f"rank_hosts: {directory} has {ranks} ranks, {named} named: name one for each rank")
    return Engine(role, directory, config, devices, rank_hosts)


def _expected_times(rounds: AnyRound, config: DraftTargetConfig) -> Callable[[int], ExpectedTimes] | None:
    """What rounds of so many rows take, by the passes of the engines. None if not needed, or if they were not timed."""
    draft_len = rounds.max_draft_len
    if not draft_len or config.fixed_draft_len is not None or not (times := rounds.pass_times()):
        return None
    return cache(lambda rows: expected_by_passes(*times, rows, draft_len))
