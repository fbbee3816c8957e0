"""Flags may be asked for by the handler of a signal while one is being noted."""

from __future__ import annotations

import threading

import torch

from tensorprobe.tensors.finiteness import LIMITS, TorchFlags


def test_a_handler_may_submit_while_a_submit_is_under_way() -> None:
    flags, tickets = TorchFlags(), []

    class Interrupted(list[float]):
        """Where Python would run a handler: after a call, the lock being held."""

        def __len__(self) -> int:
            found = super().__len__()
            if not tickets:
                tickets.append(-1)
                tickets[0] = flags.submit(torch.tensor([3.0, 4.0], dtype=torch.float16))
            return found

    flags._limits = Interrupted()
    thread = threading.Thread(
        target=lambda: tickets.append(flags.submit(torch.tensor([1.0, 2.0]))), daemon=True
    )
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    found = flags.fetch()
    assert [found[ticket].top for ticket in tickets] == [4.0, 2.0]
    assert [found._limits[ticket] for ticket in tickets] == [
        LIMITS[torch.float16],
        LIMITS[torch.float32],
    ]
