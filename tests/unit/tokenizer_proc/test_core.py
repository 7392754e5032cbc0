"""The tokenizer's core, event by event."""

from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest

from runtime.codec import VERSION
from runtime.messages import (
    CREDIT,
    Abort,
    Chunk,
    Chunks,
    Detokenize,
    Detokenized,
    Ended,
    Failed,
    Finish,
    FinishCode,
    FinishReason,
    FlushCache,
    Flushed,
    Generate,
    Grant,
    Heartbeat,
    Hello,
    Rejected,
    Stats,
    StatsReply,
    Submit,
    TokenBatch,
    Tokenize,
    Tokenized,
    Welcome,
)
from runtime.sampling import SamplingParams
from runtime.types import RequestId, owner_of
from tests.fakes import byte_tokenizer, frame_of
from tokenizer_proc.actions import Convert, Forget, ToClient, ToScheduler
from tokenizer_proc.core import CLIENT_SILENCE_TICKS, LONG_BYTES, UNREAD_TICKS, TokenizerCore
from tokenizer_proc.jobs import Job
from tokenizer_proc.queries import MAX_OPEN
from tokenizer_proc.texts import MAX_CHARS_PER_TOKEN

MAX_SEQ_LEN = 64
VOCAB_SIZE = 259
EOS = 2
TOKENIZER = byte_tokenizer("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def ids(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER.encode(text)]


@dataclass
class Bench:
    """A core, and everything it wanted sent so far."""

    vocab_size: int = VOCAB_SIZE
    to_scheduler: list[Any] = field(default_factory=list)
    to_clients: list[tuple[bytes, Any]] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    now_ns: int = 5

    def __post_init__(self) -> None:
        self.core = TokenizerCore(
            TOKENIZER,
            index=3,
            endpoints=("ipc:///other",),
            model="bytes",
            server_id="s",
            max_seq_len=MAX_SEQ_LEN,
            vocab_size=self.vocab_size,
            max_jobs=2,
        )

    def take(self) -> None:
        for action in self.core.take_actions():
            match action:
                case ToScheduler(message):
                    self.to_scheduler.append(message)
                case ToClient(client, message):
                    self.to_clients.append((client, message))
                case Forget(client):
                    self.forgotten.append(client)
                case Convert(job):
                    self.jobs.append(job)

    def client(self, message: Any, client: bytes = b"a") -> list[Any]:
        """A client sends `message` (or raw bytes); what that client is sent at once."""
        frame = message if isinstance(message, bytes) else frame_of(message)
        before = len(self.to_clients)
        self.core.on_client_frame(client, frame, self.now_ns)
        self.take()
        return [m for c, m in self.to_clients[before:] if c == client]

    def scheduler(self, message: Any) -> list[Any]:
        """The scheduler sends `message`; what clients are sent at once."""
        before = len(self.to_clients)
        self.core.on_scheduler(message)
        self.take()
        return [m for _, m in self.to_clients[before:]]

    def generate(self, number: int = 0, client: bytes = b"a", **given: Any) -> Submit:
        """Start a request; what the scheduler is told of it."""
        assert self.client(generate(number, **given), client) == []
        submit = self.to_scheduler[-1]
        assert isinstance(submit, Submit)
        return submit

    def tokens(
        self, submit: Submit, text: str, first: int = 0, code: FinishCode = FinishCode.NOT_YET
    ) -> list[Any]:
        """The text's tokens one step after the other, the last with `code`; what clients hear."""
        heard = []
        each = ids(text)
        for index, token in enumerate(each):
            is_last = index == len(each) - 1
            heard += self.scheduler(
                batch((submit, first + index, token, code if is_last else FinishCode.NOT_YET))
            )
        return heard

    def final_messages(self, number: int, client: bytes = b"a") -> list[Any]:
        """All that ended the client's call `number`."""
        finals: list[Any] = []
        for c, message in self.to_clients:
            if c != client:
                continue
            if isinstance(message, Failed) and message.request == number:
                finals.append(message)
            if isinstance(message, Chunks):
                finals += [
                    k for k in message.items if k.request == number and k.finish_reason is not None
                ]
        return finals


@pytest.fixture
def bench() -> Bench:
    return Bench()


def generate(number: int = 0, **given: Any) -> Generate:
    prompt = {"text": None, "token_ids": None, "chat": None}
    sampling = given.pop("sampling", SamplingParams(max_tokens=20))
    rest = {"stream": True, "timeout_s": None, **given}
    if not set(rest) & set(prompt):
        rest["text"] = "hello"
    return Generate(request=number, sampling=sampling, **{**prompt, **rest})


def batch(*entries: tuple[Submit, int, int, FinishCode]) -> TokenBatch:
    submits, offsets, tokens, codes = zip(*entries, strict=True)
    return TokenBatch(
        requests=np.array([s.request for s in submits], np.int64),
        offsets=np.array(offsets, np.int32),
        tokens=np.array(tokens, np.int32),
        reasons=np.array(codes, np.int32),
        cached=np.array([2] * len(submits), np.int32),
    )


def text_of(messages: list[Any]) -> str:
    return "".join(chunk.text for m in messages for chunk in m.items)


def last_chunk(messages: list[Any]) -> Chunk:
    chunk = messages[-1].items[-1]
    assert isinstance(chunk, Chunk)
    return chunk


# ---- each kind of call ------------------------------------------------------------------------


def test_hello_is_answered_with_what_is_served(bench: Bench) -> None:
    assert bench.client(Hello()) == [
        Welcome(
            model="bytes",
            vocab_size=VOCAB_SIZE,
            max_seq_len=MAX_SEQ_LEN,
            eos_token_ids=(EOS,),
            server_id="s",
            endpoints=("ipc:///other",),
        )
    ]


def test_a_submit_has_every_open_choice_made(bench: Bench) -> None:
    submit = bench.generate(
        sampling=SamplingParams(stop_token_ids=(7, EOS)), timeout_s=4.5, priority=-3
    )
    assert submit.token_ids.tolist() == ids("hello")
    assert owner_of(submit.request) == 3
    assert submit.stop_ids == (EOS, 7)
    assert submit.sampling.max_tokens == MAX_SEQ_LEN - len(ids("hello"))
    assert submit.sampling.seed is not None
    assert submit.deadline_s == 4.5
    assert submit.priority == -3


def test_ignore_eos_leaves_only_the_requests_own_stop_tokens(bench: Bench) -> None:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, stop_token_ids=(9,), seed=5)
    submit = bench.generate(sampling=sampling)
    assert submit.stop_ids == (9,)
    assert submit.sampling.seed == 5


