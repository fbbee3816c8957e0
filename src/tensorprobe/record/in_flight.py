"""Memory that a collective is still writing to: who reads it is promised what it will hold."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any

import msgspec
import torch

from tensorprobe.follow.quiet import Quiet

REWRITTEN = "the result of a collective, written to before it could be read"


class Promise(msgspec.Struct, eq=False, gc=False):
    """A content with a number, to be read when it is there."""

    number: int
    tensor: torch.Tensor
    version: int
    name: Any
    stored: bool
    form: int | None


class _MemoryInFlight(msgspec.Struct, eq=False):
    """A storage that collectives write to."""

    tensor: torch.Tensor  # keeps it alive, so that no other takes its place
    users: int = 0
    promises: list[Promise] = []


class Coalescing(msgspec.Struct, eq=False):
    """A `with _coalescing_manager()`, which makes its collectives when it is left."""

    group: Any
    collected: Any  # the collectives that are to be made
    under_way: dict[Any, Any]  # torch's own table of such lists, by group
    manager: Any  # has the Work afterwards, if nobody has waited for it

    def is_over(self) -> bool:
        """Whether it was left, and what it made is over."""
        if self.under_way.get(self.group) is self.collected:
            return False
        if self.manager is None:
            raise RuntimeError("made by a coalescing manager that was not found")
        return all(_has_ended(work) for work in self.manager.works)


def coalescing_of(group: Any) -> Coalescing | None:
    """The coalescing manager of a group that this thread is in, if it is in one."""
    world: Any = torch.distributed.distributed_c10d._world
    under_way = getattr(world, "pg_coalesce_state", {})
    if group not in under_way:
        return None
    collected = under_way[group]
    # Nobody but the generator of the `with` knows the manager, nor whether it will wait.
    for holder in gc.get_referrers(collected):
        if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
            manager = holder.gi_frame.f_locals.get("cm")
            if manager is not None and hasattr(manager, "works"):
                return Coalescing(group, collected, under_way, manager)
    return Coalescing(group, collected, under_way, None)


class Running(msgspec.Struct, eq=False):
    """A collective that has begun; `works` say when it is over, or `waiters`, or both are empty.

    `waiters` are the tensors that torch gives out in place of results, and waits for at their first
    use. `thread` is that of a call that waits as soon as the operator has returned.
    """

    name: str  # of its call; empty where it was not seen
    tensors: list[torch.Tensor]
    works: Sequence[Any] = ()
    waiters: list[Any] = []
    thread: int | None = None
    coalescing: Coalescing | None = None

    def is_over(self) -> bool:
        """Whether it is known to be over. Never waits."""
        if self.thread == threading.get_ident():  # what is seen now is after that
            return True
        if self.coalescing is not None:
            return self.coalescing.is_over()
        if self.works:
            on_host = all(tensor.is_cpu for tensor in self.tensors)
            return all(_has_ended(work, on_host) for work in self.works)
        return any(waiter.completed for waiter in self.waiters) or nothing_runs()


class InFlight:
    """The collectives that run, and what was promised of the memory that they write to.

    Nothing here waits for a collective: another rank may be waiting for what the program does next.
    """

    def __init__(
        self,
        read: Callable[[Promise], None],
        give_up: Callable[[int, str], None],
        on_hold: Callable[[torch.Tensor, bool], None],
    ) -> None:
        self.running: list[Running] = []
        self._memory: dict[int, _MemoryInFlight] = {}
        self._read = read
        self._give_up = give_up
        self._on_hold = on_hold

    def __contains__(self, storage: int) -> bool:
        return storage in self._memory

    def begin(self, running: Running) -> None:
        """From now on contents of this memory are promised."""
        for tensor in running.tensors:
            key = tensor.untyped_storage()._cdata
            memory = self._memory.get(key)
            if memory is None:
                memory = self._memory[key] = _MemoryInFlight(tensor)
                self._on_hold(tensor, True)
            memory.users += 1
        self.running.append(running)

    def promise(self, storage: int, promise: Promise) -> None:
        """Read this content when it is there."""
        with Quiet():
            promise.tensor = promise.tensor.detach()  # the program may put others in its place
        self._memory[storage].promises.append(promise)

    def meet(self, waiter: Any, tensor: torch.Tensor) -> None:
        """The program has a tensor that waits for a collective when it is used, maybe an unseen
        one; `tensor` is what it waits for."""
        key = tensor.untyped_storage()._cdata
        if key not in self._memory:
            if nothing_runs():
                return
            self.begin(Running("", [tensor], waiters=[waiter]))
            return
        for running in self.running:
            if not running.works and any(
                t.untyped_storage()._cdata == key for t in running.tensors
            ):
                running.waiters.append(waiter)

    def wait_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """The program has waited for the functional collectives that write to these."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        for running in list(self.running):
            if not running.works and not keys.isdisjoint(_storages(running)):
                self._end(running)

    def poll(self) -> list[tuple[Running, str]]:
        """Read what is there by now; returns those that cannot be asked, and why."""
        failed = []
        for running in list(self.running):
            try:
                over = running.is_over()
            except (RuntimeError, ValueError) as error:  # one of a coalesced batch has no state
                reason = f"asynchronous, and cannot be asked: {error}"
                failed.append((running, reason))
                self._end(running, reason)
                continue
            if over:
                self._end(running)
        return failed

    def break_promises(self, reason: str) -> list[Running]:
        """The step ends: what is not there will not be recorded in it. Returns whose it was."""
        broken = [
            running
            for running in self.running
            if any(self._memory[key].promises for key in _storages(running))
        ]
        for memory in self._memory.values():
            for promise in memory.promises:
                self._give_up(promise.number, reason)
            memory.promises = []
        return broken

    def _end(self, running: Running, reason: str | None = None) -> None:
        self.running.remove(running)
        for tensor in running.tensors:
            key = tensor.untyped_storage()._cdata
            memory = self._memory[key]
            memory.users -= 1
            if memory.users and reason is None:
                continue
            promises, memory.promises = memory.promises, []
            if not memory.users:
                del self._memory[key]
                self._on_hold(tensor, False)
            for promise in promises:
                if reason is not None:
                    self._give_up(promise.number, reason)
                elif not running.name and version_of(promise.tensor) != promise.version:
                    self._give_up(promise.number, REWRITTEN)  # nobody saw what came in between
                else:
                    self._read(promise)


def _has_ended(work: Any, on_host: bool = False) -> bool:
    """Whether a Work is over. On the host its future is done before it says so itself: what waits
    for the future alone, as DDP does, goes on earlier. On a device a future is done too early."""
    if work.is_completed():
        return True
    if not on_host:
        return False
    try:
        return bool(work.get_future().done())
    except (RuntimeError, TypeError):  # a message has no future
        return False


def _storages(running: Running) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in running.tensors}


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor; -1 of one that has none, in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def nothing_runs() -> bool:
    """Whether the program has waited for all functional collectives."""
    c10d: Any = getattr(torch._C, "_distributed_c10d", None)
    size = getattr(c10d, "_get_work_registry_size", None)  # 2.1 to 2.3 have none
    return size is not None and size() == 0
