"""Every name of torch that src touches is in every version that we support."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from versions.torch_names import minor, read_list, touched_by_file

# The file that knows the differences, and the device that needs a newer torch and says so.
KNOWS = ("torch_versions.py", "devices/sim_npu/")
# What a vendor's package adds to torch.
OTHERS = ("torch.npu", "torch.ops.npu")
TOUCHED = {
    file: {name for name in names if not name.startswith(OTHERS)}
    for file, names in touched_by_file().items()
}


def test_the_list_has_every_name() -> None:
    missing = set().union(*TOUCHED.values()) - set(read_list())
    assert not missing, f"run make torch-names: {sorted(missing)}"


@pytest.mark.parametrize("file", [file for file in TOUCHED if not file.startswith(KNOWS)])
def test_a_name_that_some_version_lacks_is_in_torch_versions(file: str) -> None:
    known = read_list()
    lacking = {name: known[name] for name in TOUCHED[file] if known[name] not in (["all"], ["?"])}
    assert not lacking, "torch_versions.py is the place for these"


def test_the_installed_torch_has_them() -> None:
    """Names in C are in no list: they are looked up here, by make test-versions in each."""
    known = read_list()
    names = set().union(*(names for file, names in TOUCHED.items() if not file.startswith(KNOWS)))
    if torch.version.cuda is None:
        names = {name for name in names if not name.startswith("torch._C._cuda")}
    assert [name for name in sorted(names) if not _is_there(name)] == []
    version = minor(torch.__version__)
    listed = [name for name in known if known[name] not in (["?"], []) and _is_ours(name)]
    wrong = [
        name
        for name in listed
        if not name.startswith(("torch._C", "torch.float8", "torch.ops"))
        and _is_there(name) != (known[name] == ["all"] or version in known[name])
    ]
    assert wrong == [], "the list is of other wheels: run make torch-names"


def _is_ours(name: str) -> bool:
    return not name.startswith(OTHERS)


def _is_there(name: str) -> bool:
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ImportError:
            return False
    return True
