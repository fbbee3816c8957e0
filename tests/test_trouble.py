"""Trouble of ours is told, and ends there; the program's own goes on."""

import pytest

from tensorprobe.trouble import OnTrouble, text_of


def test_an_error_is_told_with_what_it_was_about() -> None:
    told: list[object] = []
    with OnTrouble(lambda *what: told.append(what), "backward", 3):
        raise ValueError("odd")
    ((name, number, error),) = told
    assert (name, number, str(error)) == ("backward", 3, "odd")


def test_nothing_is_told_where_nothing_is_raised() -> None:
    told: list[object] = []
    with OnTrouble(told.append):
        pass
    assert told == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_goes_on(kind: type[BaseException]) -> None:
    told: list[object] = []
    with pytest.raises(kind), OnTrouble(told.append):
        raise kind
    assert told == []


def test_trouble_while_telling_is_not_hidden() -> None:
    def tell(error: Exception) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"), OnTrouble(tell):
        raise ValueError("odd")


def test_the_text_of_an_exception_that_has_none() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert text_of(Silent()) is None
    assert text_of(ValueError("odd")) == "odd"
