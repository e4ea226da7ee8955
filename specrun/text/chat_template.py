"""Chat templates: the messages of a conversation to the text that the model continues, as transformers renders it.

Templates come with checkpoints, so they are programs of strangers. ``template_language`` runs them in a sandbox: they
see nothing but plain data, and their time and what they make have limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
import jinja2.meta

from specrun.engine_dir.small_files import read_small
from specrun.errors import RequestError
from specrun.text.limited_time import limited_time
from specrun.text.named_templates import NAMED
from specrun.text.template_language import Environment, make_environment
from specrun.text.tokenizer import LEGACY_TEMPLATE_NAME, SETTINGS_NAME, SPECIAL_TOKENS_NAME, TEMPLATE_NAME

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names by which templates know special tokens."""
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
"""Names of templates, where a tokenizer has several."""
_OPEN_ENDED = "continue_final_message"
_MARK = "<|continued-here|> "
_SETTINGS = ("messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_TOKENS)
"""Variables of templates that no caller sets."""
_INSTEAD = "prompts of plain text need none"
_SECONDS = 10
"""Time limit of a template; one takes milliseconds for a conversation."""


def _read(file: Path) -> str:
    """Raises OSError, UnicodeDecodeError."""
    if str(file) in NAMED and not file.exists():
        return NAMED[str(file)]
    return file.read_text(encoding="utf-8")


class ChatTemplate:
    """A compiled template and the special tokens that it may name. May be rendered from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: Path,
        tools_source: str | None = None,
        seconds: float = _SECONDS,
    ) -> None:
        """tools_source: a template of its own for conversations with tools. origin: named in error messages.
        seconds: the most that it may take for a conversation.

        Raises RequestError for a template that is not valid jinja.
        """
        self._special_tokens = dict(special_tokens)
        self._origin, self._seconds = origin, seconds
        self._template = self._compile(source)
        self.source, self._own_tools_source = source, tools_source

    @cached_property
    def tools_source(self) -> str | None:
        """The text of the template that tells a model of tools; None where it does not look at them.

        Raises RequestError where it is no valid jinja.
        """
        source = self._own_tools_source or self.source
        try:
            variables = jinja2.meta.find_undeclared_variables(make_environment().parse(source))
        except Exception as error:
            raise self._failed(error) from error
        return source if "tools" in variables else None

    @cached_property
    def _tools_template(self) -> jinja2.Template:
        return self._compile(self._own_tools_source) if self._own_tools_source else self._template

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return make_environment().from_string(source)
        except Exception as error:  # The compiler raises RecursionError and the like too.
            raise self._failed(error) from error

    @classmethod
    def load(cls, directory: Path, file: Path | None = None) -> ChatTemplate:
        """The template of the tokenizer in ``directory``, or the one in ``file`` with that tokenizer's special tokens.

        ``file`` may be one of ``NAMED``, where no file is called so. Raises RequestError where there is none, or a
        broken one.
        """
        try:
            settings = _read_object(directory / SETTINGS_NAME)
            sources = {_DEFAULT: _read(file)} if file else _sources(directory, settings)
            special_tokens = _special_tokens(directory, settings)
        except (OSError, ValueError, RecursionError) as error:
            what = f"{file}: the chat template" if file else f"{directory}: the tokenizer's settings"
            raise RequestError(f"{what} cannot be read ({error}); {_INSTEAD}") from error
        if not (source := sources.get(_DEFAULT)):
            raise RequestError(f"{directory}: the tokenizer has no chat template; {_INSTEAD}")
        return cls(source, special_tokens, file or directory, sources.get(_FOR_TOOLS))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of ``messages`` up to the beginning of the answer. Raises RequestError where the template fails.

        tools: in the form of OpenAI's API. add_generation_prompt: False ends the text with the last message.
        continue_final_message: ends it inside that message, behind its content. variables: more of the template's.
        """
        if continue_final_message:
            return self._render_open(messages, tools, variables)
        for name in variables or ():
            if name in _SETTINGS:
                message = f"chat_template_kwargs: {name} has a value already; leave it out"
                raise RequestError(message, "chat_template_kwargs")
        template = self._template if tools is None else self._tools_template
        try:
            # Some templates cannot do without a content, where a message has tool calls alone; all take an empty one.
            turns = [
                {key: value for key, value in _plain(message).items() if value is not None} for message in messages
            ]
            for turn in turns:
                turn.setdefault("content", "")
            settings = {"tools": _plain(tools), "documents": None, "add_generation_prompt": add_generation_prompt}
            named = {**_plain(variables or {}), "messages": turns, **settings, **self._special_tokens}
            environment = template.environment
            assert isinstance(environment, Environment)
            too_long = f"it ran for more than {self._seconds} s"
            with environment.rendering(), limited_time(self._seconds, _is_template, too_long):
                return environment.concat(template.generate(named))
        except Exception as error:  # Templates are programs, and fail like programs.
            raise self._failed(error) from error

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The text up to the end of the last message's content, found by a mark behind it, as transformers does it."""
        *before, last = messages
        if not isinstance(content := last.get("content"), str):
            raise RequestError("continue_final_message: the last message has no text to continue", _OPEN_ENDED)
        marked = [*before, {**last, "content": content + _MARK}]
        text, mark, rest = self.render(marked, tools, False, variables=variables).rpartition(_MARK.strip())
        if not mark:
            message = "continue_final_message: the chat template does not show the last message; leave it out"
            raise RequestError(message, _OPEN_ENDED)
        # A template that strips contents has stripped the mark.
        return text if (mark + rest).startswith(_MARK) else text.rstrip()

    def _failed(self, error: Exception) -> RequestError:
        return RequestError(f"{self._origin}: the chat template failed ({error}); {_INSTEAD}")


def _sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates' texts by name, from the first of the places where checkpoints keep them; most have one."""
    if (file := directory / TEMPLATE_NAME).is_file():
        return {_DEFAULT: file.read_text(encoding="utf-8")}
    templates = settings.get("chat_template")
    if templates is None:
        templates = _read_object(directory / LEGACY_TEMPLATE_NAME).get("chat_template")
    if isinstance(templates, list):  # Of several, under names.
        named = {entry["name"]: entry["template"] for entry in templates if _is_named_template(entry)}
        if templates and _DEFAULT not in named:
            raise ValueError(f"chat_template has no template called {_DEFAULT}, only {sorted(named)}")
        return named
    if not isinstance(templates, str | None):
        raise ValueError(f"chat_template is of the type {type(templates).__name__}")
    return {_DEFAULT: templates} if templates else {}


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name. Older checkpoints have a file for them; newer ones list all tokens in the settings."""
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **_read_object(directory / SPECIAL_TOKENS_NAME)}
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty where there is no file. Raises OSError and ValueError."""
    if not path.is_file():
        return {}
    value = json.loads(read_small(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return value


def _plain(value: Any) -> Any:
    """``value`` made of JSON's types only. Raises TypeError for other types: templates may call their methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a message holds a {type(value).__name__}; expected text, numbers, lists and mappings")


def _is_template(code: CodeType) -> bool:
    return code.co_filename == "<template>"
