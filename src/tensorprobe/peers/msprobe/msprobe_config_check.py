"""The packages of msprobe's config_check: zip archives of JSON files, read as facts."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tensorprobe.errors import BadArtefact
from tensorprobe.record.facts import ENVIRONMENT_VARIABLES
from tensorprobe.tensors.json_files import check_depth
from tensorprobe.tensors.opening import open_named
from tensorprobe.tensors.tensor_files import archive_entry, check_directory

_MAX_DIRECTORY_NBYTES = 16 << 20
_MAX_ENTRY_NBYTES = 16 << 20
_MAX_NBYTES = 32 << 20  # of all; in memory they are ten times as large
_MAX_BRACKETS = 1_000_000
# It keeps the whole environment; these are compared: ours, and those of the vendors.
_KNOWN = frozenset(ENVIRONMENT_VARIABLES.split())
_FAMILY = re.compile(
    r"(NCCL|HCCL|LCCL|ASCEND|CUDA|CUBLAS|PYTORCH|TORCH|NPU|OMP|MKL|NVTE|ONEDNN|DNNL|ATB|INF_NAN)_"
)
_BY_STEP = re.compile(r"(dataset|weights)/step(\d+)/rank(\d+)/\w+\.json")
_RANDOM = re.compile(r"random/rank(\d+)\.json")
_NAMES = {"dataset": "data_statistics", "weights": "weight_statistics"}


def recognises(path: Path) -> bool:
    """Whether a file is such a package, by its name and its table of contents."""
    if path.suffix != ".zip":
        return False
    with open_named(path) as file:
        if file.read(2) != b"PK":
            return False
        check_directory(path, file, _MAX_DIRECTORY_NBYTES)
        try:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False
    known = ("env", "pip")
    return any(n in known or n.startswith(("hyperparameters/", "dataset/")) for n in names)


def read_facts(path: Path) -> dict[str, Any]:
    """Its environment variables, packages, hyperparameters, statistics of data and weights."""
    facts: dict[str, Any] = {}
    total = brackets = 0
    try:
        with open_named(path) as file, zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                content = archive_entry(archive, name, _MAX_ENTRY_NBYTES)
                total += len(content)
                brackets += content.count(b"[") + content.count(b"{")
                if total > _MAX_NBYTES or brackets > _MAX_BRACKETS:
                    raise BadArtefact(
                        f"'{path}' unpacks to more than {_MAX_NBYTES} bytes, or {_MAX_BRACKETS} "
                        "objects and lists"
                    )
                _add(facts, name, content)
    except (
        ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError, EOFError,
        RecursionError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise BadArtefact(f"'{path}' is damaged: {type(error).__name__}: {error}"[:300]) from error
    return facts


def _add(facts: dict[str, Any], name: str, content: bytes) -> None:
    if name == "env":
        facts["environment"] = {
            key: value
            for key, value in _object(content).items()
            if key in _KNOWN or _FAMILY.match(key)
        }
    elif name == "pip":
        lines = (line.partition("=") for line in content.decode(errors="replace").splitlines())
        facts["installed"] = {package: version for package, mark, version in lines if mark}
    elif name.startswith("hyperparameters/") and name.endswith(".json"):
        kind = name.removeprefix("hyperparameters/hyperparameters_").removesuffix(".json")
        facts.setdefault("hyperparameters", {})[kind[:80]] = _object(content)
    elif found := _BY_STEP.fullmatch(name):
        place = facts.setdefault(_NAMES[found[1]], {})
        place[f"step{found[2]}.rank{found[3]}"] = _object(content)
    elif found := _RANDOM.fullmatch(name):
        calls = facts.setdefault("random_calls", {}).setdefault(f"rank{found[1]}", {})
        for operator, entries in _object(content).items():
            if isinstance(entries, list):
                numbers = [e.get("count") for e in entries if isinstance(e, dict)]
                calls[operator] = sum(n for n in numbers if type(n) is int)


def _object(content: bytes) -> dict[str, Any]:
    tree = json.loads(content)  # which knows NaN and Infinity, as they are written there
    check_depth(tree)
    if not isinstance(tree, dict):
        raise ValueError(f"a {type(tree).__name__} where an object should be")
    return tree
