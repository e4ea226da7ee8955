"""YAML files of settings: a key once, plain values, no aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from specrun.errors import SpecError


def read_settings(file: Path, error: type[SpecError], example: str, option: str = "--config") -> dict[str, Any]:
    """The settings of a file. example: a file that is read, for messages; option: what names it. Raises ``error``."""
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _PlainLoader)
    except FileNotFoundError as cause:
        raise error(f"{file}: no such file; {option} wants a YAML file like {example}") from cause
    except (yaml.YAMLError, ValueError, RecursionError) as cause:  # Numbers of 5,000 digits, 20,000 brackets.
        raise error(f"{file}: not readable YAML: {cause}") from cause
    if not isinstance(data, dict):
        raise error(f"{file}: expected settings (key: value), found {type(data).__name__}")
    return data


class _PlainLoader(yaml.SafeLoader):
    """YAML of plain settings: no aliases, which can expand without end; no dates; every key once."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class.
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    @override
    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not taken; write it out", problem_mark=mark)
        return super().compose_node(parent, index)

    @override
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that is given twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if keys[number] in keys[:number]:
                problem = f"{keys[number]!r} is given twice; leave out one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)
