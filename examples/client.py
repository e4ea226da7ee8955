"""Ask a server by OpenAI's client: an answer as a whole, and one as it is written.

    specrun serve TARGET DRAFT
    python examples/client.py [URL]

The models are arguments of the server, which says its URL when it is ready; without one it is
http://127.0.0.1:8000. OpenAI's client is a package: pip install openai
"""

import os
import sys

from openai import OpenAI

if len(sys.argv) > 2:
    sys.exit(__doc__)

url = sys.argv[1] if len(sys.argv) == 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SPECRUN_API_KEY", "none"))
model = client.models.list().data[0].id

whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=24, temperature=0)
print(whole.choices[0].text)

pieces = client.completions.create(model=model, prompt="Once upon a time", max_tokens=24, temperature=0, stream=True)
for piece in pieces:
    print(piece.choices[0].text, end="", flush=True)
print()
