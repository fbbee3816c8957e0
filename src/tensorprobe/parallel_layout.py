"""layout.yaml: how the ranks of a training are laid out, where nothing else says it.

    tp: 2
    pp: 2
    dp: 4
    order: tp-dp-pp     # the first changes fastest from rank to rank

A size that is not given is 1. Without `order` it is the one of Megatron.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from tensorprobe.errors import BadUsage
from tensorprobe.tensors.yaml_files import read_yaml

LAYOUT_FILE = "layout.yaml"
_DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")  # in the order of Megatron
_EXAMPLE = "tp: 2"


class ParallelLayout(NamedTuple):
    """The sizes of each dimension, in the order in which ranks count: the first changes fastest."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def size(self, dimension: str) -> int:
        return dict(self.sizes).get(dimension, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is in each dimension."""
        found = {}
        for dimension, size in self.sizes:
            rank, found[dimension] = divmod(rank, size)
        return found

    def check(self, world_size: int, source: Path) -> None:
        """BadUsage where these sizes are not those of so many ranks."""
        if self.world_size != world_size:
            product = " x ".join(f"{name} {size}" for name, size in self.sizes if size > 1) or "1"
            raise BadUsage(
                f"'{source}': {product} is {self.world_size} ranks, and there are {world_size}. "
                "Correct the sizes"
            )


def read_layout(path: Path) -> ParallelLayout:
    """The layout that a file describes; BadUsage says what is wrong with it."""
    tree = read_yaml(path, "layout file", _EXAMPLE)
    if not isinstance(tree, dict):
        raise BadUsage(f"layout file '{path}' holds a {type(tree).__name__}; expected '{_EXAMPLE}'")
    unknown = [str(key) for key in tree if key not in (*_DIMENSIONS, "order")]
    if unknown:
        raise BadUsage(
            f"layout file '{path}': {unknown[0]!r} is none of {', '.join(_DIMENSIONS)}, order"
        )
    sizes = {name: _size(path, name, tree.get(name, "1")) for name in _DIMENSIONS}
    order = tuple(str(tree.get("order", "-".join(_DIMENSIONS))).replace(" ", "").split("-"))
    wrong = [name for name in order if name not in sizes]
    missing = [name for name, size in sizes.items() if size > 1 and name not in order]
    if wrong or missing or len(set(order)) != len(order):
        raise BadUsage(
            f"layout file '{path}': order {'-'.join(order)[:60]!r} does not name each of "
            f"{', '.join(name for name, size in sizes.items() if size > 1) or 'tp'} once"
        )
    return ParallelLayout(tuple((name, sizes[name]) for name in order))


def _size(path: Path, name: str, text: object) -> int:
    if not (isinstance(text, str) and text.isdecimal() and text.isascii() and 0 < len(text) < 7):
        raise BadUsage(f"layout file '{path}': {name}: {str(text)[:40]!r} is no count of ranks")
    if int(text) < 1:
        raise BadUsage(f"layout file '{path}': {name} is {text}; expected 1 or more")
    return int(text)