def test_arrivals_are_the_times_and_differ(bench: Bench) -> None:
    """They order the requests of all tokenizers: by their ids, the first one's all went first."""
    assert [bench.generate(n).arrival for n in range(3)] == [5, 6, 7]
    bench.now_ns = 100
    assert bench.generate(3).arrival == 100


def test_a_prompt_may_be_ids_or_a_chat(bench: Bench) -> None:
    assert bench.generate(0, token_ids=np.array([5, 6], np.int32)).token_ids.tolist() == [5, 6]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert bench.generate(1, chat=chat).token_ids.tolist() == ids("[hi]")


def test_text_becomes_ids_and_ids_text(bench: Bench) -> None:
    (reply,) = bench.client(Tokenize(request=4, text="abc", chat=None, add_special_tokens=True))
    assert isinstance(reply, Tokenized)
    assert (reply.request, reply.text, reply.token_ids.tolist()) == (4, "abc", ids("abc"))
    detokenize = Detokenize(request=5, token_ids=reply.token_ids, skip_special_tokens=True)
    assert bench.client(detokenize) == [Detokenized(request=5, text="abc")]


def test_a_chat_becomes_its_prompt(bench: Bench) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    (reply,) = bench.client(Tokenize(request=4, text=None, chat=chat, add_special_tokens=False))
    assert reply.text == "[x]"


def test_a_flush_is_answered_by_the_scheduler_through_the_core(bench: Bench) -> None:
    ask = FlushCache(request=RequestId(6))
    assert bench.client(ask) == []
    assert bench.client(ask, b"b") == []
    first, second = bench.to_scheduler
    assert first.request != second.request
    for query, client in ((second, b"b"), (first, b"a")):
        inner = Flushed(request=query.request, num_pages=2)
        assert bench.scheduler(inner) == [Flushed(request=RequestId(6), num_pages=2)]
        assert bench.to_clients[-1][0] == client
        assert bench.scheduler(inner) == []  # answered once


def stats_reply(bench: Bench, value: int) -> list[Any]:
    """The scheduler answers the Stats it was asked last; what clients hear."""
    query = bench.to_scheduler[-1]
    assert isinstance(query, Stats)
    return bench.scheduler(StatsReply(request=query.request, stats={"a": value}))


def test_stats_asked_meanwhile_share_the_next_answer(bench: Bench) -> None:
    """A client that asked a thousand times had the scheduler count a thousand times."""
    bench.client(Stats(request=RequestId(0)))
    for number in range(5):
        assert bench.client(Stats(request=RequestId(number)), b"b") == []
    assert len(bench.to_scheduler) == 1
    assert stats_reply(bench, 1) == [StatsReply(request=RequestId(0), stats={"a": 1})]
    assert len(bench.to_scheduler) == 2
    shared = [StatsReply(request=RequestId(n), stats={"a": 2}) for n in range(5)]
    assert stats_reply(bench, 2) == shared
    assert len(bench.to_scheduler) == 2
    bench.client(Stats(request=RequestId(9)))
    assert len(bench.to_scheduler) == 3


