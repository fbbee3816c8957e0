"""Text of foreign files on a terminal: shown, never obeyed."""

from __future__ import annotations

from typing import TextIO

_SHOWN_AS_CODE = (
    *range(0x20), *range(0x7F, 0xA0),  # control characters: they move the cursor, or worse
    0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A),  # turn the line around
    *range(0x200B, 0x200E), 0x2060, 0xFEFF,  # cannot be seen
    0x2028, 0x2029,  # break the line
    *range(0xD800, 0xE000),  # halves of characters, which no encoding has
)  # fmt: skip
_CODES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _SHOWN_AS_CODE}


def printable(text: str) -> str:
    """One line of text with nothing in it that a terminal would act on instead of showing."""
    return text.translate(_CODES)


def print_line(stream: TextIO, text: str) -> None:
    """Write one line; what the terminal cannot encode is shown by its code."""
    encoding = stream.encoding or "utf-8"
    shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(shown + "\n")
