"""Checkpoints with a file for each rank, put together: Megatron's mp_rank folders, FSDP's shards.

What cannot be put together without a guess stays by rank, and a note says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensorprobe.checkpoints.pickled_texts import Value
from tensorprobe.checkpoints.same_bytes import have_same_bytes
from tensorprobe.checkpoints.stored_weights import StoredWeight, WeightPart, join
from tensorprobe.checkpoints.torch_checkpoint import FileContent, ShardOf
from tensorprobe.errors import BadArtefact

# How Megatron cuts its weights, by the end of their names; all else is the same on each rank.
_BY_ROWS = re.compile(
    r"(word_embeddings|output_layer|lm_head|linear_qkv|query_key_value|linear_fc1|dense_h_to_4h"
    r"|linear_q_up_proj|linear_kv_up_proj|linear_q_proj|self_attention\.query|key_value|query)"
    r"\.(weight|bias)(\d*)$"
)
_BY_COLUMNS = re.compile(
    r"(linear_proj|attention\.dense|linear_fc2|dense_4h_to_h|self_attn\.o_proj)\.weight(\d*)$"
)
_GATED = re.compile(r"(linear_fc1|dense_h_to_4h)\.(weight|bias)(\d*)$")
_LAYER = re.compile(r"(^|\.)(layers|layer|h|blocks)\.(\d+)(?=\.)")
_MODEL = re.compile(r"model(\d*)\.")
_FLAT = re.compile(r"(^|[._])flat_param(_\d+)?(\.exp_avg|\.exp_avg_sq)?$")


class Rank(NamedTuple):
    """Which part of the model a file has: of how it is cut (tp), and of its stages (pp)."""

    tp: int
    pp: int

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}"


def join_megatron(ranks: Mapping[Rank, FileContent]) -> FileContent:
    """The model that the files of all ranks have together; their optimizer states stay by rank."""
    found = FileContent({}, {}, [], {})
    stages = sorted({rank.pp for rank in ranks})
    cut = sorted({rank.tp for rank in ranks})
    missing = [Rank(t, p) for p in stages for t in cut if Rank(t, p) not in ranks]
    holes = [*range(len(stages))] != stages or [*range(len(cut))] != cut
    if missing or holes:
        what = f"{missing[0]}" if missing else f"one before tp {cut[-1]}, pp {stages[-1]}"
        raise BadArtefact(f"the files of a rank are missing: {what}")
    _add_values(found, {str(rank): content for rank, content in ranks.items()})
    is_gated = _is_gated(found.values)
    layers = _Layers(ranks)
    for stage in stages:
        for key in _all_keys(ranks[Rank(t, stage)] for t in cut):
            shards = {t: ranks[Rank(t, stage)].tensors.get(key) for t in cut}
            is_model = _MODEL.match(key) is not None or "." not in key
            if not is_model or None in shards.values():
                for t, weight in shards.items():
                    if weight is not None:
                        own = f"rank ({Rank(t, stage)}).{key}"
                        found.tensors[own] = weight._replace(key=own)
                continue
            weights = [weight for weight in shards.values() if weight is not None]
            name = layers.global_name(key, stage)
            for own, weight in _join_cut(found, name, weights, is_gated):
                _add_once(found, own, weight, f"stage {stage}")
    return found


def _all_keys(contents: Any) -> list[str]:
    return list(dict.fromkeys(key for content in contents for key in content.tensors))


def _add_values(found: FileContent, ranks: Mapping[str, FileContent]) -> None:
    """Values that all ranks agree on once, and others by rank."""
    by_key: dict[str, dict[str, Value]] = defaultdict(dict)
    for rank, content in ranks.items():
        for key, value in content.values.items():
            by_key[key][rank] = value
    for key, values in by_key.items():
        if len({repr(value) for value in values.values()}) == 1 and len(values) == len(ranks):
            found.values[key] = next(iter(values.values()))
        else:
            found.values.update((f"rank ({rank}).{key}", v) for rank, v in values.items())


def _is_gated(values: Mapping[str, Value]) -> bool:
    return any(values.get(key) is True for key in ("args.swiglu", "args.gated_linear_unit"))


class _Layers:
    """The number of a layer in the model from its number in a stage, which begins at 0 again."""

    def __init__(self, ranks: Mapping[Rank, FileContent]) -> None:
        counts: dict[tuple[int, int], int] = defaultdict(int)  # by chunk and stage
        lowest: dict[tuple[int, int], int] = {}
        for rank, content in ranks.items():
            for key in content.tensors:
                if (layer := _LAYER.search(key)) and (part := _MODEL.match(key)):
                    place = int(part[1] or 0), rank.pp
                    number = int(layer[3])
                    counts[place] = max(counts[place], number + 1)
                    lowest[place] = min(lowest.get(place, number), number)
        self._is_local = len(counts) > 1 and not any(lowest.values())
        begin = 0
        self._begins = {}
        for place in sorted(counts):  # chunk 0 of all stages, then chunk 1
            self._begins[place] = begin
            begin += counts[place]

    def global_name(self, key: str, stage: int) -> str:
        """The key as it is called in a model that is in one piece."""
        part = _MODEL.match(key)
        if part is None:
            return key
        layer = _LAYER.search(key)
        if layer and self._is_local:
            number = int(layer[3]) + self._begins[int(part[1] or 0), stage]
            key = f"{key[: layer.start(3)]}{number}{key[layer.end(3) :]}"
        return f"model.{key[part.end() :]}"


def _join_cut(
    found: FileContent, key: str, weights: list[StoredWeight], is_gated: bool
) -> list[tuple[str, StoredWeight]]:
    if len(weights) == 1:
        return [(key, weights[0]._replace(key=key))]
    if _BY_ROWS.search(key):
        gated = is_gated and _GATED.search(key) is not None
        return [(key, _along(key, weights, 0, 2 if gated else 1))]
    if _BY_COLUMNS.search(key):
        return [(key, _along(key, weights, 1))]
    if all(have_same_bytes(weights[0], other) for other in weights[1:]):
        return [(key, weights[0]._replace(key=key))]
    found.notes.append(f"{key}: not known how it is cut over the ranks; compared by rank")
    names = [f"{key} (tp {t})" for t in range(len(weights))]
    return [(name, w._replace(key=name)) for name, w in zip(names, weights, strict=True)]


def _along(key: str, weights: list[StoredWeight], dim: int, groups: int = 1) -> StoredWeight:
    """Weights one after the other in a dimension; of a gated one, all gates come first."""
    first = weights[0]
    if len(first.shape) <= dim:
        raise BadArtefact(f"'{first.path}': {key[:120]}: shape {list(first.shape)} cannot be cut")
    total = sum(weight.shape[dim] for weight in weights)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    parts = []
    begin = 0
    for group in range(groups):
        for weight in weights:
            size, odd = divmod(weight.shape[dim], groups)
            if odd or len(weight.parts) != 1:
                raise BadArtefact(
                    f"'{weight.path}': {key[:120]}: shape {list(weight.shape)} has no halves"
                )
            part = weight.parts[0]
            stored = part.stored
            own = (*stored.shape[:dim], size, *stored.shape[dim + 1 :])
            offset = stored.offset + group * size * stored.strides[dim]
            begins = tuple(begin if d == dim else 0 for d in range(len(shape)))
            parts.append(
                part._replace(stored=stored._replace(shape=own, offset=offset), begins=begins)
            )
            begin += size
    return join(key, parts, shape)


def _add_once(found: FileContent, key: str, weight: StoredWeight, where: str) -> None:
    """A weight that two stages have (embeddings that are tied) is kept twice if it is not one."""
    before = found.tensors.get(key)
    if before is None:
        found.tensors[key] = weight
    elif not (before.shape == weight.shape and have_same_bytes(before, weight)):
        own = f"{key} ({where})"
        found.tensors[own] = weight._replace(key=own)
        found.notes.append(f"{key}: {where} has another content than an earlier one")


def join_ranks(ranks: Sequence[FileContent]) -> FileContent:
    """What the files of ranks 0, 1, ... have together: shards joined, replicas once."""
    found = FileContent({}, {}, [], {})
    _add_values(found, {str(rank): content for rank, content in enumerate(ranks)})
    for key in _all_keys(ranks):
        weights = {r: c.tensors[key] for r, c in enumerate(ranks) if key in c.tensors}
        shards = {r: c.shards[key] for r, c in enumerate(ranks) if key in c.shards}
        how: Callable[..., bool] | None = None
        if len(shards) == len(weights) == len(ranks):
            how = _join_shards
        elif not shards and len(weights) == len(ranks):
            how = _join_flat if _FLAT.search(key) else _join_replicas
        if how is None or not how(found, key, weights, shards):
            for rank, weight in weights.items():
                own = f"rank ({rank}).{key}"
                found.tensors[own] = weight._replace(key=own)
    return found


def _join_flat(
    found: FileContent, key: str, weights: dict[int, StoredWeight], _: dict[int, ShardOf]
) -> bool:
    found.tensors[key] = _along(key, [weights[rank] for rank in sorted(weights)], 0)
    return True


def _join_replicas(
    found: FileContent, key: str, weights: dict[int, StoredWeight], _: dict[int, ShardOf]
) -> bool:
    first = weights[min(weights)]
    if not all(w.shape == first.shape and have_same_bytes(first, w) for w in weights.values()):
        return False
    found.tensors[key] = first._replace(key=key)
    return True


def _join_shards(
    found: FileContent, key: str, weights: dict[int, StoredWeight], shards: dict[int, ShardOf]
) -> bool:
    """DTensors that are cut in one dimension of their mesh at most."""
    one = shards[min(shards)]
    if any((s.shape, s.cuts) != (one.shape, one.cuts) for s in shards.values()):
        raise BadArtefact(f"'{weights[0].path}': {key[:120]}: ranks say different shapes of it")
    cuts = [d for d, dim in enumerate(one.cuts) if dim is not None]
    if not cuts:
        return _join_replicas(found, key, weights, shards)
    if len(cuts) > 1:
        found.notes.append(f"{key}: cut in two dimensions of the mesh; compared by rank")
        return False
    dim = one.cuts[cuts[0]]
    dim = dim if dim is None or dim >= 0 else dim + len(one.shape)
    if dim is None or not 0 <= dim < len(one.shape):
        raise BadArtefact(f"'{weights[0].path}': {key[:120]}: cut in dimension {dim}")
    groups: dict[int, dict[int, StoredWeight]] = defaultdict(dict)  # replicas by place
    for rank, weight in weights.items():
        where = shards[rank].coordinate
        at = where[cuts[0]] if where is not None and len(where) == len(one.cuts) else None
        if at is None and len(one.cuts) > 1:
            found.notes.append(f"{key}: where ranks are in the mesh is not said; compared by rank")
            return False
        groups[rank if at is None else at][rank] = weight
    parts: list[WeightPart] = []
    begin = 0
    for at in sorted(groups):
        (rank, weight), *others = sorted(groups[at].items())
        for other, replica in others:
            if replica.shape != weight.shape or not have_same_bytes(replica, weight):
                own = f"{key} (rank {other}, unlike its replica of rank {rank})"
                found.tensors[own] = replica._replace(key=own)
                found.notes.append(f"{key}: rank {other} has another content than rank {rank}")
        begins = tuple(begin if d == dim else 0 for d in range(len(weight.shape)))
        if weight.numel:
            parts.append(weight.parts[0]._replace(begins=begins))
        begin += weight.shape[dim]
    found.tensors[key] = join(key, parts, one.shape) if parts else weights[0]._replace(key=key)
    return True