@pytest.mark.parametrize("kind", [Stats, FlushCache])
def test_a_client_may_have_so_many_queries_open_and_others_theirs(bench: Bench, kind: Any) -> None:
    for number in range(MAX_OPEN):
        assert bench.client(kind(request=RequestId(number))) == []
    (failed,) = bench.client(kind(request=RequestId(MAX_OPEN)))
    assert (failed.request, failed.kind) == (MAX_OPEN, "overloaded")
    assert bench.client(kind(request=RequestId(0)), b"b") == []


def test_a_client_that_is_gone_waits_for_no_query(bench: Bench) -> None:
    for client in (b"a", b"b"):
        bench.client(Stats(request=RequestId(0)), client)
        bench.client(FlushCache(request=RequestId(1)), client)
        bench.client(Stats(request=RequestId(2)), client)
    bench.core.on_client_gone(b"a")
    bench.take()
    stats, flush, *_ = bench.to_scheduler
    assert bench.scheduler(Flushed(request=flush.request, num_pages=0)) == []
    assert bench.scheduler(StatsReply(request=stats.request, stats={})) == []
    assert [m.request for m in stats_reply(bench, 2)] == [0, 2]
    assert bench.to_clients[-1][0] == b"b"


# ---- long texts -------------------------------------------------------------------------------

FITTING = {"role": "user", "content": "hi", "more": "x" * LONG_BYTES}
"""A message that is long and whose prompt is short."""


def long_chat(number: int) -> Generate:
    return generate(number, chat={"messages": [FITTING]})


def convert(bench: Bench) -> list[Any]:
    """The oldest job is done; what clients hear."""
    job = bench.jobs.pop(0)
    before = len(bench.to_clients)
    try:
        outcome: Any = bench.core.texts.convert(job.call)
    except Exception as e:
        outcome = e
    bench.core.on_converted(job, outcome)
    bench.take()
    return [m for _, m in bench.to_clients[before:]]


def test_a_long_call_is_converted_elsewhere_and_then_goes_on(bench: Bench) -> None:
    """One very long text was one call of the tokenizer, for which everybody waited."""
    bench.now_ns = 100
    assert bench.client(long_chat(1)) == []
    assert bench.to_scheduler == []
    bench.now_ns = 200
    other = bench.generate(2)  # meanwhile others are served
    assert convert(bench) == []
    submit = bench.to_scheduler[-1]
    assert submit.token_ids.tolist() == ids("[hi]")
    assert submit.arrival == 100 < other.arrival
    assert text_of(bench.tokens(submit, "ok", code=FinishCode.LENGTH)) == "ok"


def test_every_conversion_may_be_long(bench: Bench) -> None:
    chat = {"messages": [FITTING]}
    bench.client(Tokenize(request=1, text=None, chat=chat, add_special_tokens=False))
    (reply,) = convert(bench)
    assert (reply.request, reply.text) == (1, "[hi]")
    many = np.tile(np.array(ids("ab"), np.int32), 2000)
    bench.client(Detokenize(request=2, token_ids=many, skip_special_tokens=True))
    assert convert(bench) == [Detokenized(request=2, text="ab" * 2000)]


def test_ids_for_the_scheduler_are_no_long_call(bench: Bench) -> None:
    (failed,) = bench.client(generate(1, token_ids=np.full(LONG_BYTES, 5, np.int32)))
    assert "shorten it" in failed.text
    assert bench.jobs == []


def test_a_long_call_that_is_refused_is_answered(bench: Bench) -> None:
    assert bench.client(generate(1, chat={"messages": [5], "x": "y" * LONG_BYTES})) == []
    (failed,) = convert(bench)
    assert (failed.request, failed.kind) == (1, "request")
    bench.generate(1)  # the number is free


def test_what_must_exceed_the_context_is_refused_before_it_is_tokenized_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda t, *a: encoded.append(len(t)) or encode(t, *a))
    (failed,) = bench.client(generate(1, text="x" * 1025))
    assert "1025 characters, and its first 512 alone are 512 tokens" in failed.text
    assert f"this server takes {MAX_SEQ_LEN}" in failed.text
    assert encoded == [512]


def test_a_number_whose_call_is_being_converted_is_in_use(bench: Bench) -> None:
    bench.client(long_chat(1))
    (failed,) = bench.client(generate(1))
    assert (failed.request, failed.kind) == (None, "protocol")
    convert(bench)
    assert len(bench.to_scheduler) == 1


def test_an_abort_ends_a_call_that_is_being_converted(bench: Bench) -> None:
    bench.client(long_chat(1))
    (aborted,) = bench.client(Abort(request=RequestId(1)))
    assert last_chunk([aborted]).finish_reason is FinishReason.ABORT
    bench.generate(1)  # the number is free
    before = len(bench.to_scheduler)
    assert convert(bench) == []
    assert len(bench.to_scheduler) == before


