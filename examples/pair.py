"""Write texts with a target and a draft, and show what the draft brought.

    python examples/pair.py TARGET DRAFT

Both are directories of engines or of Hugging Face checkpoints, GGUF files, or Hub IDs. Without the draft the target
writes the same text alone: SpeculativeDecoder.open(target).
"""

import sys

from specrun import SamplingParams, SpeculativeDecoder

if len(sys.argv) != 3:
    sys.exit(__doc__)
target, draft = sys.argv[1:]

with SpeculativeDecoder.open(target, draft) as decoder:
    params = SamplingParams(temperature=0.8, seed=1)
    for request in decoder.generate(["Once upon a time", "The best way to learn is"], params, max_output_len=32):
        print(request.text)
        print(f"  {request.stats.accepted} tokens are the draft's; {request.stats.tokens_per_round:.2f} tokens a round")
