"""The names of a server's models: which model a body names, and how ``/v1/models`` lists them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specrun.arguments import show
from specrun.serve.errors import ApiError
from specrun.serve.metrics import MetricFamilies, Metrics
from specrun.serve.model import ModelSpec
from specrun.serve.model_entry import ModelEntry


class ModelNames:
    """Models by the names and aliases that bodies may use."""

    def __init__(self, families: MetricFamilies) -> None:
        self.metrics: dict[str, Metrics] = {}
        """Metrics by name, also of models that had their names before ``replace``."""
        self._families = families
        self._by_name: dict[str, ModelEntry] = {}
        self._created = int(time.time())

    def replace(self, specs: Sequence[ModelSpec]) -> list[ModelEntry]:
        """Give names only to ``specs``. Models that stay equal keep their entries. Returns the new entries."""
        old = {entry.spec.name: entry for entry in self.entries}
        new: list[ModelEntry] = []
        self._by_name = {}
        for spec in specs:
            entry = old.get(spec.name)
            if entry is None or entry.spec != spec:
                if spec.name not in self.metrics:
                    self.metrics[spec.name] = Metrics(self._families, spec.name)
                entry = ModelEntry(spec, self.metrics[spec.name])
                new.append(entry)
            entry.spec = spec
            self._by_name |= dict.fromkeys((spec.name, *spec.aliases), entry)
        return new

    @property
    def entries(self) -> list[ModelEntry]:
        """The models, in the order of their specs."""
        return [*dict.fromkeys(self._by_name.values())]

    @property
    def max_prompt_lens(self) -> dict[str | None, int | None]:
        """Maximum tokens of a prompt by name, and by None where a body needs no name. None: not known yet."""
        lengths: dict[str | None, int | None] = {name: entry.max_prompt_len for name, entry in self._by_name.items()}
        if len(self.entries) == 1:
            lengths[None] = self.entries[0].max_prompt_len
        return lengths

    def find(self, name: str | None) -> ModelEntry:
        """The model of a name, or the only one where a body names none. Raises ApiError."""
        if not name and len(self.entries) == 1:
            return self.entries[0]
        if name in self._by_name:
            return self._by_name[name]
        names = ", ".join(repr(entry.spec.name) for entry in self.entries)
        if not name:
            raise ApiError(400, f"model: missing; served here: {names}", "model")
        raise ApiError(404, f"model {show(name)} is not served here; served here: {names}", "model", "model_not_found")

    def descriptions(self) -> list[dict[str, Any]]:
        """All models as ``/v1/models`` lists them."""
        return [entry.description(self._created) for entry in self.entries]

    def description(self, name: str) -> dict[str, Any]:
        """One of them, by its name or an alias. Raises ApiError."""
        return self.find(name).description(self._created)
