"""`LLM`: a whole server for one script. The same processes as `launch.py` starts, over a private
socket.
"""

import asyncio
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, Self, TypeVar, cast

from tqdm.auto import tqdm

from runtime.client import Prompt
from runtime.completion import Choice, Completion
from runtime.config import from_options
from runtime.errors import ConfigError, ConnectionLost, ProcessDied, RequestError, TandemError
from runtime.options import HttpOptions
from runtime.progress import LoadingBars
from runtime.sampling import SamplingParams
from runtime.server import Server
from runtime.sync_client import Client
from runtime.types import Json

_T = TypeVar("_T")

MAX_OPEN_CALLS = 1024
"""Calls of one `generate` that are open at once; the others follow as these end."""
HTTP_NAMES = [field.name for field in fields(HttpOptions)]
DEATH_NEWS_S = 3.0
"""How long the supervisor may take to tell which process a lost connection is due to."""


class _Session:
    """The processes and the connection to them, until `close`."""

    def __init__(self, server: Server) -> None:
        """Start the processes and connect."""
        self.server = server
        self._resources = ExitStack()
        self._resources.callback(server.stop)
        self._is_open = True
        try:
            server.start()
            self.client = self._resources.enter_context(Client(server.endpoint))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End both; a second call does nothing."""
        self._is_open = False
        self._resources.close()

    def guarded(self, call: Callable[[], _T]) -> _T:
        """`call`, with the name of the process that died in place of a lost connection."""
        if not self._is_open:
            raise RequestError("this LLM is shut down: make a new one")
        try:
            return call()
        except BaseExceptionGroup as group:
            error = _first(group)
        except TandemError as e:
            error = e
        if isinstance(error, ConnectionLost | ProcessDied):
            error = self.server.supervisor.failure(DEATH_NEWS_S) or error
        raise error


class Encoding(NamedTuple):
    """What calling a tokenizer gives."""

    input_ids: list[int]


class ServerTokenizer:
    """The server's tokenizer, asked over the wire: the only one there is, so counts can't
    differ.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._client = session.client
        self.vocab_size = self._client.server.vocab_size
        self.eos_token_ids = self._client.server.eos_token_ids

    def __call__(self, text: str) -> "Encoding":
        """The token ids of a text as `input_ids`, as transformers' tokenizers give them."""
        return Encoding(self.encode(text))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        call = partial(self._client.tokenize, text, add_special_tokens=add_special_tokens)
        return self._session.guarded(call)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        call = partial(self._client.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return self._session.guarded(call)

    def apply_chat_template(
        self, messages: Sequence[Json], tokenize: bool = True, **template: Any
    ) -> list[int] | str:
        """The prompt of a chat, as token ids or as text."""
        call = partial(self._client.tokenize_chat, messages, **template)
        prompt = self._session.guarded(call)
        return prompt.token_ids.tolist() if tokenize else prompt.text


class LLM:
    """A model, its processes, and `generate`.

    with LLM("SmolLM2-135M-Instruct") as llm:
        print(llm.generate("The capital of France is")[0]["text"])
    """

    def __init__(self, model: str | None = None, *, verbose: bool = False, **options: Any) -> None:
        """Start the processes; returns when they are ready.

        options: as on the command line of launch.py, with underscores (docs/options.md). verbose:
        show the ready lines. HTTP is served only if one of its options is given (http_port=0).
        Raises ConfigError for an unknown or bad option, ModelNotFound, ProcessDied.
        """
        options.setdefault("log_level", "warning")
        options.setdefault("http", any(name in options for name in HTTP_NAMES))
        config = from_options({"model": model, **options})
        if config.server.shell:
            raise ConfigError("shell is True: only launch.py has one (python launch.py --shell)")
        show: Callable[[str], None] = _print if verbose else lambda line: None
        server = Server(
            config,
            on_line=show,
            on_progress=LoadingBars() if verbose else (lambda name, news: None),
        )
        self._session = _Session(server)
        self._finalizer = weakref.finalize(self, self._session.close)  # at exit too
        self.tokenizer = ServerTokenizer(self._session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[Json]:
        """Complete every prompt: texts or lists of token ids, one or many; results in prompt order.

        sampling_params, priority: one for all, or one per prompt; priority counts where the option
        policy is "priority". use_tqdm: show a progress bar.
        Each result has text, token_ids, finish_reason, matched_stop, prompt_tokens, cached_tokens;
        where they are asked for, logprobs and prompt_logprobs; with n above 1, choices.
        Raises RequestError for the first prompt that can't be served; the others are aborted then.
        """
        batch = _as_batch(prompts)
        samplings = _per_prompt(sampling_params, len(batch), "sampling parameters")
        priorities = _per_prompt(priority, len(batch), "priorities")
        generate = self._session.client.async_client.generate
        calls = [
            partial(generate, p, s, priority=level)
            for p, s, level in zip(batch, samplings, priorities, strict=True)
        ]
        return self._run(calls, use_tqdm)

    def chat(
        self,
        messages: Sequence[Json] | Sequence[Sequence[Json]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template: Any,
    ) -> list[Json]:
        """Answer one chat ([{"role": …, "content": …}, …]) or several; results as `generate`'s.

        template: what else the chat template is given, for example enable_thinking=False.
        """
        many = [list(messages)] if messages and isinstance(messages[0], dict) else list(messages)
        each = _per_prompt(sampling_params, len(many), "sampling parameters")
        ask = partial(self._session.client.async_client.chat, **template)
        calls = [partial(ask, m, s) for m, s in zip(many, each, strict=True)]
        return self._run(calls, use_tqdm)

    def stats(self) -> Json:
        """The scheduler's counters; docs/interfaces.md explains each."""
        return self._session.guarded(self._session.client.stats)

    def flush_cache(self) -> int:
        """Forget all cached pages that no running request uses; how many."""
        return self._session.guarded(self._session.client.flush_cache)

    def shutdown(self) -> None:
        """End the processes; a second call does nothing."""
        self._finalizer()

    @property
    def endpoint(self) -> str:
        """Where a Client can connect to the same server while it lives."""
        return self._session.server.endpoint

    @property
    def http_url(self) -> str | None:
        """Where HTTP clients can connect while it lives; None if HTTP is off."""
        return self._session.server.http_url

    @property
    def pids(self) -> dict[str, int]:
        """The process ids, by process name."""
        return self._session.server.supervisor.pids

    # ---- inside ---------------------------------------------------------------------------

    def _run(self, calls: Sequence[Callable[[], Any]], use_tqdm: bool) -> list[Json]:
        # More would only wait in the server's queue, whose length is limited.
        queue = self._session.server.instance.config.scheduler.max_queued_req
        room = asyncio.Semaphore(min(MAX_OPEN_CALLS, queue))

        async def all_of_them() -> list[Completion]:
            bar = tqdm(total=len(calls), desc="requests", disable=not use_tqdm)
            with bar:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(_one(index, call, bar, len(calls), room))
                        for index, call in enumerate(calls)
                    ]
            return [task.result() for task in tasks]

        completions = self._session.guarded(lambda: self._session.client.run(all_of_them()))
        return [_as_dict(completion) for completion in completions]


async def _one(
    index: int, call: Callable[[], Any], bar: Any, count: int, room: asyncio.Semaphore
) -> Completion:
    try:
        async with room:
            completion: Completion = await call()
    except RequestError as e:
        raise (type(e)(f"prompt {index}: {e}", e.field) if count > 1 else e) from None
    bar.update()
    return completion


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first error in a group, however deep."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}: it takes texts or lists of token ids"
        )
    batch = list(prompts)
    if batch and all(isinstance(p, Integral) and not isinstance(p, bool) for p in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def _per_prompt(value: _T | Sequence[_T], count: int, what: str) -> list[_T]:
    """One value for each prompt, given one for all or one for each."""
    if not isinstance(value, list | tuple):
        return [cast(_T, value)] * count
    if len(value) != count:
        raise RequestError(
            f"{count} prompts came with {len(value)} {what}: give one for all, or one per prompt"
        )
    return list(value)


def _as_dict(completion: Completion) -> Json:
    """The first output's fields and the prompt's; all outputs where there are several."""
    result = {
        **_choice_as_dict(completion.choices[0]),
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    if completion.prompt_logprobs is not None:
        result["prompt_logprobs"] = completion.prompt_logprobs
    if len(completion.choices) > 1:
        result["choices"] = [_choice_as_dict(choice) for choice in completion.choices]
    return result


def _choice_as_dict(choice: Choice) -> Json:
    result: Json = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": str(choice.finish_reason),
        "matched_stop": choice.matched_stop,
    }
    return result if choice.logprobs is None else {**result, "logprobs": choice.logprobs}


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
