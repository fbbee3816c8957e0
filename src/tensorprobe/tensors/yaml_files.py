"""YAML files that a user writes by hand: mappings of names, sizes of a parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorprobe.errors import BadArtefact, BadUsage, MissingDependency
from tensorprobe.tensors.opening import open_named, read_text

# As much as PyYAML reads in a few seconds.
_MAX_NBYTES = 4 << 20
_MAX_NAMES = 100_000
_MAX_DEPTH = 20


def read_yaml(path: Path, what: str, expected: str) -> Any:
    """The content of a YAML or JSON file, with all that is no mapping or list as text.

    `what` is it called in an error, and `expected` is one line of it.
    """
    try:
        text = read_text(open_named(path), path, _MAX_NBYTES)
    except FileNotFoundError:
        name = what.removesuffix(" file")
        kind = f"`{name}` takes a YAML or JSON file of {expected}"
        raise BadUsage(f"no file '{path}': {kind}") from None
    return _parse(path, text, what, expected)


def _parse(path: Path, text: bytes, what: str, expected: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingDependency("PyYAML", f"a {what}", "yaml") from None

    class Loader(yaml.BaseLoader):
        """Makes text of all that is no mapping or list, and follows no alias: one within another
        within another is more than any memory holds."""

        depth = nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            self.nodes += 1
            problem = (
                ("an alias" if isinstance(event, yaml.AliasEvent) else "")
                or (f"nested deeper than {_MAX_DEPTH}" if self.depth > _MAX_DEPTH else "")
                or (f"more than {_MAX_NAMES} names" if self.nodes > _MAX_NAMES else "")
            )
            if problem:
                raise BadArtefact(
                    f"{what} '{path}', line {event.start_mark.line + 1}: {problem}; "
                    f"expected '{expected}'"
                )
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise BadUsage(f"{what} '{path}' is not YAML: {reason}") from error
