"""Talks to a running preheat with the official OpenAI client, unmodified.

    make serve                                 # in one terminal
    pip install openai
    python examples/04-openai-client/chat.py   # in another

BASE_URL and API_KEY may be set in the environment; without them, the default listener without keys.
"""

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("API_KEY", "none"),
)

model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Write one sentence about coffee."}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n[{model}: {chunk.usage.completion_tokens} tokens]")
