"""What a response tells of its prompt, and a prompt's token ids: asked of the tokenizer."""

from collections.abc import Sequence

from http_proc.chat import chat_of
from http_proc.errors import HttpError
from http_proc.schemas import CompletionBody, TokenizeBody
from http_proc.shapes import Echo
from runtime.client import AsyncClient, Prompt
from runtime.types import Json


async def echo_of(client: AsyncClient, body: CompletionBody, prompt: Prompt) -> Echo:
    """What a completion tells of one of its prompts."""
    if not (body.echo or body.return_token_ids):
        return Echo()
    has_logprobs = body.echo and body.logprobs is not None
    ids: Sequence[int] = ()
    if not isinstance(prompt, str):
        ids = prompt
    elif has_logprobs or body.return_token_ids:
        ids = await client.tokenize(prompt)
    return Echo(
        text=await _text(client, prompt) if body.echo else "",
        first_token=(await _text(client, ids[:1])).encode() if has_logprobs else None,
        token_ids=ids if body.return_token_ids else None,
    )


async def chat_ids(client: AsyncClient, chat: Json) -> list[int]:
    """The token ids of the prompt that a chat becomes."""
    template = {name: value for name, value in chat.items() if name != "messages"}
    reply = await client.tokenize_chat(chat["messages"], **template)
    ids: list[int] = reply.token_ids.tolist()
    return ids


async def token_ids(client: AsyncClient, body: TokenizeBody) -> list[int]:
    """What POST /tokenize asks for."""
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "give either prompt or messages", param="prompt")
    if body.messages is None:
        special = body.add_special_tokens is not False
        return await client.tokenize(body.prompt or "", add_special_tokens=special)
    if body.add_special_tokens is not None:
        text = "add_special_tokens goes with prompt: a chat's template adds its own"
        raise HttpError(400, text, param="add_special_tokens")
    return await chat_ids(client, chat_of(body))


async def _text(client: AsyncClient, prompt: Prompt) -> str:
    """A prompt as text, its special tokens included."""
    if isinstance(prompt, str):
        return prompt
    return await client.detokenize(prompt, skip_special_tokens=False)
