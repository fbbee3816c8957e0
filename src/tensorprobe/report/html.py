"""Writes a page that opens by itself: what `web/` was built to, and the data that it shows.

Nothing in the data can be executed. It is JSON in blocks that browsers do not run, with every `<`
escaped, and the page's policy lets only the one script run whose hash it names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensorprobe.errors import BadArtefact
from tensorprobe.garbage import no_garbage
from tensorprobe.report.page_data import PageData, comparison_data, shown, thinned
from tensorprobe.tensors.opening import open_file
from tensorprobe.terminal import printable

if TYPE_CHECKING:
    from tensorprobe.comparing.comparison import Compared

PAGE_FILE = "report.html"
DATA_FILE = "report.data"  # what is too large for the page: `tensorprobe view` reads it
LARGEST_NBYTES = 20 << 20
_MOST_CALLS = 20_000  # in a page whose calls alone are too many
_BUILT = Path(__file__).parent / "page"


@functools.cache
def built(name: str) -> str:
    """A file that `web/` was built to."""
    return (_BUILT / name).read_text(encoding="utf-8")


def policy(connect: str = "'none'") -> str:
    """Which scripts and styles the page may use: those of the package, by their hashes."""
    return (
        f"default-src 'none'; script-src '{_hash(built('page.js'))}'; "
        f"style-src '{_hash(built('page.css'))}'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_block(value: Any) -> bytes:
    """A value as JSON that no page can take for markup."""
    return msgspec.json.encode(value).replace(b"<", b"\\u003c")


def page(
    title: str, text: Iterable[str], blocks: Mapping[str, bytes], connect: str = "'none'"
) -> bytes:
    """The page. `text` is what is read where no script runs; `blocks` are JSON by name.

    The script stands behind the first block, with which the page can be used; a browser reads the
    others meanwhile.
    """
    lines = "\n".join(html.escape(printable(line)) for line in text)
    head = (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(connect)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(shown(title))}</title>\n"
        f"<style>{built('page.css')}</style></head>\n"
        f'<body><div id="page"><pre>{lines}</pre></div>\n'
    )
    parts = []
    for name, block in blocks.items():
        start = f'<script type="application/json" id="{html.escape(name)}">'
        parts.append(b"%b%b</script>\n" % (start.encode(), block))
    script = f"<script>{built('page.js')}</script>\n".encode()
    return b"".join(
        (
            head.encode("utf-8", "backslashreplace"), *parts[:1], script, *parts[1:],
            b"</body></html>\n",
        )
    )  # fmt: skip


def write_comparison(folder: Path, comparison: Compared) -> list[Path]:
    """Write report.html, and beside it report.data where the page cannot hold it all."""
    with no_garbage():
        data = comparison_data(comparison)
    data.index["out"] = shown(str(folder))
    text = data.index["text"]
    title = f"tensorprobe: {comparison.verdict.verdict}"
    index, details = json_block(data.index), json_block(data.details)
    path, beside = folder / PAGE_FILE, folder / DATA_FILE
    if len(index) + len(details) <= LARGEST_NBYTES:
        write(path, page(title, text, {"index": index, "details": details}))
        beside.unlink(missing_ok=True)  # of another comparison
        return [path]
    write(beside, b"%b\n%b\n" % (index, details))
    data.index["lacks"] = True  # its details are elsewhere
    if len(index) > LARGEST_NBYTES:
        data.index = thinned(data.index, _MOST_CALLS)
    write(path, page(title, text, {"index": json_block(data.index)}))
    return [path, beside]


def read_index(path: Path) -> bytes:
    """What the page needs first, of a report.data."""
    with open_file(path) as file:
        line = file.readline()
    if not line.startswith(b'{"format":') or not line.endswith(b"}\n"):
        raise BadArtefact(f"'{path}' is no data of a report. To make it: tensorprobe compare")
    return line


def read_data(path: Path) -> PageData:
    """What is in a report.data."""
    with open_file(path) as file:
        lines = file.read().split(b"\n")
    try:
        index, details = (msgspec.json.decode(line, type=dict[str, Any]) for line in lines[:2])
    except (ValueError, RecursionError) as error:
        raise BadArtefact(
            f"'{path}' is no data of a report: {error}. To make it again: tensorprobe compare"
        ) from error
    return PageData(index, details)


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
