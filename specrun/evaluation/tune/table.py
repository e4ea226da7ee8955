"""The table that led to a choice."""

from __future__ import annotations

from rich.table import Table

from specrun.evaluation.bench_tables import new_table
from specrun.evaluation.tune.tune import Tuned


def table(tuned: Tuned) -> Table:
    """All trials, the best first: what the last round that measured each found."""
    shown = new_table("round", "draft", "draft\nlen", "batch", "form", "threads", "tokens/s", "speed-up")
    for trial, speed in zip(tuned.trials, tuned.speeds, strict=True):
        candidate, result = trial.candidate, trial.measured
        shown.add_row(
            str(trial.round + 1),
            candidate.name,
            str(candidate.draft_len) if candidate.draft else "-",
            str(candidate.batch_size),
            candidate.qformat,
            str(candidate.threads),
            f"{speed:.1f}",
            f"{result.speedup.median:.2f}" if candidate.draft else "-",
        )
    return shown


def summary(tuned: Tuned) -> str:
    """What was chosen, and how much was measured."""
    text = f"Fastest: {tuned.best}: {tuned.speeds[0]:.1f} tokens/s."
    if tuned.time_was_over:
        last, measured = tuned.trials[0].round + 1, len(tuned.trials)
        return f"{text} The time was over in round {last}; {measured} of {tuned.candidates} candidates were measured."
    return text
