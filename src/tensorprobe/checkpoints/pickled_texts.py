"""Parts of a pickle as short texts; a part that is referred to a million times is read once."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from tensorprobe.tensors.layouts import MAX_DIMENSIONS
from tensorprobe.tensors.pickle_opcodes import GlobalName, PickledCall, outline

Value = str | int | float | bool | None

_MAX_TEXT = 200
_MAX_INTEGER = 1 << 256
_MAX_ARGUMENTS = 16


class PickledTexts:
    """Texts of one tree; the tree must live as long as this does."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}  # by the identity of what it is of

    def word(self, word: Any) -> str:
        """A key of a dict."""
        if isinstance(word, str):
            return word
        if isinstance(word, bytes):
            return word.decode(errors="backslashreplace")
        if isinstance(word, GlobalName):
            return word.name.replace(" ", ".")
        if isinstance(word, PickledCall):
            return self.call(word) or "object"
        if isinstance(word, int) and abs(word) > _MAX_INTEGER:
            return f"a number of {word.bit_length()} bits"
        if isinstance(word, tuple):
            return "(" + ", ".join(map(self.word, word)) + ")"
        return str(word)

    def plain(self, node: Any) -> Value:
        """A leaf, as what a document can hold; large ones by their digest."""
        if isinstance(node, GlobalName):
            return node.name.replace(" ", ".")
        if isinstance(node, (bytes, bytearray)):
            return self._digested(f"{len(node)} bytes", node)
        if isinstance(node, str):
            return (
                node if len(node) <= _MAX_TEXT else self._digested(f"{len(node)} characters", node)
            )
        if isinstance(node, int) and abs(node) > _MAX_INTEGER:
            return self._digested("a large number", node)
        if node is None or isinstance(node, (bool, int, float)):
            return node
        return type(node).__name__

    def call(self, node: PickledCall) -> str | None:
        """`torch.device('cuda', 0)`: a call of plain values; None where it holds more."""
        if not isinstance(node.function, GlobalName):
            return None
        arguments = node.arguments
        if len(arguments) == 1 and isinstance(arguments[0], tuple) and arguments[0]:
            arguments = arguments[0]
        if len(arguments) > _MAX_ARGUMENTS:
            return None
        shown = []
        for each in arguments:
            is_bytes = node.function.name == "_codecs encode" and len(arguments) == 2
            if isinstance(each, str) and is_bytes:  # how protocol 2 writes them
                return self._digested(f"{len(each)} bytes", each)
            if not (each is None or isinstance(each, (str, int, float, bool, GlobalName, bytes))):
                return None
            shown.append(repr(self.plain(each)))
        return f"{node.function.name.replace(' ', '.')}({', '.join(shown)})"

    def array(self, state: Any) -> str:
        """An array of numpy: its shape, dtype and a digest of its bytes."""
        _, shape, dtype, order, content = state[:5]
        if isinstance(content, PickledCall):  # text in latin-1, as protocol 2 writes bytes
            content = content.arguments[0]
        size = numbers(shape)
        kind = outline(dtype.arguments[0]) if isinstance(dtype, PickledCall) else "?"
        by_columns = " by columns" if order is True and len(size) > 1 else ""
        words = f"array {kind[:40]} {list(size)}{by_columns}"
        if not isinstance(content, (bytes, bytearray, str)):
            return f"{words} of {outline(content)}"
        return self._digested(words, content) if math.prod(size) else words

    def values(self, node: Any) -> str:
        """Many numbers and words, one after the other."""
        return self._digested(f"{len(node)} values", node)

    def _digested(self, what: str, content: Any) -> str:
        digest = self._digests.get(id(content))
        if digest is None:
            digest = self._digests[id(content)] = hashlib.sha256(_bytes(content)).hexdigest()[:16]
        return f"{what}, sha256 {digest}"


def _bytes(content: Any) -> bytes:
    if isinstance(content, str):
        try:
            return content.encode("latin-1")
        except UnicodeEncodeError:
            return content.encode(errors="surrogatepass")
    if isinstance(content, int):
        return content.to_bytes(content.bit_length() // 8 + 1, "little", signed=True)
    return bytes(content) if isinstance(content, bytes | bytearray) else repr(content).encode()


def numbers(node: Any) -> tuple[int, ...]:
    """A shape or strides, which some versions wrap in torch.Size."""
    if isinstance(node, PickledCall):
        node = node.arguments[0]
    is_list = isinstance(node, tuple | list) and len(node) <= MAX_DIMENSIONS
    if not is_list or not all(type(n) is int for n in node):
        raise ValueError(f"{outline(node)} is no shape")
    return tuple(node)
