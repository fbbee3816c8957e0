"""Calls on what is no number of the model: memory that nobody has written to, as a pipeline makes
them to learn shapes, and objects that ranks send each other. No torch.

What calls on unwritten memory give is arbitrary, on healthy sides too. Only calls are meant that
are given such memory, weights, and nothing else; what an optimizer is given is compared all the
same.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from tensorprobe.collectives.links import is_communication
from tensorprobe.comparing.align import content, is_constant
from tensorprobe.replay.kinds import api_of

if TYPE_CHECKING:
    from tensorprobe.comparing.measure import TensorPair
    from tensorprobe.comparing.scene import Node
    from tensorprobe.records import Call

# Of these, one arbitrary input is enough: nothing can be masked out by another.
_SPOILT_BY_ONE = {
    *("add", "sub", "subtract", "rsub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy_with_logits"),
}
# Inside these torch.distributed sends the bytes of a pickled object: times, names of hosts.
_OF_OBJECTS = re.compile(
    r"distributed_c10d\.py:\d+ in "
    r"(\w+_object|\w+_object_list|_object_to_tensor|_tensor_to_object)\b"
)
_Content = tuple[int, Hashable]  # a side, and what it has


def calls_on_unwritten(nodes: Sequence[Node], forward: dict[int, int]) -> set[int]:
    """The nodes whose results are made of memory that nobody wrote to; `forward` has the forward
    call of a backward one."""
    weights = {
        key for node in nodes for row in node.inputs if row.role == "parameter" for key in _of(row)
    }
    arbitrary: set[_Content] = set()
    seen: set[_Content] = set()
    found: set[int] = set()
    for node in nodes:
        outputs = {key for row in node.pair.tensors if row.role == "output" for key in _of(row)}
        if node.op_kind == "uninitialised":
            arbitrary |= outputs - seen  # else it has what was there before, which may be in use
        elif forward.get(node.i) in found or _is_made_of(node, arbitrary, weights):
            found.add(node.i)
            arbitrary |= outputs
        seen |= {key for row in node.pair.tensors for key in _of(row)} - arbitrary
    return found


def is_of_objects(call: Call) -> bool:
    """Whether a call is on an object that is sent to other ranks."""
    return any(map(_OF_OBJECTS.search, call.stack))


def _is_made_of(node: Node, arbitrary: set[_Content], weights: set[_Content]) -> bool:
    """Whether a call is given arbitrary memory, and nothing else but weights."""
    name = node.call.name
    if not node.is_paired or name.startswith("Optimizer.") or is_communication(name):
        return False
    if any(row.role != "output" for row in node.outputs):
        return False  # it writes to some of what it is given
    given = [
        row
        for row in node.inputs
        # weights of one number are as good: those of a norm begin so
        if row.role == "input" and not (_of(row) & weights or _is_one_number(row))
    ]
    # one program: what is arbitrary on one side is so on the other
    enough = any if api_of(node.call.op) in _SPOILT_BY_ONE else all
    return bool(given) and enough(_of(row) & arbitrary for row in given)


def _is_one_number(row: TensorPair) -> bool:
    return all(r is not None and is_constant(r) for r in (row.actual, row.expected))


def _of(row: TensorPair) -> set[_Content]:
    """What each side has, but for one number throughout: many calls make that."""
    records = [(side, r) for side, r in enumerate((row.actual, row.expected)) if r is not None]
    return {
        (side, key) for side, r in records if not is_constant(r) and (key := content(r)) is not None
    }
