"""Constrained output: which tokens may follow, by a JSON schema, a regular expression, a list of texts, or a grammar.

llguidance compiles a constraint for a tokenizer, and tells after every token which tokens may follow. The draft's and
the target's logits are masked alike. So speculation stays exact: the text is that of plain masked decoding.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from specrun.errors import RequestError
from specrun.optional_packages import import_package
from specrun.text.tokenizer import raise_unless_fault

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]
Mask = npt.NDArray[np.uint8]
"""[ceil(V / 8)] bytes. Token i may follow where bit i % 8 of byte i // 8 is set; ids beyond its end may not."""

MAX_CONSTRAINT_BYTES = 1 << 16
"""The largest schema or grammar, in UTF-8. Compiling takes up to the square of its size: a second for this one."""
_KEPT_GRAMMARS, _KEPT_BYTES = 64, 1 << 18
"""Compiled grammars that are kept for later requests, and the size of what they were compiled from: each byte takes a
few hundred."""
_LARGE_BYTES = 1 << 12
"""Larger constraints are compiled one at a time: others and the engines have a processor too."""
SLOW_MASK_SECONDS = 0.005
"""A mask that takes longer is slow: on CPUs the next one is computed beside the rounds, and nothing is drafted then."""
MAX_SLOW_SECONDS = 2.0
"""Seconds of slow masks that one text may take. A grammar that is very ambiguous takes more with every token."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Pattern of whitespace between two tokens of JSON. Without a limit, a model may write nothing else for ever."""


class Constraint(NamedTuple):
    """What a user asks for."""

    kind: Kind
    """The option's name, for messages."""
    text: str
    """JSON for json_schema and choice, Lark for tools, else what the user wrote; json_object has none."""
    before: str = ""
    """Lark of what stands before, with ``@answer`` for the text that ``text`` describes; "": nothing does."""


def schema_text(schema: Mapping[str, Any] | bool | str) -> str:
    """A JSON schema, or its text, as JSON text. Raises RequestError for what is not JSON."""
    try:
        value = json.loads(schema, parse_constant=_no_number) if isinstance(schema, str) else schema
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema: not JSON ({error})", "json_schema") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class Grammars:
    """Compiles constraints for one tokenizer, each once. Any thread may use it, and compiling releases the GIL."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: ids that may follow wherever a text may end. None given: llguidance finds the tokenizer's.

        load_tokenizer: may raise RequestError.
        """
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = eos_token_ids
        self._ll_tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of ``constraint``. Raises RequestError, with its kind, where it cannot be used."""
        with self._lock:
            if grammar := self._compiled.get(constraint):
                self._compiled.move_to_end(constraint)
                return grammar
        with self._compiling if len(constraint.text) > _LARGE_BYTES else nullcontext():
            grammar = self._compile(constraint)
        with self._lock:
            grammar = self._compiled.setdefault(constraint, grammar)  # Another thread may have been first.
            size = sum(len(kept.text) for kept in self._compiled)
            while len(self._compiled) > _KEPT_GRAMMARS or (size > _KEPT_BYTES and len(self._compiled) > 1):
                oldest, _ = self._compiled.popitem(last=False)
                size -= len(oldest.text)
        return grammar

    def prepare(self) -> LLTokenizer:
        """Index the tokenizer for all constraints, once: seconds for a large vocabulary. Raises RequestError."""
        with self._loading:
            if self._ll_tokenizer is None:
                tokenizer = Tokenizer.from_str(self._load_tokenizer().to_str())
                ends = {token: tokenizer.id_to_token(token) for token in self._eos_token_ids}
                # An end that is an ordinary token could stand within a text as well.
                tokenizer.add_special_tokens([text for text in ends.values() if text])
                eos_token_ids = [token for token, text in ends.items() if text] or None
                try:
                    llguidance = import_package("llguidance")
                    self._ll_tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=eos_token_ids)
                except BaseException as error:
                    raise_unless_fault(error)
                    raise RequestError(f"llguidance cannot read the tokenizer ({_line(str(error))})") from error
            return self._ll_tokenizer

    def _compile(self, constraint: Constraint) -> Grammar:
        kind, text, _ = constraint
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"{kind}: not Unicode; write it as UTF-8", kind) from error
        if size > MAX_CONSTRAINT_BYTES:
            raise RequestError(f"{kind}: {size} bytes, expected at most {MAX_CONSTRAINT_BYTES}", kind)
        tokenizer = self.prepare()
        from llguidance import LLMatcher, LLParserLimits

        try:
            limits = LLParserLimits(verbose_errors=False)
            compiled = LLMatcher(tokenizer, _source(constraint), log_level=0, limits=limits)
            grammar = Grammar(kind, compiled, tokenizer.vocab_size)
            grammar.try_out()
        except RequestError:
            raise
        except BaseException as error:
            raise_unless_fault(error)
            raise RequestError(f"{kind}: {_line(str(error))}", kind) from error
        return grammar


def _source(constraint: Constraint) -> str:
    """The constraint as llguidance takes it. Raises ValueError where the library refuses it."""
    source = _answer_source(constraint)
    if not constraint.before:
        return source
    (answer,) = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": constraint.before}, {**answer, "name": "answer"}]})


def _answer_source(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    kind, text, _ = constraint
    if kind == "json_object":
        text = '{"type": "object"}'
    if kind in ("json_schema", "json_object"):
        schema = json.loads(text)
        is_configured = (
            not isinstance(schema, dict) or "x-guidance" in schema
        )  # llguidance's own way to set such things.
        return LLMatcher.grammar_from_json_schema(
            text, defaults=None if is_configured else {"whitespace_pattern": WHITESPACE}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":  # One terminal: alternatives of a rule take time that grows with the square of their number.
        quoted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        text = f"start: CHOICE\nCHOICE: {quoted}"
    return LLMatcher.grammar_from_lark(text)


class Grammar:
    """A compiled constraint. It does not change; any number of texts may follow it."""

    def __init__(self, kind: Kind, compiled: LLMatcher, vocab_size: int) -> None:
        """vocab_size: the tokenizer's. Raises RequestError where ``compiled`` is in error."""
        _require_no_error(kind, compiled)
        self.kind = kind
        self.vocab_size = vocab_size
        self._compiled = compiled

    def start(self) -> Matcher:
        """The beginning of a text. Raises RequestError where no text fulfils the constraint."""
        return Matcher(self)

    def library_matcher(self) -> LLMatcher:
        """The library's matcher at the beginning of a text."""
        return self._compiled.deep_copy()

    def try_out(self) -> None:
        """Raise RequestError where the first two tokens show that it is too complex."""
        start = self.start()
        if (mask := start.mask(())) is not None:
            start.mask([int(np.unpackbits(mask, bitorder="little").argmax())])


