"""Reading a foreign tokenizer where it can do no harm: the tokenizers library panics, or aborts, on damaged files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specbuild.files import read_json
from specrun.errors import CheckpointError

_SECONDS = 120
_SAMPLES = [
    "",
    "a",
    " The quick brown fox\njumps: 1,234.50 (twice).\t",
    "naïve café 😀 漢字 ﬁ\u0301",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
]

_READ = f"""
import sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.no_truncation()
tokenizer.no_padding()
try:
    for text in {_SAMPLES!r}:
        for special in (True, False):
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=special).ids)
except BaseException as error:
    sys.exit(f"{{error}}")
"""
_BUILD = """
import sys, transformers
transformers.AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
"""


def check_tokenizer(directory: Path) -> None:
    """Read a checkpoint's tokenizer and use it, in a process of its own. Raises CheckpointError where that fails."""
    fast = directory / "tokenizer.json"
    program, path = (_READ, fast) if fast.is_file() else (_BUILD, directory)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, str(path)],  # -P: nothing is imported from the working directory.
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{path}: the tokenizer hangs: it was not read in {_SECONDS} s") from error
    if done.returncode < 0:
        raise CheckpointError(f"{path}: the tokenizer makes the tokenizers library crash (signal {-done.returncode})")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(f"{path}: the tokenizer cannot be read and used ({reason})")


def added_tokens(directory: Path) -> list[int]:
    """The ids that tokenizer.json adds to its vocabulary: special ones, mostly. Empty where there is no such file."""
    file = directory / "tokenizer.json"
    return [int(token["id"]) for token in read_json(file).get("added_tokens", [])] if file.is_file() else []
