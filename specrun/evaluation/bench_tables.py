"""A benchmark's results as people and spreadsheets read them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from specrun.evaluation.bench_results import Result, shown_draft_len, vllm_names


def table(results: Sequence[Result]) -> Group:
    """The results for people: two tables of at most 80 columns; draft, verify and host are a round's."""
    first = ("tokens/s\n", "speed-up\n", "predicted", "tokens\na round", "first\ntoken ms", "same\nids")
    speeds = new_table("batch", "draft\nlen", *first)
    rounds = new_table(
        "batch", "draft\nlen", "accepted %:\nby position", "draft\nms", "verify\nms", "host\nms", "GB/s\n"
    )
    for r in results:
        rate, split = r.acceptance_rate, r.split
        cells = (str(r.batch_size), shown_draft_len(r.draft_len))
        speeds.add_row(
            cells[0],
            cells[1] + (f"\n~ {r.drafted_per_round:.1f}" if r.draft_len is None else ""),
            f"{r.tokens_per_second.median:.1f}\nalone {r.tokens_per_second_alone.median:.1f}",
            f"{r.speedup.median:.2f}\n{r.speedup.lowest:.2f}..{r.speedup.highest:.2f}",
            f"{split.predicted_speedup.median:.2f}" if split else "-",
            f"{r.tokens_per_round:.2f}",
            f"{r.first_token_ms.median:.1f}\nalone {r.first_token_ms_alone.median:.1f}",
            {True: "yes", False: "no", None: "-"}[r.identical_ids],
        )
        parts = (split.draft_ms, split.verify_ms, split.host_ms) if split else ()
        rounds.add_row(
            *cells,
            "-" if rate is None else f"{rate:.0%}\n" + " ".join(f"{100 * p:.0f}" for p in r.acceptance_by_position),
            *([f"{part.median:.2f}" for part in parts] or ["-"] * 3),
            f"{r.gigabytes_per_second:.1f}\nalone {r.gigabytes_per_second_alone:.1f}"
            if r.gigabytes_per_second is not None and r.gigabytes_per_second_alone is not None
            else "-",
        )
    shown: list[Table | str] = [speeds, "", rounds, ""]
    if categories := _categories(results):
        shown += [categories, ""]
    shown += ["Medians of the repetitions; speed-ups from the lowest to the highest."]
    if (rate := results[0].synthetic_acceptance) is not None:
        shown.append(f"Draft tokens are right at a rate of {rate:g} by design (--synthetic_acceptance).")
    shown += [novelty(results), lengths(results), *arrivals(results), *advice(results)]
    return Group(*shown)


def novelty(results: Sequence[Result]) -> str:
    """Whether the texts were asked for before."""
    if results[0].again:
        return "All texts were asked for before (--again): prompts are cached, suffix drafts know them."
    return "All texts are new: nothing is known of another repetition."


def lengths(results: Sequence[Result]) -> str:
    """How long outputs were, and what ended them."""
    tokens = " and ".join(dict.fromkeys(f"{result.output_tokens:.4g}" for result in results))
    if results[0].ignore_eos:
        return f"Stop ids are ignored: {tokens} tokens an output."
    return f"Outputs end where the model ends them: {tokens} tokens an output."


def arrivals(results: Sequence[Result]) -> list[str]:
    """With a request rate: what speed-ups mean then, and how long requests took."""
    rate = results[0].request_rate
    if rate is None:
        return []
    said = [f"Requests come at {rate:g} a second on average; speed-ups are of their time to the last token:"]
    for result in results:
        if result.request_ms and result.request_ms_alone and result.first_token_ms_p99 is not None:
            times = f"{result.request_ms.median:.0f} ms, alone {result.request_ms_alone.median:.0f}"
            tail = f"99% have a token after {result.first_token_ms_p99:.0f} ms"
            said.append(f"  batch {result.batch_size}, draft {shown_draft_len(result.draft_len)}: {times}; {tail}")
    return said


def _categories(results: Sequence[Result]) -> Table | None:
    """Tokens that rounds with drafts committed, and speed-ups, by category; None where prompts have none."""
    names = sorted({name for result in results for name in result.by_category})
    if not names:
        return None
    shown = [f"{result.batch_size}\n{shown_draft_len(result.draft_len)}" for result in results]
    categories = new_table("tokens a round with drafts, speed-up\nbatch, draft len", *shown)
    for name in names:
        found = (result.by_category.get(name) for result in results)
        categories.add_row(
            name, *(f"{each['mean_acceptance_length']:.2f}, {each['speedup']:.2f}x" if each else "-" for each in found)
        )
    return categories


def advice(results: Sequence[Result]) -> list[str]:
    """Whether the draft pays, and with which draft length, for each batch size."""
    said = []
    for size in dict.fromkeys(result.batch_size for result in results):
        of_size = [result for result in results if result.batch_size == size]
        best = max(of_size, key=lambda result: result.speedup.median)
        how, gain = f"--draft_len {shown_draft_len(best.draft_len)}", f"{best.speedup.median:.2f}x"
        if best.speedup.lowest == best.speedup.highest:
            said.append(f"Batch {size}: {gain} with {how}, but once; give more --repetitions.")
        elif best.speedup.lowest > 1:
            said.append(f"Batch {size}: the draft pays, {gain} with {how}.")
        elif best.speedup.highest < 1:
            said.append(f"Batch {size}: the draft does not pay, {gain} at best, with {how}.")
        else:
            said.append(f"Batch {size}: not clear, {gain} at best, with {how}; give more --repetitions.")
    return said


def as_csv(results: Sequence[Result]) -> str:
    """A row for each result. Columns are the JSON's fields, joined by dots; counts by category are left out."""
    return csv_of([dict(_cells(asdict(result) | {"vllm": vllm_names(result)})) for result in results])


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Comma-separated values with a header. A row need not have every column."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cells(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a row; lists are numbers with spaces between them."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if name not in ("by_category", "acceptance_histogram_by_draft_length", "example"):
                yield from _cells(value, f"{prefix}{name}.")
        elif name == "draft_len":
            yield name, shown_draft_len(value)
        else:
            yield prefix + name, " ".join(map(str, value)) if isinstance(value, list) else value


def new_table(*columns: str) -> Table:
    """An empty table without lines, which fits 80 columns if its cells do."""
    result = Table(box=None, pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right", overflow="fold")
    return result
