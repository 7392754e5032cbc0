"""Ask a running server one question, over its ZMQ endpoint:  python examples/ask.py --endpoint
ENDPOINT 'Question?'
"""

import argparse
import sys

from runtime import Client, SamplingParams, TandemError

parser = argparse.ArgumentParser()
parser.add_argument("--endpoint", required=True, help="as launch.py prints it")
parser.add_argument("question")
arguments = parser.parse_args()

messages = [{"role": "user", "content": arguments.question}]
try:
    with Client(arguments.endpoint) as client:
        for chunk in client.chat(messages, SamplingParams(max_tokens=200), stream=True):
            print(chunk.text, end="", flush=True)
except TandemError as e:
    sys.exit(f"ask.py: {e}")
print()