def test_a_call_of_a_client_that_is_gone_is_not_answered(bench: Bench) -> None:
    bench.client(long_chat(1))
    bench.core.on_client_gone(b"a")
    bench.client(Hello())  # and is back under the same name
    assert convert(bench) == []
    assert bench.to_scheduler == []


def test_so_many_long_calls_may_wait_and_aborted_ones_count_until_they_are_gone(
    bench: Bench,
) -> None:
    for number in range(2):
        assert bench.client(long_chat(number)) == []
        bench.client(Abort(request=RequestId(number)))
    (failed,) = bench.client(long_chat(2), b"b")
    assert (failed.request, failed.kind) == (2, "overloaded")
    convert(bench)
    assert bench.client(long_chat(2), b"b") == []


def test_a_silent_client_and_a_shutdown_end_calls_that_are_being_converted(bench: Bench) -> None:
    bench.client(long_chat(1))
    for _ in range(CLIENT_SILENCE_TICKS + 1):
        bench.core.tick()
    bench.take()
    (silent,) = bench.final_messages(1)
    assert silent.kind == "aborted"
    bench.client(long_chat(2), b"b")
    bench.core.shut_down("worker-0 died")
    bench.take()
    (died,) = bench.final_messages(2, b"b")
    assert (died.kind, died.text) == ("died", "worker-0 died")


# ---- credit -----------------------------------------------------------------------------------


def starve(bench: Bench, submit: Submit, num_more: int) -> list[Any]:
    """Use the stream's credit up and `num_more` tokens beyond it."""
    heard = []
    for index in range(CREDIT + num_more):
        heard += bench.scheduler(batch((submit, index, ids("x")[0], FinishCode.NOT_YET)))
    return heard


def test_a_stream_is_sent_no_more_chunks_than_its_reader_takes(bench: Bench) -> None:
    """An unread stream filled the client's memory, or the server's for a client that was deaf."""
    submit = bench.generate()
    assert len(starve(bench, submit, 10)) == CREDIT
    (more,) = bench.client(Grant(request=0, chunks=1))
    (chunk,) = more.items
    assert (chunk.offset, chunk.text, len(chunk.token_ids)) == (CREDIT, "x" * 10, 10)
    assert bench.tokens(submit, "y", first=CREDIT + 10) == []
    assert bench.client(Grant(request=0, chunks=5))[0].items[0].text == "y"
    assert [m.items[0].text for m in bench.tokens(submit, "abc", first=CREDIT + 11)] == [*"abc"]


def test_the_last_chunk_needs_no_credit(bench: Bench) -> None:
    submit = bench.generate()
    starve(bench, submit, 3)
    heard = bench.tokens(submit, "y", first=CREDIT + 3, code=FinishCode.LENGTH)
    final = last_chunk(heard)
    assert (final.text, final.finish_reason) == ("xxxy", FinishReason.LENGTH)


def test_credit_does_not_grow_beyond_its_limit(bench: Bench) -> None:
    submit = bench.generate()
    for _ in range(3):
        assert bench.client(Grant(request=0, chunks=1_000_000)) == []
    assert len(starve(bench, submit, 5)) == CREDIT


def test_a_grant_for_nothing_is_dropped_and_a_bad_one_refused(bench: Bench) -> None:
    assert bench.client(Grant(request=77, chunks=1)) == []
    bench.generate()
    (failed,) = bench.client(Grant(request=0, chunks=0))
    assert (failed.request, failed.kind) == (None, "protocol")
    assert bench.final_messages(0) == []


def test_a_stream_that_nobody_reads_is_ended(bench: Bench) -> None:
    unread, other = bench.generate(0), bench.generate(1)
    starve(bench, unread, 1)
    for _ in range(UNREAD_TICKS):
        bench.client(Hello())
        bench.core.tick()
    bench.take()
    assert bench.final_messages(0) == []
    bench.client(Hello())
    bench.core.tick()
    bench.take()
    (final,) = bench.final_messages(0)
    assert (final.kind, "nothing of the stream was read" in final.text) == ("aborted", True)
    assert bench.to_scheduler[-1] == Abort(request=unread.request)
    assert text_of(bench.tokens(other, "ok", code=FinishCode.LENGTH)) == "ok"


def test_a_slow_reader_is_a_reader(bench: Bench) -> None:
    submit = bench.generate()
    starve(bench, submit, 1)
    for index in range(3):
        for _ in range(UNREAD_TICKS):
            bench.client(Hello())
            bench.core.tick()
        bench.client(Grant(request=0, chunks=1))
        bench.tokens(submit, "y", first=CREDIT + 1 + index)
    assert bench.final_messages(0) == []


