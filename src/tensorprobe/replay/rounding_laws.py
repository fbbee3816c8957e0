"""The laws by which kernels round, and what it is to break one.

A kernel that computes in fp32 and rounds once gives the exact result rounded to nearest, but near
ties. One that rounds often, or gives fp32, may be off by a few roundings, up and down alike: what
is left of their sum over many numbers is a factor or an offset that no rounding makes.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

LawKind = Literal["exact", "once", "often"]
Where = Literal["", "tensor", "row", "column", "slice", "block"]


class Law(msgspec.Struct, frozen=True):
    """How a kernel rounds, and by how much its healthy calls were seen to depart from that.

    `beyond` is how far, in distances of neighbouring numbers, a result may be beyond the half that
    rounding to nearest gives, with sums of `length` numbers. `factor` and `offset` are the parts
    of a result, in roundings, that may be systematic.
    """

    kind: LawKind
    beyond: float = math.inf
    factor: float = math.inf
    offset: float = math.inf
    length: float = 1.0


class Departure(msgspec.Struct, frozen=True):
    """How far one result departs from its reference, in the units of a Law."""

    beyond: float = 0.0
    factor: float = 0.0
    offset: float = 0.0
    where_factor: Where = ""
    where_offset: Where = ""
    n_beyond: int = 0
    n: int = 0


class Breach(msgspec.Struct, frozen=True):
    """The law that a result breaks, by how much, and in which part of it."""

    law: Literal["exact", "cast", "truncated", "once", "factor", "offset"]
    size: float  # how often what the law allows
    amount: float  # in neighbours beyond a half, in roundings, or a count
    where: Where = ""
    n: int = 0  # numbers that break it
    of: int = 0

    @property
    def text(self) -> str:
        """What is wrong, for a person to read, after "the result ..."."""
        part = {"": "", "tensor": " throughout"}.get(self.where, f" in one {self.where}")
        if self.law == "truncated":
            return f"is cut off and not rounded to nearest ({self.n} of {self.of} numbers)"
        if self.law == "cast":
            return f"is not its input rounded to nearest ({self.n} of {self.of} numbers)"
        if self.law == "exact":
            return f"does not have the values that its inputs give ({self.n} of {self.of} differ)"
        if self.law == "once":
            return (
                f"is not the exact result rounded to nearest: {self.n} of {self.of} numbers are "
                f"further off, by up to {0.5 + self.amount:.3g} instead of 0.5 of the distance to "
                "the next number; its kernel rounds once"
            )
        what = "scaled" if self.law == "factor" else "shifted"
        return (
            f"is {what} by at least {self.amount:.2g} roundings{part}, which rounding does not do: "
            "it goes up and down alike"
        )


def breach(departure: Departure, law: Law, length: float = 1.0) -> Breach | None:
    """How a departure breaks a law, if it does; the first is the one that tells most."""
    longer = max(1.0, length / law.length)
    allowed = law.beyond * longer
    if law.kind == "once" and departure.beyond > allowed:
        return Breach(
            "once", departure.beyond / allowed, departure.beyond,
            n=departure.n_beyond, of=departure.n,
        )  # fmt: skip
    return systematic_breach(departure, law)


def systematic_breach(departure: Departure, law: Law) -> Breach | None:
    """As if the kernel rounded often: only what is left of sums over many numbers counts."""
    if departure.factor > law.factor:
        where, amount = departure.where_factor, departure.factor
        return Breach("factor", amount / law.factor, amount, where, of=departure.n)
    if departure.offset > law.offset:
        where, amount = departure.where_offset, departure.offset
        return Breach("offset", amount / law.offset, amount, where, of=departure.n)
    return None
