#!/bin/bash
# What can be asked over HTTP, with curl:  bash examples/http.sh [URL]
# Start the server with `python launch.py`, which prints the URL.
URL=${1:-http://127.0.0.1:8000}
JSON='Content-Type: application/json'

# The model, and whether the server is well.
curl "$URL/v1/models"
curl "$URL/health"

# A chat, whole and streamed. X-Request-Id comes back, and names the request for /abort.
curl "$URL/v1/chat/completions" -H "$JSON" -H 'X-Request-Id: mine' -d '{
  "messages": [{"role": "user", "content": "What is the sun?"}], "max_tokens": 20}'
curl -N "$URL/v1/chat/completions" -H "$JSON" -d '{
  "messages": [{"role": "user", "content": "What is the sun?"}], "max_tokens": 20,
  "stream": true, "stream_options": {"include_usage": true}}'
curl "$URL/abort" -H "$JSON" -d '{"request_id": "mine"}'

# An answer that goes on where the last message ends.
curl "$URL/v1/chat/completions" -H "$JSON" -d '{"max_tokens": 10, "continue_final_message": true,
  "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]}'

# Several prompts, several outputs of each; the same seed gives the same outputs.
curl "$URL/v1/completions" -H "$JSON" -d '{
  "prompt": ["The capital of France is", "1, 2, 3,"], "n": 2, "max_tokens": 8,
  "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1}'

# A text or a token may end the output: matched_stop is which.
curl "$URL/v1/completions" -H "$JSON" -d '{
  "prompt": "1, 2, 3,", "max_tokens": 40, "stop": ["7"], "stop_token_ids": [33]}'

# Log probabilities of the prompt and the output.
curl "$URL/v1/completions" -H "$JSON" -d '{
  "prompt": "1, 2, 3,", "max_tokens": 3, "logprobs": 2, "echo": true}'

# What other clients send along is taken if it asks for nothing...
curl "$URL/v1/chat/completions" -H "$JSON" -d '{
  "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3,
  "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": false}'

# ... and else refused: `param` is the field, `code` the kind of error.
curl "$URL/v1/chat/completions" -H "$JSON" -d '{
  "messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}'
curl "$URL/v1/completions" -H "$JSON" -d '{"prompt": "Hi", "max_tokens": 100000000}'

# Text to tokens and back.
curl "$URL/tokenize" -H "$JSON" -d '{"prompt": "What is the sun?"}'
curl "$URL/detokenize" -H "$JSON" -d '{"tokens": [1780, 314, 260]}'