def test_the_outputs_of_a_call_share_its_credit(bench: Bench) -> None:
    bench.generate(0, sampling=SamplingParams(max_tokens=20, n=2))
    first, second = bench.to_scheduler[-2:]
    token = ids("x")[0]
    heard = []
    for offset in range(CREDIT + 1):
        step = batch(*((s, offset, token, FinishCode.NOT_YET) for s in (first, second)))
        heard += [chunk for m in bench.scheduler(step) for chunk in m.items]
    assert len(heard) == 2 * CREDIT
    (more,) = bench.client(Grant(request=0, chunks=2))
    assert [(chunk.index, chunk.text) for chunk in more.items] == [(0, "x"), (1, "x")]


def test_an_unread_call_ends_once_with_all_its_outputs(bench: Bench) -> None:
    bench.generate(0, sampling=SamplingParams(max_tokens=20, n=2))
    submits = bench.to_scheduler[-2:]
    for submit in submits:
        starve(bench, submit, 1)
    for _ in range(UNREAD_TICKS + 1):
        bench.client(Hello())
        bench.core.tick()
    bench.take()
    assert len(bench.final_messages(0)) == 1
    assert bench.to_scheduler[-2:] == [Abort(request=submit.request) for submit in submits]


def test_an_abort_before_the_prompt_is_known_ends_every_output(bench: Bench) -> None:
    chat = {"messages": [FITTING]}
    bench.client(generate(1, chat=chat, sampling=SamplingParams(n=3)))
    (aborted,) = bench.client(Abort(request=RequestId(1)))
    assert [chunk.index for chunk in aborted.items] == [0, 1, 2]


def test_a_request_without_stream_needs_no_credit(bench: Bench) -> None:
    submit = bench.generate(stream=False)
    assert starve(bench, submit, 3) == []
    for _ in range(UNREAD_TICKS + 2):
        bench.client(Hello())
        bench.core.tick()
    heard = bench.tokens(submit, "y", first=CREDIT + 3, code=FinishCode.LENGTH)
    assert len(text_of(heard)) == CREDIT + 4


# ---- outputs ----------------------------------------------------------------------------------


def test_a_stream_gets_each_tokens_text_and_one_final_chunk(bench: Bench) -> None:
    submit = bench.generate()
    heard = bench.tokens(submit, "abc", code=FinishCode.LENGTH)
    assert [m.items[0].text for m in heard] == ["a", "b", "c"]
    assert [m.items[0].offset for m in heard] == [0, 1, 2]
    final = last_chunk(heard)
    assert final.finish_reason is FinishReason.LENGTH
    assert (final.num_prompt_tokens, final.num_cached_tokens) == (5, 2)
    assert len(bench.final_messages(0)) == 1


def test_without_stream_all_comes_at_the_end(bench: Bench) -> None:
    submit = bench.generate(stream=False)
    (only,) = bench.tokens(submit, "abc", code=FinishCode.LENGTH)
    (chunk,) = only.items
    assert (chunk.text, chunk.offset, chunk.token_ids.tolist()) == ("abc", 0, ids("abc"))


def test_a_character_is_sent_when_its_last_byte_is_there(bench: Bench) -> None:
    heard = bench.tokens(bench.generate(), "é☃", code=FinishCode.LENGTH)
    assert [chunk.text for m in heard for chunk in m.items] == ["é", "☃"]
    assert sum(len(chunk.token_ids) for m in heard for chunk in m.items) == len(ids("é☃"))


def test_an_end_token_ends_with_stop_and_no_text(bench: Bench) -> None:
    submit = bench.generate()
    bench.tokens(submit, "a")
    heard = bench.scheduler(batch((submit, 1, EOS, FinishCode.STOP)))
    final = last_chunk(heard)
    assert (final.text, final.finish_reason) == ("", FinishReason.STOP)
    assert final.token_ids.tolist() == [EOS]


def test_one_message_per_client_carries_a_steps_news(bench: Bench) -> None:
    one, two = bench.generate(0), bench.generate(1)
    other = bench.generate(0, client=b"b")
    heard = bench.scheduler(
        batch(*((s, 0, ids("x")[0], FinishCode.NOT_YET) for s in (one, other, two)))
    )
    assert [[c.request for c in m.items] for m in heard] == [[0, 1], [0]]


