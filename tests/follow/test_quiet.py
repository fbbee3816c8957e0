"""Quiet leaves torch as it was, also where Ctrl-C comes while it is entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorprobe.follow.quiet import Quiet


@pytest.mark.parametrize(
    "interrupted", ["_len_torch_dispatch_stack", "is_grad_enabled", "_set_grad_enabled"]
)
def test_an_interrupt_while_it_is_entered(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    original = getattr(torch._C, interrupted)

    def interrupt(*args: Any) -> None:  # as a handler does after any call
        monkeypatch.undo()
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, interrupted, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Quiet():
            pass
        assert torch.is_grad_enabled()
        assert not torch._C._is_torch_function_all_disabled()
    finally:
        torch.set_grad_enabled(True)
