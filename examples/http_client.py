"""Talk to a running server with OpenAI's own client:  python examples/http_client.py URL

Start the server with `python launch.py`, which prints the URL. The client: `pip install openai`.
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("url", help="as launch.py prints it, http://127.0.0.1:8000 for example")
parser.add_argument("--api-key", default="none")
arguments = parser.parse_args()

client = OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key)
model = client.models.list().data[0].id
chat = [{"role": "user", "content": "What is the sun?"}]

answer = client.chat.completions.create(model=model, messages=chat, max_tokens=40)
print(f"at once: {answer.choices[0].message.content!r} ({answer.choices[0].finish_reason})")

print("streamed: ", end="")
for chunk in client.chat.completions.create(
    model=model, messages=chat, max_tokens=40, temperature=0.7, seed=1, stream=True,
    stream_options={"include_usage": True}, extra_body={"top_k": 20},
):  # fmt: skip
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.completion_tokens} tokens")
