"""Conversions beside the main thread, and whose turn it is."""

from runtime.messages import Tokenize
from runtime.transport import Poller
from tokenizer_proc.jobs import Job, JobQueue, JobThread
from tokenizer_proc.texts import TextCall


def job(client: bytes, number: int) -> Job:
    call = Tokenize(request=number, text=str(number), chat=None, add_special_tokens=True)
    return Job(client, call, arrival=number)


def test_clients_take_turns_whatever_each_has_waiting() -> None:
    queue = JobQueue()
    for number in range(4):
        queue.put(job(b"a", number))
    queue.put(job(b"b", 10))
    taken = [queue.take() for _ in range(2)]
    queue.put(job(b"c", 20))
    taken += [queue.take() for _ in range(4)]
    order = [(j.client, j.call.request) for j in taken if j is not None]
    assert order == [(b"a", 0), (b"b", 10), (b"a", 1), (b"c", 20), (b"a", 2), (b"a", 3)]
    assert queue.take() is None


def test_the_thread_gives_back_what_came_of_each_job() -> None:
    def convert(call: TextCall) -> str:
        if call.request == 1:
            raise ValueError("no")
        return f"text {call.request}"

    thread = JobThread(convert)
    poller = Poller(thread.fileno())
    for number in range(3):
        given = job(b"a", number)
        thread.start(given)
        assert thread.is_busy
        assert poller.wait(10)
        back, outcome = thread.result()
        assert back is given
        assert not thread.is_busy
        assert outcome == f"text {number}" if number != 1 else isinstance(outcome, ValueError)
    assert not poller.wait(0)