class Matcher:
    """The position of a text in its grammar. Draft tokens behind the committed ones are taken back where they fall.

    Raises RequestError where the grammar grows too complex. Behind draft tokens that says nothing of the text itself,
    so the matcher is good for other draft tokens.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._kind = grammar.kind
        self._matcher = grammar.library_matcher()
        self._behind_text: LLMatcher | None = None
        """The library's matcher behind the committed text, while ``_matcher`` is further. A copy takes
        microseconds; the library's own ``rollback`` fails where a thought has a limit."""
        self._committed: list[int] = []
        self._ahead: list[int] = []
        """Draft tokens that ``_matcher`` has consumed behind the committed text."""
        self._masks: list[Mask | None] = [None]
        """The masks after the committed text and after each of ``_ahead``; None: not asked for yet."""
        self._complete = [self._is_complete()]
        """True, at each of the same places, if nothing may follow."""
        self.is_slow = False
        """Whether the last mask took longer than SLOW_MASK_SECONDS."""
        self._slow_seconds = 0.0
        """Seconds of all slow masks."""
        self._coming: Future[Mask] | None = None
        """The mask after the committed text, where another thread computes it. Until then ``_matcher`` is its own."""

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended: nothing may follow it."""
        return self._complete[0]

    def commit(self, token: int) -> None:
        """Add ``token`` to the text. Raises RequestError where the grammar forbids it."""
        if not self._advance_to((token,)):
            raise RequestError(f"{self._kind}: token {token} cannot follow", self._kind)
        self._committed.append(token)
        if self._behind_text and len(self._ahead) > 1:
            self._behind_text.consume_tokens([token])
        else:
            self._behind_text = None
        for places in (self._ahead, self._masks, self._complete):
            del places[0]

    def mask(self, drafts: Sequence[int]) -> Mask | None:
        """The tokens that may follow the text and ``drafts``; None where nothing follows.

        That is behind the text's end, and behind a draft token that the grammar forbids and acceptance will reject.
        """
        if not self._may_follow(drafts):
            return None
        count = len(drafts)
        if (mask := self._masks[count]) is None:
            self._require_time()
            self._rewind(count)
            mask = self._compute()
            self.require_no_error()
            self._masks[count] = mask
        return mask

    def begin_mask(self) -> Future[Mask] | None:
        """Where masks are slow, the one after the text as it is computed in another thread; None: it is there."""
        if self._coming is None and self.is_slow and self._masks[0] is None and not self.is_complete:
            self._rewind(0)
            self._coming = _mask_thread().submit(self._compute)
        return self._coming if self._coming and not self._coming.done() else None

    def behind(self, drafts: Sequence[int]) -> LLMatcher | None:
        """The library's matcher behind the text and ``drafts``; None where nothing follows, as in ``mask``."""
        if not self._may_follow(drafts):
            return None
        self._rewind(len(drafts))
        return self._matcher

    def require_no_error(self) -> None:
        """Raise RequestError where the grammar has grown too complex, and forget the draft tokens."""
        try:
            _require_no_error(self._kind, self._matcher)
        except RequestError:
            self._restart()
            raise

    def forced(self) -> list[int]:
        """The tokens that must follow the text, as far as there is no choice. Where masks are slow: none."""
        if self.is_complete or self.is_slow:
            return []
        self._rewind(0)
        return self._matcher.compute_ff_tokens()

    def _compute(self) -> Mask:
        """The mask after what ``_matcher`` has consumed. Its time is this thread's, as the machine may be busy."""
        began = time.thread_time()
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.is_slow = self._spend(time.thread_time() - began)
        return mask

    def _consume(self, token: int) -> bool:
        """Whether ``token`` may follow what ``_matcher`` has consumed; then it has consumed that too."""
        began = time.thread_time()
        if not self._ahead:
            self._behind_text = self._matcher.deep_copy()
        consumed = bool(self._matcher.try_consume_tokens([token]))
        self._spend(time.thread_time() - began)
        return consumed

    def _spend(self, seconds: float) -> bool:
        """Count what the library took, where that is slow. Returns whether it is."""
        if is_slow := seconds > SLOW_MASK_SECONDS:
            self._slow_seconds += seconds
        return is_slow

    def _require_time(self) -> None:
        """Raise RequestError where slow masks have taken all the time that there is for them."""
        if self._slow_seconds > MAX_SLOW_SECONDS:
            raise RequestError(
                f"{self._kind}: to tell what may follow took {self._slow_seconds:.1f} s for this text, and at most "
                f"{MAX_SLOW_SECONDS:g} are allowed; write rules that read a text in fewer ways",
                self._kind,
            )

    def _receive(self) -> None:
        """Wait for the mask that another thread computes, if any does. Raises RequestError."""
        if self._coming:
            mask, self._coming = self._coming.result(), None
            self.require_no_error()
            self._require_time()
            self._masks[0] = mask

    def _may_follow(self, drafts: Sequence[int]) -> bool:
        """Whether anything may follow the text and ``drafts``."""
        return self._advance_to(drafts) == len(drafts) and not self._complete[len(drafts)]

    def _advance_to(self, drafts: Sequence[int]) -> int:
        """Consume ``drafts`` behind the committed text, up to the first that is forbidden. Returns how many."""
        self._receive()
        same = 0
        while same < min(len(drafts), len(self._ahead)) and drafts[same] == self._ahead[same]:
            same += 1
        if same < len(drafts):
            self._rewind(same)
        for token in drafts[same:]:
            if self._complete[-1] or not self._consume(token):
                self.require_no_error()
                break
            try:
                self._complete.append(self._is_complete())
            except RequestError:
                self._restart()
                raise
            self._ahead.append(token)
            self._masks.append(None)
            same += 1
        return same

    def _rewind(self, count: int) -> None:
        """Take back all but the first ``count`` draft tokens."""
        if count < len(self._ahead) and self._behind_text:
            self._matcher = self._behind_text.deep_copy()
            del self._ahead[count:], self._masks[count + 1 :], self._complete[count + 1 :]
            self._matcher.consume_tokens(self._ahead)

    def _restart(self) -> None:
        """Consume the committed text anew, and nothing behind it: a matcher in error stays so."""
        self._matcher, self._behind_text = self.grammar.library_matcher(), None
        self._matcher.consume_tokens(self._committed)
        self._ahead, self._masks, self._complete = [], [None], self._complete[:1]

    def _is_complete(self) -> bool:
        """Whether nothing may follow what ``_matcher`` has consumed. Raises RequestError where it must not end so."""
        if not self._matcher.is_stopped():
            return False
        _require_no_error(self._kind, self._matcher)
        if not self._matcher.is_accepting():
            raise RequestError(f"{self._kind}: no text fulfils it", self._kind)
        return True


def _require_no_error(kind: Kind, matcher: LLMatcher) -> None:
    if matcher.is_error():
        error = _line(matcher.get_error())
        raise RequestError(f"{kind}: {'no text fulfils it' if error.startswith('NoExtension') else error}", kind)


def _line(message: str) -> str:
    """An error of llguidance in one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


@functools.cache
def _mask_thread() -> ThreadPoolExecutor:
    """Computes slow masks, one after the other. The library releases the interpreter's lock meanwhile."""
    return ThreadPoolExecutor(1, "slow-masks")
