"""Complete prompts and answer chats in one script, without a server:  python examples/offline.py

`LLM()` starts the processes with the embedded SmolLM2-135M-Instruct and ends them with the block.
"""

from runtime import LLM, SamplingParams

prompts = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,"]
sampling = [
    SamplingParams(max_tokens=8),  # greedy: temperature is 0 by default
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7),
    SamplingParams(max_tokens=24, stop=("10",)),
]
chats = [
    [{"role": "user", "content": "What is the sun? Answer in one sentence."}],
    [{"role": "user", "content": "Name three fruits."}],
]

with LLM() as llm:
    for prompt, result in zip(prompts, llm.generate(prompts, sampling), strict=True):
        print(f"{prompt!r} → {result['text']!r} ({result['finish_reason']})")
    for chat, result in zip(chats, llm.chat(chats, SamplingParams(max_tokens=40)), strict=True):
        print(f"{chat[-1]['content']}\n  {result['text']}")
