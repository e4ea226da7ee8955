"""Have a model answer in JSON of a schema, and read the answer.

    python examples/constrained_json.py TARGET DRAFT

Both are directories of engines or of Hugging Face checkpoints, GGUF files, or Hub IDs. Names of properties and brackets
are forced: they cost no pass of the draft.
"""

import json
import sys

from specrun import SpeculativeDecoder

SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["good", "bad", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["sentiment", "stars"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}

if len(sys.argv) != 3:
    sys.exit(__doc__)
target, draft = sys.argv[1:]

with SpeculativeDecoder.open(target, draft) as decoder:
    prompt = "Review: the soup was cold, the view was fine.\nAs JSON: "
    (request,) = decoder.generate(prompt, json_schema=SCHEMA, max_output_len="max")
    if request.finish_reason != "stop":
        sys.exit(f"the answer is cut off ({request.finish_reason}): {request.text}")
    answer = json.loads(request.text or "")
    print(f"{answer['sentiment']}, {answer['stars']} of 5 stars; {request.stats.forced} tokens were forced")