def test_a_stop_string_across_tokens_ends_text_ids_and_request_together(bench: Bench) -> None:
    submit = bench.generate(sampling=SamplingParams(max_tokens=20, stop=("END",)))
    heard = bench.tokens(submit, "abENDxyz")
    assert text_of(heard) == "ab"
    final = last_chunk(heard)
    assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, "END")
    num_ids = sum(len(chunk.token_ids) for m in heard for chunk in m.items)
    assert num_ids == len("abEND")
    finishes = [m for m in bench.to_scheduler if isinstance(m, Finish)]
    assert finishes == [Finish(request=submit.request, keep=len("abEND"))]
    # The scheduler's own end of the request is no second one.
    assert bench.scheduler(Ended(request=submit.request, reason=FinishReason.STOP)) == []
    assert len(bench.final_messages(0)) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "last", "told"),
    [
        ({"stop_token_ids": (7,)}, 7, 7),
        ({"stop_token_ids": (0,)}, 0, 0),
        ({"stop_token_ids": (7,)}, EOS, None),
        ({"stop_token_ids": (7, EOS)}, EOS, None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, EOS),
    ],
)
def test_a_stop_token_is_told_unless_it_ends_every_output(
    bench: Bench, asked: Any, last: int, told: int | None, stream: bool
) -> None:
    submit = bench.generate(sampling=SamplingParams(max_tokens=9, **asked), stream=stream)
    bench.tokens(submit, "ab")
    (final,) = bench.scheduler(batch((submit, 2, last, FinishCode.STOP)))[0].items
    assert (final.finish_reason, final.matched_stop) == (FinishReason.STOP, told)


def test_a_stop_token_is_no_reason_where_the_length_is_reached(bench: Bench) -> None:
    submit = bench.generate(sampling=SamplingParams(max_tokens=2, stop_token_ids=(7,)))
    heard = bench.tokens(submit, "ab", code=FinishCode.LENGTH)
    assert last_chunk(heard).matched_stop is None


def test_a_stop_string_in_the_last_token_needs_no_finish(bench: Bench) -> None:
    submit = bench.generate(sampling=SamplingParams(max_tokens=4, stop=("cd",)))
    heard = bench.tokens(submit, "abcd", code=FinishCode.LENGTH)
    assert (text_of(heard), last_chunk(heard).matched_stop) == ("ab", "cd")
    assert not [m for m in bench.to_scheduler if isinstance(m, Finish)]


def test_what_only_looked_like_a_stop_string_is_sent_in_the_end(bench: Bench) -> None:
    submit = bench.generate(sampling=SamplingParams(max_tokens=4, stop=("cdef",)))
    heard = bench.tokens(submit, "abcd", code=FinishCode.LENGTH)
    assert text_of(heard) == "abcd"
    assert last_chunk(heard).finish_reason is FinishReason.LENGTH


def test_a_gap_in_the_outputs_is_the_schedulers_fault(bench: Bench) -> None:
    submit = bench.generate()
    with pytest.raises(Exception, match="output 1 came when 0 was due"):
        bench.scheduler(batch((submit, 1, 5, FinishCode.NOT_YET)))


def test_the_scheduler_may_not_send_anything_else(bench: Bench) -> None:
    with pytest.raises(Exception, match="Heartbeat"):
        bench.scheduler(Heartbeat())


# ---- ends -------------------------------------------------------------------------------------


def test_an_abort_goes_to_the_scheduler_which_ends_the_request(bench: Bench) -> None:
    submit = bench.generate(7, sampling=SamplingParams(max_tokens=9, stop=("bcd",)))
    bench.tokens(submit, "ab")
    assert bench.client(Abort(request=RequestId(7))) == []
    assert bench.to_scheduler[-1] == Abort(request=submit.request)
    heard = bench.scheduler(Ended(request=submit.request, reason=FinishReason.ABORT))
    final = last_chunk(heard)
    assert final.finish_reason is FinishReason.ABORT
    assert final.text == "b"  # held back as the start of a stop string
    assert bench.final_messages(7) == [final]


def test_abort_knows_only_the_clients_own_running_requests(bench: Bench) -> None:
    bench.generate(7)
    before = len(bench.to_scheduler)
    assert bench.client(Abort(request=RequestId(7)), b"b") == []
    assert bench.client(Abort(request=RequestId(8))) == []
    assert len(bench.to_scheduler) == before


def test_a_rejection_is_the_one_final_message(bench: Bench) -> None:
    submit = bench.generate(1)
    rejected = Rejected(request=submit.request, kind="overloaded", text="full")
    assert bench.scheduler(rejected) == [Failed(request=1, kind="overloaded", text="full")]
    assert bench.scheduler(rejected) == []


def test_news_of_an_ended_request_is_dropped(bench: Bench) -> None:
    submit = bench.generate()
    bench.tokens(submit, "a", code=FinishCode.LENGTH)
    assert bench.tokens(submit, "b", first=1) == []
    assert bench.scheduler(Ended(request=submit.request, reason=FinishReason.ABORT)) == []
    assert len(bench.final_messages(0)) == 1


