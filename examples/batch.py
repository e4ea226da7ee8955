"""Answer a file of questions, one JSON object a line, into another.

    python examples/batch.py TARGET DRAFT questions.jsonl answers.jsonl

Both models are directories of engines or of Hugging Face checkpoints, GGUF files, or Hub IDs. The engines take as many
questions at a time as their batch has rows, and an answer is written when it has ended. examples/questions.jsonl is
such a file. ``specrun generate --input_file .. --output_file ..`` does this too, with any option on a line, and goes on
where it was stopped.
"""

import json
import sys
from pathlib import Path

from specrun import SpeculativeDecoder

if len(sys.argv) != 5:
    sys.exit(__doc__)
target, draft, questions, answers = sys.argv[1:]

with SpeculativeDecoder.open(target, draft) as decoder, Path(answers).open("w", encoding="utf-8") as output:
    lines = [json.loads(line) for line in Path(questions).read_text(encoding="utf-8").splitlines()]
    requests = decoder.requests([line["prompt"] for line in lines], max_output_len=32)
    question = dict(zip(requests, lines, strict=True))
    for request, _, finish_reason in decoder.run(requests):
        if finish_reason:
            answer = {"id": question[request]["id"], "text": request.text, "finish_reason": finish_reason}
            print(json.dumps(answer, ensure_ascii=False), file=output, flush=True)
