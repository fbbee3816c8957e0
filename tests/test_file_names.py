"""Files of tests have names of their own: two modules of one name are not collected together."""

from collections import Counter
from pathlib import Path

OFTEN = {"__init__.py", "conftest.py"}


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name not in OFTEN] == []
