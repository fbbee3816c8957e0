"""One name, one thing: files and classes of the package, and files of tests."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "tensorprobe"
# cli/ has a file for each verb, and msprobe/ the paths of msprobe: their names are given.
GIVEN = ("cli/", "msprobe/")
FILES = {
    "watch.py": "for errors, and for overflows",
}
CLASSES = {
    "Call": "a record, and a call that is under way",
    "Place": "of a call under way, and of a culprit",
    "Plan": "of a build, and of a call's arguments",
    "PrecisionDebugger": "both peers call theirs so",
    "Run": "of a backward pass, and of a compiled part",
    "Runs": "of compiled parts, and of elements that lie side by side",
    "_Line": "to a process that replays, and to one that measures",
    "_Thread": "what each follower keeps for a thread",
}
OTHER_PATHS = {"follow/gradients.py"}  # a way through a graph


def files(home: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(home.rglob("*.py")):
        yield path.name, path.relative_to(home).as_posix()


def classes() -> Iterator[tuple[str, str]]:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, path.relative_to(SRC).as_posix()


def twice(named: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, place in named:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_files_have_one_name() -> None:
    """Nor could two test modules of one name be collected together."""
    found = twice(files(TESTS))
    assert {
        name: at for name, at in found.items() if name not in ("__init__.py", "conftest.py")
    } == {}


def test_no_two_files_of_the_package_have_one_name() -> None:
    ours = ((name, place) for name, place in files(SRC) if not place.startswith(GIVEN))
    found = twice(each for each in ours if each[0] not in ("__init__.py", "__main__.py"))
    assert {name: at for name, at in found.items() if name not in FILES} == {}


def test_no_two_classes_of_the_package_have_one_name() -> None:
    found = twice(classes())
    assert {name: at for name, at in found.items() if name not in CLASSES} == {}


def test_path_is_pathlibs() -> None:
    """Nothing else is called so; see the exceptions."""
    other = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(name, ast.Name) and name.id == "Path" for name in names):
                other.add(path.relative_to(SRC).as_posix())
    assert other <= OTHER_PATHS


@pytest.mark.parametrize("exceptions", [FILES, CLASSES], ids=["files", "classes"])
def test_every_exception_has_a_reason_and_is_needed(exceptions: dict[str, str]) -> None:
    found = {**twice(files(SRC)), **twice(classes())}
    useless = [name for name, reason in exceptions.items() if not reason or name not in found]
    assert not useless, f"take these out of the list: {useless}"
