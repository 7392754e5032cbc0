"""Every message that crosses a wire. docs/architecture.md says which wire carries which.

On the client wire `request` is the client's own number for the call; on the internal wires it is
the RequestId that the tokenizer gave. Arrays are one-dimensional, or have the Rows that their
annotation says; int32 unless said otherwise.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, TypeVar, dataclass_transform

from runtime.codec import Codec
from runtime.logprobs import Logprobs
from runtime.sampling import NO_DEFAULTS, SamplingParams
from runtime.types import IntArray, Json, LongArray, RequestId, Rows, Slot

CODEC = Codec()
CREDIT = 64
"""Chunks of one stream that may be on their way to its reader; see Grant."""
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[_T]) -> type[_T]:
    """Class decorator: a frozen, slotted, keyword-only dataclass."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


class FinishReason(StrEnum):
    """Why a request ended, as the user reads it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class FinishCode(IntEnum):
    """The same inside TokenBatch's arrays, NOT_YET where the request goes on."""

    NOT_YET = 0
    STOP = 1
    LENGTH = 2


# ---- client → tokenizer -----------------------------------------------------------------------


@CODEC.register(1)
@message
class Hello:
    """The first message of a connection, and its heartbeat: sent every 2 s."""


@CODEC.register(2)
@message
class Generate:
    """One prompt to complete; exactly one of text, token_ids and chat is given.

    With sampling.n above 1 each of the n outputs has Chunks of its own, told apart by `index`.

    chat: {"messages": [{"role": str, "content": str}, …], and what else the chat template is
    given}.
    stream: a Chunk per step with new text, else one final Chunk of each output with everything.
    timeout_s: the request is aborted this long after its arrival.
    priority: with the policy "priority", higher goes first.
    """

    request: int
    text: str | None
    token_ids: IntArray | None
    chat: Json | None
    sampling: SamplingParams
    stream: bool
    timeout_s: float | None
    priority: int = 0


@CODEC.register(3)
@message
class Abort:
    """End the request; it is answered with a final Chunk whose finish_reason is abort."""

    request: RequestId


@CODEC.register(4)
@message
class Tokenize:
    """Token ids of a text or of a chat (as in Generate) → Tokenized."""

    request: int
    text: str | None
    chat: Json | None
    add_special_tokens: bool


@CODEC.register(5)
@message
class Detokenize:
    """The text of token ids → Detokenized."""

    request: int
    token_ids: IntArray
    skip_special_tokens: bool


@CODEC.register(6)
@message
class Stats:
    """Counters of the scheduler → StatsReply."""

    request: RequestId


@CODEC.register(7)
@message
class FlushCache:
    """Forget all cached pages that no running request uses → Flushed."""

    request: RequestId


@CODEC.register(10)
@message
class Grant:
    """The client has taken `chunks` chunks of the stream `request`: as many more may be sent.

    A stream begins with a credit of CREDIT chunks and never has more. Its last chunk needs none.
    """

    request: int
    chunks: int


# ---- tokenizer → client -----------------------------------------------------------------------


@CODEC.register(20)
@message
class Welcome:
    """Answers Hello: what is served here.

    endpoints: where the server's other tokenizers listen, which speak as this one does; a client
    may connect to them too and share its calls out.
    """

    model: str
    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...]
    server_id: str
    """Changes with every server start, so that a reconnected client knows whom it talks to."""
    endpoints: tuple[str, ...] = ()
    defaults: SamplingParams = NO_DEFAULTS
    """What the model's generation_config.json says for fields that a request leaves at None; None
    where it says nothing.
    """


@CODEC.register(21)
@message
class Chunk:
    """News of one of a request's outputs: its tokens from `offset` on, and the text they add.

    The last Chunk of an output has a finish_reason; usage counts are final there. The request has
    ended when all its outputs have.
    """

    request: int
    offset: int
    token_ids: IntArray
    text: str
    finish_reason: FinishReason | None
    matched_stop: str | int | None
    """The stop string that ended the text, or the one of the request's stop_token_ids that did."""
    num_prompt_tokens: int
    num_cached_tokens: int
    index: int = 0
    """Which of the request's outputs, from 0 to n - 1."""
    logprobs: Logprobs | None = None
    """Of token_ids, if asked for."""
    prompt_logprobs: Logprobs | None = None
    """If asked for: of prompt tokens, from the second on. Of a long prompt they come in parts, in
    order, in Chunks of output 0 that may have nothing else and come before its first token.
    """


