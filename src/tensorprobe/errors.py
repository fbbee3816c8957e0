"""Every exception a user can see.

TensorprobeError
├── BadUsage             an argument, option or configuration field is wrong         (exit 2)
├── MissingDependency    an optional package is needed and not installed
├── UnsupportedTorch     torch is too old, or cannot be imported
├── UnreadableCapture    a path is no capture, or one that cannot be read
│   └── NoSuchCall       a capture has no call of this name
├── BadArtefact          a foreign file (dump, graph, log) is not what it claims to be
├── NothingRecorded      recording ended and the selection had matched nothing
├── WriteFailed          the disk refused what was recorded
├── RecordingStopped     the recorder could not go on, for a reason other than the disk
├── DeviceUnusable       a device is asked for that is not there or not set up
├── NotReplayable        a recorded call cannot be run again alone
└── GuardStopped         a guard has found what it was to stop at                     (exit 3)

The text of each says what was found, what was expected, and what to type next.
"""

from __future__ import annotations

import re


class TensorprobeError(Exception):
    """Base of all errors raised by tensorprobe itself."""


class BadUsage(TensorprobeError):
    """An argument, option or configuration field is wrong."""


class MissingDependency(TensorprobeError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, needed_for: str, extra: str | None = None) -> None:
        if extra is not None:
            how = f"it: pip install 'tensorprobe[{extra}]'"
            if package == "torch":
                how = f"the build your vendor gives you, or: pip install 'tensorprobe[{extra}]'"
        elif package.partition(".")[0] == "tensorprobe":  # a part of our own was left out
            how = "all of it: pip install --force-reinstall tensorprobe"
        else:
            how = "the package that has it"
        super().__init__(f"{needed_for} needs {package}, which is not installed. Install {how}")


class UnsupportedTorch(TensorprobeError):
    """Torch is too old, or cannot be imported because of a package that it loads by itself."""


def why_no_torch(error: BaseException) -> str | None:
    """What to do where torch fails because of a package that it loads by itself; else None."""
    found = re.search(r"Failed to load the backend extension: ([\w.-]+?)\.?(?:\s|$)", str(error))
    if found is None:
        return None
    cause = str(error.__cause__ or error.__context__ or "").strip().splitlines()
    return (
        f"torch cannot be imported: it loads {found[1]} by itself, and that fails"
        f"{': ' + cause[0] if cause else ''}. Mend {found[1]} (the one for this torch, with the "
        "libraries of its driver), or leave it out: export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


class UnreadableCapture(TensorprobeError):
    """A path is no capture, or one that cannot be read."""


class NoSuchCall(UnreadableCapture, KeyError):
    """A capture has no call of this name, step and rank."""

    __str__ = Exception.__str__  # KeyError's quotes the text


class BadArtefact(TensorprobeError):
    """A foreign file (dump, graph, log) is not what it claims to be."""


class NothingRecorded(TensorprobeError):
    """Recording ended and the selection had matched nothing."""


class WriteFailed(TensorprobeError):
    """The disk refused what was recorded."""


class RecordingStopped(TensorprobeError):
    """The recorder could not go on, for a reason other than the disk."""


class DeviceUnusable(TensorprobeError):
    """A device is asked for that is not there or not set up."""


class NotReplayable(TensorprobeError):
    """A recorded call cannot be run again alone."""


class GuardStopped(TensorprobeError):
    """A guard has found as many overflows as it was told to stop at."""
