"""What is known of the outputs of one HTTP request, gathered from chunks."""

from dataclasses import dataclass, field

from runtime.logprobs import Logprobs, join
from runtime.messages import Chunk, FinishReason
from runtime.types import Json


@dataclass(slots=True, eq=False)
class Output:
    """One choice of the response."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    _logprobs: list[Logprobs] = field(default_factory=list)
    _prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Take one chunk of this output in."""
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids.tolist()
        self.finish_reason = chunk.finish_reason
        self.matched_stop = chunk.matched_stop
        if chunk.logprobs is not None:
            self._logprobs.append(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs.append(chunk.prompt_logprobs)

    @property
    def logprobs(self) -> Logprobs | None:
        return join(self._logprobs) if self._logprobs else None

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        return join(self._prompt_logprobs) if self._prompt_logprobs else None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Usage:
    """Tokens of a whole HTTP request."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_output = 0

    def count(self, job: int, chunk: Chunk) -> None:
        """A chunk of the request's prompt number `job`."""
        self._num_output += len(chunk.token_ids)
        # Of several outputs the first computes the prompt; the others find it in the cache.
        others = self._prompts.get(job, (0, chunk.num_cached_tokens))[1]
        self._prompts[job] = (chunk.num_prompt_tokens, min(others, chunk.num_cached_tokens))

    def as_json(self) -> Json:
        """OpenAI's usage object."""
        num_prompt = sum(total for total, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": num_prompt + self._num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }
