"""Every error this project raises, in one tree.

    TandemError
    ├── UserError            what the user gave is refused at the boundary; it harms nobody else
    │   ├── ConfigError      an option is unknown, out of range or does not fit another
    │   ├── ModelNotFound    the look-up tried every place and found no model
    │   ├── RequestError     a request can't be served as asked
    │   │   └── TooLong      its prompt, or that and its output, is longer than the context
    │   ├── Overloaded       the queue is full: try again later
    │   ├── ShuttingDown     the server takes no new request: ask another
    │   └── RequestAborted   the request was aborted before it could end by itself
    ├── PeerError            the other end of a wire is gone or broke the protocol
    │   ├── ProtocolError    an undecodable message, a gap in the numbers, an old epoch
    │   └── ConnectionLost   the server went away or stopped answering
    └── InternalError        ours: the process stops and the supervisor acts
        ├── IntegrityError   check_integrity() found an invariant broken
        └── ProcessDied      a process of the server ended, with its last words

The text of an error says what was given, the limit, and the way out.
"""


class TandemError(Exception):
    """Anything that this project raises on purpose."""


class UserError(TandemError, ValueError):
    """What the user gave can't be used."""


class ConfigError(UserError):
    """An option is unknown, out of range, or does not fit another."""


class ModelNotFound(UserError):
    """No model under that name in any place that was tried."""


class RequestError(UserError):
    """A request can't be served as asked.

    field: what is at fault, if it is one thing: a field of SamplingParams, "prompt", "messages" or
    another argument of the call.
    """

    def __init__(self, text: str = "", field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class TooLong(RequestError):
    """The prompt, or the prompt and the output asked for, is longer than the context."""


class Overloaded(UserError):
    """The waiting queue is full."""


class ShuttingDown(UserError):
    """The server is being shut down: what runs may end, nothing new begins."""

    def __init__(self, text: str = "the server is being shut down: ask another, or later") -> None:
        super().__init__(text)


class RequestAborted(UserError):
    """The request was aborted (by the client, its deadline or a shutdown) before it ended."""


class PeerError(TandemError):
    """The other end of a wire is gone or misbehaves."""


class ProtocolError(PeerError):
    """A message that can't be decoded, a gap in the sequence numbers, an old epoch."""


class ConnectionLost(PeerError, ConnectionError):
    """The server closed the connection or stopped answering."""


class InternalError(TandemError):
    """A fault of ours."""


class IntegrityError(InternalError):
    """An invariant of docs/architecture.md does not hold."""


class ProcessDied(InternalError, RuntimeError):
    """A process of the server ended; the text names it and gives its last words."""


#: How an error that answers a request is named on the wire.
KINDS: dict[str, type[TandemError]] = {
    "too_long": TooLong,
    "request": RequestError,
    "overloaded": Overloaded,
    "shutting_down": ShuttingDown,
    "aborted": RequestAborted,
    "died": ProcessDied,
    "protocol": ProtocolError,
}


def kind_of(error: TandemError) -> str:
    """The wire name of `error`; "died" for what is ours."""
    for kind, cls in KINDS.items():
        if isinstance(error, cls):
            return kind
    return "request" if isinstance(error, UserError) else "died"


def from_kind(kind: str, text: str, field: str | None = None) -> TandemError:
    """The error that the wire name `kind` stands for; `field` is a RequestError's."""
    cls = KINDS.get(kind, InternalError)
    return cls(text, field) if issubclass(cls, RequestError) else cls(text)
