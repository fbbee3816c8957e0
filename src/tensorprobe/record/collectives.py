"""With whom a collective or a message speaks: its group, its place in the order, its reduction."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorprobe.follow.naming import ApiName
from tensorprobe.records import Collective
from tensorprobe.store.collective_lines import pack_collective
from tensorprobe.store.lines import CollectiveLine

# Names of one operation, as torch's functions, c10d's operators and the functional ones have them.
_SAME = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
    "_dtensor.shard_dim_alltoall": "shard_dim_alltoall",
}
_COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
        "monitored_barrier",
        "shard_dim_alltoall",
    ]
)
_MESSAGES = ("send", "recv")
_WITH_ROOT = ("broadcast", "scatter", "reduce", "gather")
# The beginnings of names of operators whose results are there once they were waited for.
FUNCTIONAL = ("torch.ops._c10d_functional", "torch.ops.c10d_functional", "torch.ops._dtensor")


def operation_of(api: ApiName) -> str | None:
    """Which collective or message calls of this API are; None where they are neither."""
    if api.prefix not in ("Distributed", "Ops"):
        return None
    name = api.api.rstrip("_")
    name = _SAME.get(name, name)
    if name not in _COLLECTIVES and name not in _MESSAGES:
        return None
    return name if api.prefix == "Distributed" or api.api in _SAME else None


class Collectives:
    """Counts the collectives of each group, recorded or not, and says what each one is."""

    def __init__(self) -> None:
        self._counts: dict[Any, itertools.count[int]] = {}

    def of(
        self, api: ApiName, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CollectiveLine | None:
        """What is to be written of this call, which is about to run; None where it is no collective
        of a group that this process belongs to."""
        op = operation_of(api)
        if op is None:
            return None
        parameters = _parameters(api, func)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        names = ("group", "process_group", "group_name")
        group = group_of(next((given[name] for name in names if name in given), None))
        if group is None:
            return None
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        by_place = api.op.startswith("torch.ops.")  # operators know members by their place
        spoken_to = _other_rank(op, given, ranks, by_place)
        tag = given.get("tag", 0) if op in _MESSAGES else None
        key: tuple[Any, ...] = (group.group_name, ranks)
        if op in _MESSAGES:
            me = torch.distributed.get_rank()
            key += (me, spoken_to, tag) if op == "send" else (spoken_to, me, tag)
        reduction = given.get("reduce_op", given.get("op", "SUM" if "op" in parameters else None))
        return pack_collective(
            Collective(
                op=op,
                group=ranks,
                sequence=next(self._counts.setdefault(key, itertools.count())),
                group_name=group.group_name,
                description=getattr(group, "group_desc", "") or "",
                reduce=reduction_name(reduction) if reduction is not None else None,
                root=spoken_to if op in _WITH_ROOT else None,
                peer=spoken_to if op in _MESSAGES else None,
                tag=tag,
                is_async=_is_async(api, op, given),
            )
        )


def _other_rank(
    op: str, given: Mapping[str, Any], ranks: Sequence[int], by_place: bool
) -> int | None:
    """The rank that is the root, or at the other end of a message."""
    if op not in _WITH_ROOT and op not in _MESSAGES:
        return None
    if by_place:
        place = next((given[n] for n in ("root_rank", "dst", "src") if n in given), None)
    else:
        rank = next((given[n] for n in ("dst", "src") if given.get(n) is not None), None)
        if rank is not None:
            return int(rank)
        place = next(
            (given[n] for n in ("group_dst", "group_src") if given.get(n) is not None), None
        )
        if place is None and op in ("gather", "scatter"):
            place = 0
    return ranks[place] if place is not None else None


def _is_async(api: ApiName, op: str, given: Mapping[str, Any]) -> bool:
    if api.op.startswith(FUNCTIONAL):
        return True
    if op in _MESSAGES:
        return api.api not in _MESSAGES or api.op.startswith("torch.ops.")
    return bool(given.get("async_op", api.op.startswith("torch.ops.")))  # defaults are left out


def _parameters(api: ApiName, func: Any) -> tuple[str, ...]:
    if api.op.startswith("torch.ops."):
        return _parameters_of_operator(api.op)
    return tuple(inspect.signature(func).parameters)


@functools.lru_cache(maxsize=256)
def _parameters_of_operator(op: str) -> tuple[str, ...]:
    namespace, name, *_ = op.removeprefix("torch.ops.").split(".")
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}")
    return tuple(argument.name for argument in schemas[0].arguments) if schemas else ()


def group_of(value: Any) -> Any:
    """The process group that an argument stands for: itself, its name, None for that of all ranks,
    or what operators are given. None where it is no group of this process."""
    distributed: Any = torch.distributed
    if value is None:
        return distributed.group.WORLD
    if isinstance(value, str):
        return distributed.distributed_c10d._resolve_process_group(value)
    if isinstance(value, torch.ScriptObject):
        unbox = getattr(distributed.ProcessGroup, "unbox", None)  # from 2.4 on
        return unbox(value) if unbox is not None else None
    return value if isinstance(value, distributed.ProcessGroup) else None


def reduction_name(value: Any) -> str:
    """SUM, AVG, ..., of a ReduceOp, of what operators are given, or of the word for it."""
    if isinstance(value, str):
        return value.upper()
    reductions: Any = torch.distributed.ReduceOp.RedOpType
    if isinstance(value, torch.ScriptObject):
        value = reductions(value.op())  # type: ignore[attr-defined]
    elif not hasattr(value, "name"):  # a ReduceOp, around one of these
        value = value.op
    return str(value.name)
