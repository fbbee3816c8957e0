"""msprobe's seed_all, with the dropout that it can switch off."""

from __future__ import annotations

from typing import Any

import torch

from tensorprobe.errors import BadUsage
from tensorprobe.record import seeding


def seed_all(
    seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False
) -> None:
    """Seed every generator; `mode` for deterministic algorithms, `rm_dropout` for no dropout.

    With `rm_dropout` every nn.Dropout and functional dropout keeps all its values from here on.
    """
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout), ("is_enhanced", is_enhanced)):
        if not isinstance(value, bool):
            raise BadUsage(f"seed_all({name}={value!r}): expected True or False")
    if is_enhanced:
        raise BadUsage(
            "seed_all(is_enhanced=True) is not supported: it makes every random call give the same "
            "numbers. To give two runs the same start: tensorprobe run --save-start / --load-start"
        )
    seeding.seed_all(seed, deterministic=mode)
    if rm_dropout:
        _remove_dropout()


def _remove_dropout() -> None:
    """As msprobe does, by its functions' defaults: p is 0 wherever dropout is called."""
    functional: Any = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        original = getattr(functional, name)
        if not hasattr(original, "_dropout_removed"):
            setattr(functional, name, _without(original))


def _without(original: Any) -> Any:
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        wrong = not 0.0 <= p <= 1.0  # torch says so in its own words
        return original(input, p if wrong else 0.0, training, inplace)

    dropout._dropout_removed = True  # type: ignore[attr-defined]
    dropout.__doc__ = original.__doc__
    return dropout
