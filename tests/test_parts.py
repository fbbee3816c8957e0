"""Parts that go by a name: found when asked for, and named when they are missing."""

import sys
from pathlib import Path

import pytest

from tensorprobe.errors import BadUsage, MissingDependency
from tensorprobe.parts import NamedParts


def test_a_part_is_imported_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colourful_part.py").write_text("COLOUR = 'red'\n")
    monkeypatch.syspath_prepend(tmp_path)
    parts = NamedParts("colour", {"plain": "json"})
    parts.register("red", "colourful_part")
    parts.register("red", "colourful_part")  # its package was imported twice
    assert list(parts) == ["plain", "red"]
    assert "colourful_part" not in sys.modules
    assert parts.module("red").COLOUR == "red"


def test_a_name_belongs_to_one_module() -> None:
    parts = NamedParts("colour", {"plain": "json"})
    with pytest.raises(BadUsage, match=r"colour 'plain' is json already: give csv another name"):
        parts.register("plain", "csv")


def test_an_unknown_name_is_told_what_is_there() -> None:
    parts = NamedParts("colour", {"plain": "json", "red": "csv"})
    expected = r"colour='plane': expected one of plain, red. Did you mean 'plain'\?"
    with pytest.raises(BadUsage, match=expected):
        parts.module("plane")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("tensorprobe.nowhere.part", "tensorprobe.nowhere, which is not installed. Install all"),
        ("no_such_package.part", "no_such_package, which is not installed. Install the package"),
    ],
)
def test_a_missing_part_is_named(module: str, text: str) -> None:
    with pytest.raises(MissingDependency, match=f"colour='red' needs {text}"):
        NamedParts("colour", {"red": module}).module("red")


def test_what_a_part_misses_itself_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hungry_part.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        NamedParts("colour", {"red": "hungry_part"}).module("red")
