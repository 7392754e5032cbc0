"""Many requests at once over one connection, one of them aborted:
python examples/async_client.py --endpoint ENDPOINT

Start the server with `python launch.py`, which prints its endpoint.
"""

import argparse
import asyncio

from runtime import AsyncClient, SamplingParams

COUNTRIES = ["France", "Italy", "Japan", "Peru", "Egypt", "Norway"]


async def main(endpoint: str) -> None:
    async with await AsyncClient.connect(endpoint) as client:
        sampling = SamplingParams(max_tokens=6)
        calls = [client.generate(f"The capital of {name} is", sampling) for name in COUNTRIES]
        for name, completion in zip(COUNTRIES, await asyncio.gather(*calls), strict=True):
            print(f"{name}:{completion.text!r}, {completion.cached_tokens} prompt tokens cached")

        endless = SamplingParams(max_tokens=2000, ignore_eos=True)
        stream = await client.generate("Once upon a time", endless, stream=True)
        num_tokens = 0
        async for chunk in stream:
            num_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                print(f"{num_tokens} tokens, ended by {chunk.finish_reason}")
            elif num_tokens >= 20:
                await stream.abort()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, help="as launch.py prints it")
    asyncio.run(main(parser.parse_args().endpoint))
