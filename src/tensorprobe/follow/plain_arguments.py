"""What every walk through the arguments of a call needs to know."""

from __future__ import annotations

import torch

# Not of a subclass, which may answer any question in its own way.
PLAIN_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
# The paths of positional arguments.
POSITIONS = [(str(i),) for i in range(64)]
