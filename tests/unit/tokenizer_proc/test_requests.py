"""One output's text, ids and log probabilities end at the same token."""

from typing import Any

import numpy as np
import pytest

from runtime.logprobs import Logprobs, contents
from runtime.messages import Chunk, FinishCode, FinishReason, Generate
from runtime.sampling import SamplingParams
from runtime.types import RequestId
from tests.fakes import byte_tokenizer
from tokenizer_proc.requests import Credit, LiveRequest
from tokenizer_proc.stops import StopMatcher

TOKENIZER = byte_tokenizer()
EOS = 2


def live(stream: bool = True, **asked: Any) -> LiveRequest:
    sampling = SamplingParams(**asked)
    generate = Generate(
        request=0, text=None, token_ids=None, chat=None, sampling=sampling, stream=stream,
        timeout_s=None,
    )  # fmt: skip
    return LiveRequest(
        id=RequestId(0),
        client=b"a",
        generate=generate,
        prompt_ids=np.array([5], np.int32),
        decoder=TOKENIZER.decoder(sampling.skip_special_tokens),
        stops=StopMatcher(sampling.stop) if sampling.stop else None,
        credit=Credit(9),
    )


def say(request: LiveRequest, ids: list[int], last: FinishCode) -> Chunk:
    """Everything in one chunk: the ids up to a stop string or to the last, which ends with `last`;
    each with a log probability.
    """
    for index, token in enumerate(ids):
        code = last if index == len(ids) - 1 else FinishCode.NOT_YET
        one = np.array([1], np.int32)
        told = Logprobs(
            counts=one,
            token_ids=one * token,
            values=np.array([-1.0], np.float32),
            spelled=TOKENIZER.spell(one * token),
        )
        if (stop := request.push(token, code, told)) is not None:
            return request.take_chunk(FinishReason.STOP, stop)
    return request.take_chunk(*request.finish(last))


def ids(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER.encode(text)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "text", "ends"),
    [
        ({"stop": "cd"}, "ab", "abcd"),
        ({"stop": "cd", "include_stop_str_in_output": True}, "abcd", "abcd"),
        ({"stop": "bc", "min_tokens": 2}, "abcdef", "abcdef"),
        ({"stop": ("bc", "ef"), "min_tokens": 2}, "abcd", "abcdef"),
        ({"stop": "ab", "min_tokens": 1}, "abcdef", "abcdef"),
        ({"stop": "a", "min_tokens": 1}, "abcdef", "abcdef"),
        ({"stop": "b", "min_tokens": 1}, "a", "ab"),
    ],
    ids=str,
)
def test_a_stop_string_ends_all_at_the_token_that_completes_it(
    asked: dict[str, Any], text: str, ends: str, stream: bool
) -> None:
    chunk = say(live(stream, **asked), ids("abcdef"), FinishCode.LENGTH)
    assert (chunk.text, chunk.token_ids.tolist()) == (text, ids(ends))
    assert chunk.logprobs is not None
    assert chunk.logprobs.token_ids.tolist() == ids(ends)
    assert b"".join(chunk.logprobs.spelled).decode() == ends


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("last", "shown"), [(EOS, "</s>"), (ids("z")[0], "z")])
def test_the_token_that_ended_an_output_is_in_its_text_only_if_asked_for(
    last: int, shown: str, include: bool, stream: bool
) -> None:
    request = live(stream, include_stop_str_in_output=include, skip_special_tokens=False)
    chunk = say(request, [*ids("ab"), last], FinishCode.STOP)
    assert chunk.text == ("ab" + shown if include else "ab")
    assert chunk.token_ids.tolist() == [*ids("ab"), last]
    assert chunk.finish_reason is FinishReason.STOP


def test_what_a_stop_token_would_spell_is_no_stop_string() -> None:
    chunk = say(live(stop="bz"), [*ids("ab"), *ids("z")], FinishCode.STOP)
    assert (chunk.text, chunk.matched_stop) == ("ab", None)


def test_contents_are_as_openai_shows_them() -> None:
    told = Logprobs(
        counts=np.array([2, 1], np.int32),
        token_ids=np.array([7, 8, 9], np.int32),
        values=np.array([-0.5, -0.25, -3.0], np.float32),
        spelled=(b"a", b"\xc3", b"\xa9"),
    )
    first, second = contents(told)
    assert first == {
        "token_id": 7, "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [{"token_id": 8, "token": "\ufffd", "logprob": -0.25, "bytes": [0xC3]}],
    }  # fmt: skip
    assert (second["bytes"], second["top_logprobs"]) == ([0xA9], [])