@CODEC.register(22)
@message
class Chunks:
    """One step's news for one client."""

    items: tuple[Chunk, ...]


@CODEC.register(23)
@message
class Failed:
    """The call `request` was refused or broke; None: the whole connection is refused.

    kind, field: as in runtime.errors, KINDS and RequestError.
    """

    request: int | None
    kind: str
    text: str
    field: str | None = None


@CODEC.register(24)
@message
class Tokenized:
    """Answers Tokenize; `text` is what was tokenized (a chat after its template)."""

    request: int
    token_ids: IntArray
    text: str


@CODEC.register(25)
@message
class Detokenized:
    """Answers Detokenize."""

    request: int
    text: str


@CODEC.register(26)
@message
class StatsReply:
    """Answers Stats: scheduler → tokenizer → client."""

    request: RequestId
    stats: Json


@CODEC.register(27)
@message
class Flushed:
    """Answers FlushCache: scheduler → tokenizer → client."""

    request: RequestId
    num_pages: int


# ---- tokenizer → scheduler (and Abort, Stats, FlushCache) -------------------------------------


@CODEC.register(40)
@message
class Submit:
    """One output to be made. In `sampling` every open choice is made (max_tokens, the seed and the
    model's defaults are never None), and n is 1.

    arrival: nanoseconds of the machine's monotonic clock: the order of all tokenizers' requests.
    stop_ids: all token ids that end it (end-of-sequence unless ignored, and the request's own).
    """

    request: RequestId
    arrival: int
    token_ids: IntArray
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    deadline_s: float | None
    priority: int = 0


@CODEC.register(41)
@message
class Finish:
    """A stop string was found: the request ends with its first `keep` output tokens."""

    request: RequestId
    keep: int


# ---- scheduler → tokenizer (and StatsReply, Flushed) ------------------------------------------


@CODEC.register(60)
@message
class TokenBatch:
    """The new tokens of one step; all arrays have one entry per token.

    offsets: the token's index among its request's outputs. reasons: FinishCode of the request after
    it.
    cached: prompt tokens of the request that came from the cache when it was first admitted.
    logprobs: of the tokens, where any of their requests asked for them.
    """

    requests: LongArray
    offsets: IntArray
    tokens: IntArray
    reasons: IntArray
    cached: IntArray
    logprobs: Logprobs | None = None


@CODEC.register(61)
@message
class Ended:
    """The request ended without a new token: aborted, past its deadline, or by Finish."""

    request: RequestId
    reason: FinishReason


@CODEC.register(62)
@message
class Rejected:
    """The request was never admitted; kind as in runtime.errors.KINDS."""

    request: RequestId
    kind: str
    text: str


@CODEC.register(63)
@message
class PromptLogprobs:
    """Log probabilities of a request's prompt tokens from index `start` (at least 1) on; they come
    in order, each once, before its first output token.
    """

    request: RequestId
    start: int
    logprobs: Logprobs


# ---- scheduler ↔ worker -----------------------------------------------------------------------


@message
class SlotSetup:
    """A request takes a slot: what the worker keeps for it until the next set-up of that slot.

    prompt_len: of what the user sent; after a retraction, ids that are written beyond it are
    outputs.
    first_prompt_logprob: the first prompt token whose log probability is still to be told, if
    sampling.prompt_logprobs asks for them.
    """

    slot: Slot
    request: RequestId
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    first_prompt_logprob: int = 1


