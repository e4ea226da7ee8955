"""What is told of a request that nobody asked about for several rounds."""

from __future__ import annotations

import re
from pathlib import Path

from specrun.request.request import Request
from specrun.request.stats import speculative_decoding
from specrun.request.updates import UpdateCursor
from specrun.sampling.sampler import SamplingParams
from specrun.serve.metrics import MetricFamilies, Metrics
from tests.helpers.tables import normal, open_tables


def test_every_round_is_counted_where_an_update_has_several(tmp_path: Path) -> None:
    """As where a request's first rounds run before its client is known. Places of tokens are those in their rounds."""
    target = normal(1, 24, 24)
    decoder = open_tables(tmp_path, target, target + normal(2, 24, 24, scale=0.3), draft_len=4)
    request = Request([1], SamplingParams(), 40)
    decoder.scheduler.add(request)
    cursor, families, updates = UpdateCursor(request), MetricFamilies("specrun"), []
    metrics = Metrics(families, "m")
    while len(decoder.scheduler):
        for _ in range(3):
            decoder.scheduler.step()
        if update := cursor.update():
            updates.append(update)
            metrics.count_round(update, 0.1, is_first=len(updates) == 1)
    assert max(len(update.steps) for update in updates) == 3
    found, page = speculative_decoding([request.stats]), families.text().decode()
    counts = {
        name: float(value) for name, value in re.findall(r"^specrun:spec_decode_(\w+)_total\S* (\S+)$", page, re.M)
    }
    assert counts["num_drafts"] == found["num_spec_steps"]
    assert counts["num_draft_tokens"] == found["num_draft_tokens"]
    assert counts["num_accepted_tokens"] == found["num_accepted_draft_tokens"] > 4
    places = re.findall(r'per_pos_total\{\S*position="(\d)"\} (\S+)$', page, re.M)
    histogram = found["acceptance_histogram"]
    assert [float(value) for _, value in places] == [sum(histogram[n:]) for n in range(1, len(places) + 1)]
    assert sum(histogram[1:]) > 4
