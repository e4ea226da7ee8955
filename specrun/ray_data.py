"""A stage for Ray Data: it adds answers to rows with questions, by a decoder in each actor.

A row has the fields of a line of ``specrun generate --input_file``. Texts depend only on the row and its seed, so they
are the same on one machine and on many, and after a node was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrun.batch.batch import Batch
from specrun.batch.lines import Defaults, Place, Question, own_question
from specrun.builder import BuildOptions
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.openai.body import DEFAULTS
from specrun.optional_packages import import_package
from specrun.request.options import RequestOptions
from specrun.sampling.sampler import SamplingParams

COLUMNS = ("texts", "token_ids", "finish_reasons", "error")
"""Columns that are added to rows: lists of n values, or empty lists and an error."""


class SpecrunBatch:
    """For ``Dataset.map_batches``: owns a decoder. All questions of a batch share its rows."""

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None = None,
        config: DraftTargetConfig | None = None,
        *,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        n: int = 1,
        carry: Sequence[str] = (),
        tokenizer_dir: str | Path | None = None,
        build: BuildOptions | None = None,
    ) -> None:
        """Open the pair, as ``SpeculativeDecoder.open`` does. Raises what that raises.

        params, options, n: defaults for a row. carry: columns that are not part of the question.
        """
        self._decoder = SpeculativeDecoder.open(target, draft, config, tokenizer_dir, build=build)
        self._carry = frozenset(carry)
        self._defaults = Defaults(params or SamplingParams(), options or RequestOptions(), n, DEFAULTS, str(target))

    def __call__(self, batch: Any) -> Any:
        """Return a pyarrow table with answers. batch: a pyarrow table, or arrays by the names of columns.

        A row that cannot be served gets an error. Errors of the engines are raised, so that Ray tries again.
        """
        arrow: Any = import_package("pyarrow")
        table = arrow.table({name: list(batch[name]) for name in batch}) if isinstance(batch, dict) else batch
        answers = self._answer([self._question(row, number) for number, row in enumerate(table.to_pylist(), 1)])
        texts = arrow.list_(arrow.string())
        kinds = dict(zip(COLUMNS, (texts, arrow.list_(arrow.list_(arrow.int64())), texts, arrow.string()), strict=True))
        for name, kind in kinds.items():
            table = table.append_column(name, arrow.array([answer[name] for answer in answers], kind))
        return table

    def _question(self, row: Mapping[str, Any], number: int) -> Question:
        content = {name: value for name, value in row.items() if name not in self._carry}
        return own_question(content, Place(number, ""), self._defaults)

    def _answer(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """The columns of each question, in their order."""
        answers: list[dict[str, Any]] = [{} for _ in questions]
        for ended in Batch(self._decoder, questions).answer():
            for question, requests, error in ended:
                line = question.answer(requests, error, None)
                results = line.get("answers", [])
                columns = [[result[name] for result in results] for name in ("text", "token_ids", "finish_reason")]
                answers[line["line"] - 1] = dict(zip(COLUMNS, [*columns, line.get("error")], strict=True))
        return answers
