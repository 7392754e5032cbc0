"""Chats as the tokenizer takes them: messages, and what else the model's template is given."""

from http_proc.errors import HttpError
from http_proc.schemas import ChatFields, Message
from runtime.types import Json

_TEMPLATE_NAME = {"developer": "system"}
"""Roles that templates know by another name."""


def chat_of(body: ChatFields) -> Json:
    """What Generate and Tokenize carry as `chat`."""
    template = body.chat_template_kwargs or {}
    if "messages" in template:
        text = "chat_template_kwargs may not hold 'messages': they have a field of their own"
        raise HttpError(400, text, param="chat_template_kwargs")
    named = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    return {
        "messages": [_message(message) for message in body.messages or ()],
        **template,
        **{name: value for name, value in named.items() if value is not None},
    }


def _message(message: Message) -> Json:
    role = _TEMPLATE_NAME.get(message.role, message.role)
    return {**message.model_dump(exclude_none=True), "role": role}
