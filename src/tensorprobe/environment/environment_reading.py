"""The facts of an environment, from a capture, a file of `tp.env`, or another tool's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorprobe.errors import BadArtefact, BadUsage
from tensorprobe.parts import NamedParts
from tensorprobe.record.facts import MASK, hides_all, mask_arguments, mask_items, mask_value
from tensorprobe.store.native import open_run, root_of
from tensorprobe.store.program_file import read_program
from tensorprobe.tensors.json_files import read_json
from tensorprobe.tensors.opening import open_named

# The module of each: `recognises(path)`, and `read_facts(path)`.
ENVIRONMENT_FILES = NamedParts(
    "environment file", {"msprobe": "tensorprobe.peers.msprobe.msprobe_config_check"}
)


def read_environment(path: Path) -> dict[str, Any]:
    """The facts that a path holds, with secrets masked; BadArtefact says what is wrong with it."""
    if not path.exists():
        raise BadUsage(f"no such file or folder: '{path}'")
    if path.is_dir():
        try:
            steps, facts = open_run(path, lambda gap: None)
            rank = min((step.parent for step in steps), key=lambda folder: folder.name)
            return _masked({**facts, **read_program(rank, root_of(path))})
        except ValueError as error:
            raise BadArtefact(f"'{path}' has facts that are damaged: {error}"[:300]) from None
    if path.suffix == ".json":
        try:
            tree = read_json(open_named(path), path)
        except ValueError as error:
            raise BadArtefact(f"'{path}' is no JSON: {error}"[:300]) from None
        if not isinstance(tree, dict) or not ("python" in tree or "torch" in tree):
            raise BadArtefact(
                f"'{path}' holds no facts of an environment: expected a file of "
                "tensorprobe env collect, or a capture"
            )
        return _masked(tree)
    for name in ENVIRONMENT_FILES:
        reader = ENVIRONMENT_FILES.module(name)
        if reader.recognises(path):
            facts = reader.read_facts(path)
            return _masked(facts)
    raise BadArtefact(
        f"'{path}' is neither a capture, nor a file of tensorprobe env collect, nor a package of "
        "msprobe config_check"
    )


def _masked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same without secrets: files of others may have some."""
    made = {key: _masked_value(key, value) for key, value in facts.items()}
    if isinstance(made.get("command"), list):
        made["command"] = mask_arguments([str(word) for word in made["command"]])
    return made


def _masked_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        is_hidden = hides_all(name)
        return {
            key: _masked_value(name if is_hidden else str(key), each) for key, each in value.items()
        }
    if isinstance(value, list):
        held = name if hides_all(name) else ""
        return [_masked_value(held, each) for each in mask_items(value)]
    if type(value) in (int, float):
        return MASK if hides_all(name) else value
    return mask_value(name, value) if isinstance(value, str) else value
