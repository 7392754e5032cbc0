"""Talk to a running server from ordinary code:  python examples/client.py --endpoint ENDPOINT

Start the server with `python launch.py`, which prints its endpoint.
"""

import argparse

from runtime import Client, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--endpoint", required=True, help="as launch.py prints it")
arguments = parser.parse_args()

with Client(arguments.endpoint) as client:
    print(f"{client.server.model}, sequences of up to {client.server.max_seq_len} tokens")

    completion = client.generate("The capital of France is", SamplingParams(max_tokens=8))
    print(f"at once: {completion.text!r} ({completion.finish_reason})")

    print("streamed: ", end="")
    sampling = SamplingParams(max_tokens=60, temperature=0.7, seed=1)
    num_tokens = 0
    for chunk in client.generate("Once upon a time", sampling, stream=True):
        print(chunk.text, end="", flush=True)
        num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            print(f"\n{num_tokens} tokens, ended by {chunk.finish_reason}")

    # A loop that is left early ends its request on the server too.
    for chunk in client.generate("1, 2, 3,", SamplingParams(max_tokens=1000), stream=True):
        if "9" in chunk.text:
            break
    print(f"requests ended so far: {client.stats()['requests_ended']}")
