"""Ask a running server one question, over its ZMQ endpoint:  python examples/ask.py --endpoint
ENDPOINT 'Question?'
"""

import argparse

from runtime import Client, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--endpoint", required=True, help="as launch.py prints it")
parser.add_argument("question")
arguments = parser.parse_args()

with Client(arguments.endpoint) as client:
    messages = [{"role": "user", "content": arguments.question}]
    for chunk in client.chat(messages, SamplingParams(max_tokens=200), stream=True):
        print(chunk.text, end="", flush=True)
print()
