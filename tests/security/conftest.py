"""Recorded once a session: what attacks are written into, and the Pythons that they are run in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_captures import Base, record_all, take_apart
from victims import Sandbox, Victim


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each level, and for each of the peers' layouts."""
    folder = tmp_path_factory.mktemp("recorded")
    record_all(folder)
    return folder


@pytest.fixture(scope="session")
def base(recorded: Path) -> Base:
    return take_apart(recorded / "mix")


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


@pytest.fixture(scope="session")
def careless() -> Iterator[Victim]:
    """The same by `python -O`, which takes asserts away."""
    victim = Victim("-O")
    yield victim
    victim.close()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "sandbox")
