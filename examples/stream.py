"""Show a text while it is written, token by token. Those that the draft proposed are green.

    python examples/stream.py TARGET DRAFT

Both are directories of engines or of Hugging Face checkpoints, GGUF files, or Hub IDs.
"""

import sys

from specrun import SpeculativeDecoder

GREEN, PLAIN = "\033[32m", "\033[0m"

if len(sys.argv) != 3:
    sys.exit(__doc__)
target, draft = sys.argv[1:]

with SpeculativeDecoder.open(target, draft) as decoder:
    for token in decoder.stream("Once upon a time", max_output_len=48):
        print(f"{GREEN}{token.text}{PLAIN}" if token.from_draft else token.text, end="", flush=True)
    print()