def test_a_number_may_be_used_again_once_its_request_has_ended(bench: Bench) -> None:
    first = bench.generate(5)
    bench.tokens(first, "a", code=FinishCode.LENGTH)
    second = bench.generate(5)
    assert second.request != first.request
    assert bench.tokens(first, "zz", first=1) == []
    assert text_of(bench.tokens(second, "b", code=FinishCode.LENGTH)) == "b"


@pytest.mark.parametrize(
    "message",
    [
        generate(5),
        Tokenize(request=5, text="x", chat=None, add_special_tokens=True),
        Detokenize(request=5, token_ids=np.array([3], np.int32), skip_special_tokens=True),
        Stats(request=RequestId(5)),
        FlushCache(request=RequestId(5)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_number_in_use_does_not_end_the_call_that_uses_it(bench: Bench, message: Any) -> None:
    """Answering under that number ended the running call for its client."""
    submit = bench.generate(5)
    (failed,) = bench.client(message)
    assert (failed.request, failed.kind) == (None, "protocol")
    bench.tokens(submit, "a", code=FinishCode.LENGTH)
    assert len(bench.final_messages(5)) == 1


def test_two_clients_may_use_the_same_numbers(bench: Bench) -> None:
    bench.generate(0, client=b"a")
    bench.generate(0, client=b"b")


def test_a_shutdown_tells_everybody_who_waits(bench: Bench) -> None:
    bench.generate(1)
    bench.generate(2, client=b"b")
    bench.client(Stats(request=RequestId(9)), b"c")
    bench.to_clients.clear()
    bench.core.shut_down("worker-0 died")
    bench.take()
    assert bench.to_clients == [
        (client, Failed(request=number, kind="died", text="worker-0 died"))
        for client, number in ((b"a", 1), (b"b", 2), (b"c", 9))
    ]


# ---- clients that go away ---------------------------------------------------------------------


def test_a_client_that_is_gone_loses_its_requests_and_nobody_elses(bench: Bench) -> None:
    mine, other = bench.generate(0), bench.generate(0, client=b"b")
    bench.core.on_client_gone(b"a")
    bench.take()
    assert bench.to_scheduler[-1] == Abort(request=mine.request)
    assert bench.forgotten == [b"a"]
    assert bench.tokens(mine, "a") == []
    assert text_of(bench.tokens(other, "a")) == "a"
    assert bench.scheduler(Ended(request=mine.request, reason=FinishReason.ABORT)) == []


def test_a_silent_client_is_let_go_and_told_in_case_it_still_listens(bench: Bench) -> None:
    """A client that was only stopped waited for ever for the requests it had lost."""
    submit = bench.generate(0)
    for _ in range(CLIENT_SILENCE_TICKS):
        bench.core.tick()
    bench.take()
    assert bench.forgotten == []
    bench.core.tick()
    bench.take()
    assert bench.forgotten == [b"a"]
    assert [m for m in bench.to_scheduler if isinstance(m, Abort)] == [
        Abort(request=submit.request)
    ]
    (final,) = bench.final_messages(0)
    assert final.kind == "aborted"


def test_a_heartbeat_keeps_a_client(bench: Bench) -> None:
    bench.generate(0)
    for _ in range(3 * CLIENT_SILENCE_TICKS):
        bench.core.tick()
        bench.client(Hello())
    assert bench.forgotten == []


# ---- the end of the server --------------------------------------------------------------------


def test_a_server_that_drains_refuses_new_requests_and_ends_the_others(bench: Bench) -> None:
    submit = bench.generate(0, sampling=SamplingParams(max_tokens=2))
    bench.core.drain()
    for client in (b"a", b"new"):
        (failed,) = bench.client(generate(1), client)
        assert (failed.request, failed.kind) == (1, "shutting_down")
        assert "is being shut down" in failed.text
        assert bench.client(Hello(), client)
        assert bench.client(
            Tokenize(request=2, text="ab", chat=None, add_special_tokens=False), client
        )
    assert bench.core.num_requests == 1
    bench.tokens(submit, "ab", code=FinishCode.LENGTH)
    assert bench.core.num_requests == 0


def test_a_request_whose_text_is_being_converted_is_one_that_runs(bench: Bench) -> None:
    assert bench.client(long_chat(1)) == []
    bench.core.drain()
    assert bench.core.num_requests == 1
    convert(bench)
    assert bench.core.num_requests == 1
    assert isinstance(bench.to_scheduler[-1], Submit)


def test_what_is_converted_after_the_end_was_told_is_nobodys(bench: Bench) -> None:
    """Its client had its final message, and would get a second one."""
    bench.client(long_chat(1))
    bench.core.shut_down("over")
    bench.take()
    convert(bench)
    assert [m.kind for m in bench.final_messages(1)] == ["died"]
    assert bench.core.num_requests == 0


# ---- what is refused --------------------------------------------------------------------------

BAD = {
    "no prompt": (generate(1, text=None), "one of"),
    "two prompts": (generate(1, text="a", chat={"messages": []}), "one of"),
    "an empty prompt": (generate(1, text=""), "empty"),
    "no ids": (generate(1, token_ids=np.array([], np.int32)), "empty"),
    "a negative id": (generate(1, token_ids=np.array([-1], np.int32)), "-1 is outside"),
    "an id too high": (generate(1, token_ids=np.array([259], np.int32)), "259 is outside"),
    "a prompt too long": (generate(1, text="x" * MAX_SEQ_LEN), "shorten it"),
    "an output too long": (
        generate(1, sampling=SamplingParams(max_tokens=MAX_SEQ_LEN)),
        "together 69",
    ),
    "an absurdly long text": (
        generate(1, text="x" * (MAX_CHARS_PER_TOKEN * MAX_SEQ_LEN + 1)),
        "characters",
    ),
    "a bad temperature": (generate(1, sampling=SamplingParams(temperature=-1.0)), "temperature"),
    "an empty stop": (generate(1, sampling=SamplingParams(stop=("",))), "stop"),
    "no time": (generate(1, timeout_s=0.0), "timeout_s"),
    "no number for a time": (generate(1, timeout_s=float("nan")), "timeout_s"),
    "a chat without messages": (generate(1, chat={}), ""),
    "a chat of nonsense": (generate(1, chat={"messages": [5]}), ""),
    "a bad id to show": (
        Detokenize(request=1, token_ids=np.array([259], np.int32), skip_special_tokens=True),
        "259 is outside",
    ),
    "too many ids to show": (
        Detokenize(
            request=1,
            token_ids=np.zeros(MAX_CHARS_PER_TOKEN * MAX_SEQ_LEN + 1, np.int32),
            skip_special_tokens=True,
        ),
        "token ids",
    ),
    "nothing to tokenize": (
        Tokenize(request=1, text=None, chat=None, add_special_tokens=True),
        "one of",
    ),
    "a message of the scheduler's": (
        Rejected(request=RequestId(1), kind="request", text=""),
        "may not send Rejected",
    ),
}


FAULTS = {
    "no ids": ("request", "prompt"),
    "an id too high": ("request", "prompt"),
    "a prompt too long": ("too_long", "prompt"),
    "an output too long": ("too_long", "max_tokens"),
    "an absurdly long text": ("too_long", "prompt"),
    "a bad temperature": ("request", "temperature"),
    "an empty stop": ("request", "stop"),
    "no time": ("request", "timeout_s"),
    "a chat of nonsense": ("request", "messages"),
    "a bad id to show": ("request", "token_ids"),
    "too many ids to show": ("too_long", "token_ids"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_refusal_says_which_field_is_at_fault_and_what_is_too_long(
    bench: Bench, name: str
) -> None:
    (failed,) = bench.client(BAD[name][0])
    assert (failed.kind, failed.field) == FAULTS[name]


@pytest.mark.parametrize(("message", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_call_is_answered_and_leaves_nothing(bench: Bench, message: Any, says: str) -> None:
    (failed,) = bench.client(message)
    assert isinstance(failed, Failed)
    assert failed.request == 1
    assert says in failed.text
    assert bench.to_scheduler == []
    bench.generate(1)  # the number is free


def test_text_that_the_model_has_no_ids_for_is_refused() -> None:
    """The tokenizer of another model knew more ids than the model had rows, and the worker died."""
    bench = Bench(vocab_size=50)
    (failed,) = bench.client(generate(1, text="z"))
    assert "outside the vocabulary" in failed.text


GARBAGE = {
    "nothing": b"",
    "noise": b"\xff\xfe\x00garbage",
    "half a frame": frame_of(generate())[:-7],
    "no list": msgpack.packb({"a": 1}),
    "no message": msgpack.packb([VERSION, "c", 0, 0, 9999]),
    "another version": msgpack.packb([VERSION + 1, "c", 0, 0, 1]),
    "wrong types": msgpack.packb([VERSION, "c", 0, 0, 3, "text"]),
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_answered_and_harms_no_request(bench: Bench, frame: bytes) -> None:
    submit = bench.generate(0)
    (failed,) = bench.client(frame)
    assert (failed.request, failed.kind) == (None, "protocol")
    assert bench.client(frame, b"other")
    assert text_of(bench.tokens(submit, "ok", code=FinishCode.LENGTH)) == "ok"
    assert len(bench.final_messages(0)) == 1


def test_a_fault_of_ours_fails_one_call_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submit = bench.generate(0)
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "encode", lambda *_: 1 / 0)
        (failed,) = bench.client(generate(1))
    assert (failed.request, failed.kind) == (1, "died")
    assert "ZeroDivisionError" in failed.text
    assert "failed" in caplog.text
    assert text_of(bench.tokens(submit, "ok")) == "ok"
