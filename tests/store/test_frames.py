"""Of a stack a person reads one line."""

import os

import pytest

from tensorprobe.store.frames import users_line

TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 in Linear.forward"
MODEL = "/venv/lib/python3.11/site-packages/transformers/activations.py:103 in SiLU.forward"


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([], ""),
        ([TORCH], "torch/nn/modules/linear.py:134 in Linear.forward"),
        ([TORCH, MODEL, "/home/me/train.py:3 in <module>"], "transformers/activations.py:103 in "
         "SiLU.forward"),
        (["/usr/lib/python3/dist-packages/a/b.py:1 in f"], "a/b.py:1 in f"),
        ([f"{os.getcwd()}/model/net.py:5 in Net.forward"], "model/net.py:5 in Net.forward"),
        (["/home/me/train.py:3 in <module>"], "/home/me/train.py:3 in <module>"),
    ],
)  # fmt: skip
def test_the_line_to_read(stack: list[str], line: str) -> None:
    assert users_line(stack) == line
