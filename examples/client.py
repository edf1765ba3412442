"""The official client. Set OPENAI_BASE_URL for another address than penstock's own."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("PENSTOCK_API_KEY", "any key will do while none is set"),
)
for model in client.models.list():
    stream = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "What is Penstock?"}], stream=True
    )
    print(f"{model.id}: ", end="")
    for part in stream:
        print(part.choices[0].delta.content or "", end="", flush=True)
    print()
