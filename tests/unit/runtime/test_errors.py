"""The tree of errors, and how they cross the wire."""

import pytest

from runtime import errors
from runtime.errors import KINDS, TandemError, from_kind, kind_of

ALL = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TandemError)]
KIND_NAMES = (errors.UserError, errors.PeerError, errors.InternalError)


def test_every_error_is_of_exactly_one_of_the_three_kinds() -> None:
    for cls in ALL:
        if cls is not TandemError:
            assert sum(issubclass(cls, kind) for kind in KIND_NAMES) == 1, cls


def test_the_drawing_shows_every_error_at_its_place() -> None:
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "──" in line]
    names = {line.split("── ")[1].split()[0]: line.index("─") for line in drawn}
    assert set(names) == {cls.__name__ for cls in ALL} - {"TandemError"}
    for cls in ALL:
        if cls in KIND_NAMES:
            assert names[cls.__name__] == min(names.values())


def test_every_wire_kind_comes_back_as_the_same_class_and_text() -> None:
    for kind, cls in KINDS.items():
        error = from_kind(kind, "what happened")
        assert type(error) is cls
        assert str(error) == "what happened"
        assert kind_of(error) == kind


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_has_a_wire_kind(cls: type[TandemError]) -> None:
    assert kind_of(cls("x")) in KINDS


def test_the_users_other_errors_travel_as_request_and_ours_as_died() -> None:
    assert kind_of(errors.ConfigError("x")) == "request"
    assert kind_of(errors.ModelNotFound("x")) == "request"
    assert kind_of(errors.IntegrityError("x")) == "died"


def test_an_unknown_kind_from_a_newer_peer_is_ours() -> None:
    assert type(from_kind("kind-of-tomorrow", "x")) is errors.InternalError


def test_the_errors_are_what_python_users_expect_to_catch() -> None:
    assert issubclass(errors.UserError, ValueError)
    assert issubclass(errors.ConnectionLost, ConnectionError)
    assert issubclass(errors.ProcessDied, RuntimeError)