@CODEC.register(80)
@message
class StepPlan:
    """One forward pass. Deltas take effect when the step starts, in the order of the fields.

    What belongs together is one array with a fixed number of rows: a message costs by its arrays.
    """

    step: int
    setups: tuple[SlotSetup, ...]
    """Slots newly given to a request."""
    writes: Annotated[IntArray, Rows(3)]
    """slot, start, length [3, w]: where `write_ids` go in the token table."""
    write_ids: IntArray
    """[sum of lengths]: known token ids."""
    pages: Annotated[IntArray, Rows(3)]
    """slot, index, id [3, p]: page_table[slot, index] = id."""
    segments: Annotated[IntArray, Rows(4)]
    """slot, start, length, samples [4, s]: compute tokens start … start+length-1 of the slot's
    sequence; where samples is 1 the segment ends at the last known token and the next token, at
    position start+length, is sampled.
    """
    out_loc: IntArray
    """[sum of lengths]: the KV index each token's key and value are written to, in segment order.
    The tokens' positions follow from the segments.
    """

    @property
    def write_slots(self) -> IntArray:
        """[w], a view like all below."""
        return _row(self.writes, 0)

    @property
    def write_starts(self) -> IntArray:
        return _row(self.writes, 1)

    @property
    def write_lens(self) -> IntArray:
        return _row(self.writes, 2)

    @property
    def page_slots(self) -> IntArray:
        """[p]"""
        return _row(self.pages, 0)

    @property
    def page_indices(self) -> IntArray:
        return _row(self.pages, 1)

    @property
    def page_ids(self) -> IntArray:
        return _row(self.pages, 2)

    @property
    def seg_slots(self) -> IntArray:
        """[s]"""
        return _row(self.segments, 0)

    @property
    def seg_starts(self) -> IntArray:
        return _row(self.segments, 1)

    @property
    def seg_lens(self) -> IntArray:
        return _row(self.segments, 2)

    @property
    def seg_samples(self) -> IntArray:
        return _row(self.segments, 3)


def _row(array: IntArray, index: int) -> IntArray:
    row: IntArray = array[index]
    return row


@CODEC.register(81)
@message
class StepResult:
    """The sampled tokens of a plan, one per sampling segment, in plan order. Times are monotonic
    seconds.

    logprobs: of the tokens, where a slot's request asks for them. prompt_logprobs: of prompts that
    the plan computes.
    """

    step: int
    tokens: IntArray
    started_s: float
    ended_s: float
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


# ---- every process ↔ supervisor ---------------------------------------------------------------


@CODEC.register(100)
@message
class Progress:
    """What a starting process is doing; fraction from 0 to 1 where it can be told."""

    text: str
    fraction: float | None


@CODEC.register(101)
@message
class Loaded:
    """The process has what it needs and waits for Begin."""

    num_pages: int | None
    """Workers: how many pages of KV this rank can hold."""
    max_seq_len: int | None
    """Workers: the longest sequence the model knows positions for."""
    vocab_size: int | None
    """Workers: rows of the embedding."""


@CODEC.register(102)
@message
class Begin:
    """Supervisor → all, once all are Loaded: the facts on which every process must agree."""

    num_pages: int
    max_seq_len: int
    vocab_size: int


@CODEC.register(103)
@message
class Ready:
    """The process may be given work. `text` tells the user what it runs."""

    text: str


@CODEC.register(104)
@message
class Heartbeat:
    """Sent every second from the process's I/O thread."""


@CODEC.register(105)
@message
class Fatal:
    """The process's last words before it exits by itself; `kind` is "user" or "internal"."""

    kind: str
    text: str


@CODEC.register(106)
@message
class Shutdown:
    """End now. `reason`: what to tell whoever still waits; None for an orderly stop."""

    reason: str | None


@CODEC.register(107)
@message
class Drain:
    """Supervisor → whom users are connected to: take no new request; answer Drained once none is
    left.

    timeout_s: what still runs this long from now is to be ended with an error.
    """

    timeout_s: float

    @property
    def end(self) -> str:
        """The text of that error."""
        return f"the server is being shut down, and {self.timeout_s:g} s (drain_timeout) are over"


@CODEC.register(108)
@message
class Drained:
    """Its answer: no request of its users is left."""


@CODEC.register(109)
@message
class Silent:
    """Supervisor → the front ends: which processes have not been heard for some seconds, whenever
    that changes.
    """

    names: tuple[str, ...]
