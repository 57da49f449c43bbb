"""Errors as text that PostgreSQL takes."""

import pytest

from sqla_jobs.worker.failure import LIMIT, describe, forget_frames, storable


def caught(error: BaseException) -> BaseException:
    """The error, raised."""
    try:
        raise error
    except BaseException as raised:
        return raised


class Broken(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")

    def __repr__(self) -> str:
        raise KeyboardInterrupt


def test_the_first_line_is_the_class_and_its_message() -> None:
    text = describe(caught(ValueError("too many\nlines")))

    assert text.startswith("ValueError: too many\nlines\n")
    assert "test_failure.py" in text


def test_an_error_without_a_message_is_its_class() -> None:
    assert describe(caught(KeyError())).splitlines()[0] == "KeyError"


def test_an_error_that_cannot_be_printed_still_has_its_class() -> None:
    assert describe(caught(Broken())).startswith("Broken: <its text cannot be made>")


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    assert describe(ValueError("x")) == "ValueError: x"


@pytest.mark.parametrize(
    ("given", "stored"),
    [("a\0b", "a\ufffdb"), ("a\ud800b", "a?b"), ("ünï", "ünï"), ("", "")],
)
def test_what_postgresql_refuses_is_replaced_and_the_rest_stays(given: str, stored: str) -> None:
    assert storable(given) == stored


def test_a_long_text_is_cut_on_a_character_boundary() -> None:
    text = storable("é" * LIMIT)

    assert len(text.encode()) <= LIMIT
    assert text.endswith(" ...")
    assert set(text.removesuffix(" ...")) == {"é"}


def test_a_deep_recursion_keeps_its_innermost_frames_only() -> None:
    def dig(depth: int) -> None:
        if depth == 0:
            raise ValueError("bottom")
        dig(depth - 1)

    try:
        dig(500)
    except ValueError as error:
        text = describe(error)

    assert len(text.encode()) <= LIMIT
    assert "raise ValueError" in text


class Odd(Exception):
    """As a cause it cannot even be asked whether it is there."""

    def __bool__(self) -> bool:
        raise SystemExit("in __bool__")


class Secretive(Exception):
    """Nothing may be asked of it, and nothing set."""

    def __getattribute__(self, name: str) -> object:
        raise SystemExit("in __getattribute__")

    def __setattr__(self, name: str, value: object) -> None:
        raise SystemExit("in __setattr__")


class Lying(Exception):
    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise KeyboardInterrupt


def caused(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


def made(which: str) -> BaseException:
    """Made here: pytest looks at what a test is parametrized with."""
    match which:
        case "odd cause":
            return caused(ValueError("x"), Odd())
        case "secretive":
            return caught(Secretive())
        case "lying":
            return caught(Lying())
        case _:
            return caused(ValueError("x"), Secretive())


@pytest.mark.parametrize("which", ["odd cause", "secretive", "lying", "secretive cause"])
def test_an_error_whose_attributes_raise_is_described_and_let_go(which: str) -> None:
    error = made(which)

    text = describe(error)
    forget_frames(error)

    assert text.partition(":")[0].splitlines()[0] == type(error).__qualname__
    assert vars(BaseException)["__traceback__"].__get__(error) is None
