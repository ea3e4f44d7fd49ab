"""The OpenAI client, unmodified, against a local stack: stoker up && python examples/openai_client.py."""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7380/v1"
client = OpenAI(base_url=base_url, api_key="none")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is a warm KV cache worth keeping?"}],
    max_tokens=32,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
