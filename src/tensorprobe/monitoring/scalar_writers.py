"""Where numbers go besides our own files: TensorBoard, Weights & Biases, MLflow. One interface."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tensorprobe.errors import BadUsage
from tensorprobe.monitoring.event_files import EventFile

if TYPE_CHECKING:
    from tensorprobe.monitoring.series import StepValues

PREFIX = "tensorprobe"
_MOST_OF_A_TAG = 500  # characters, in MLflow
EVERY = 10  # steps: of each tensor; scalars and totals of every step


class ScalarWriter(Protocol):
    """Takes the numbers of a step by name. What it raises is told once, and it is left out then.

    `keep` takes the files of a report, and what it says in a line; it says whether it could.
    """

    def write(self, step: int, scalars: Mapping[str, float], at: float | None = None) -> None: ...
    def keep(self, name: str, files: Sequence[Path], text: str) -> bool: ...
    def close(self) -> None: ...


class WandbWriter:
    """Adds to the run of Weights & Biases that the program has open.

    Its own counter of steps is left to the program: the numbers join its next `log`, and have a
    step of theirs as their axis.
    """

    def __init__(self) -> None:
        self._defined_on: Any = None

    def write(self, step: int, scalars: Mapping[str, float], at: float | None = None) -> None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        if run is not self._defined_on:
            self._defined_on = run
            run.define_metric(f"{PREFIX}/step")
            run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")
        named = {f"{PREFIX}/{name}": number for name, number in scalars.items()}
        run.log({f"{PREFIX}/step": step, **named}, commit=False)

    def keep(self, name: str, files: Sequence[Path], text: str) -> bool:
        wandb: Any = sys.modules.get("wandb")
        run = wandb.run if wandb is not None else None
        if run is None:
            return False
        plain = "".join(char if char.isalnum() or char in "_-." else "-" for char in name)
        artifact = wandb.Artifact(f"{PREFIX}-{plain}", type=PREFIX, description=text)
        for path in files:
            artifact.add_file(str(path))
        run.log_artifact(artifact)
        run.summary[f"{PREFIX}/{plain}"] = text
        return True

    def close(self) -> None:
        """The run is the program's."""


class MlflowWriter:
    """Adds to the run of MLflow that the program has open."""

    def write(self, step: int, scalars: Mapping[str, float], at: float | None = None) -> None:
        mlflow = sys.modules.get("mlflow")
        run = mlflow.active_run() if mlflow is not None else None
        if mlflow is None or run is None:
            return
        named = {f"{PREFIX}/{_allowed(name)}": number for name, number in scalars.items()}
        mlflow.log_metrics(named, step=step)

    def keep(self, name: str, files: Sequence[Path], text: str) -> bool:
        mlflow = sys.modules.get("mlflow")
        if mlflow is None or mlflow.active_run() is None:
            return False
        for path in files:
            mlflow.log_artifact(str(path), artifact_path=f"{PREFIX}/{_allowed(name)}")
        mlflow.set_tag(f"{PREFIX}.{_allowed(name)}", text[:_MOST_OF_A_TAG])
        return True

    def close(self) -> None:
        """The run is the program's."""


def _allowed(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)


def make_writers(names: Iterable[str], folder: Path) -> dict[str, ScalarWriter]:
    """The writers of these names; a row here is all that another one needs."""
    makers: dict[str, Callable[[], ScalarWriter]] = {
        "tensorboard": lambda: EventFile(folder / "tensorboard"),
        "wandb": WandbWriter,
        "mlflow": MlflowWriter,
    }
    chosen = tuple(names)
    for name in chosen:
        if name not in makers:
            raise BadUsage(f"writers={name!r}: expected {', '.join(makers)}")
    return {name: makers[name]() for name in chosen}


def scalars_of(step: StepValues, *, whole: bool) -> dict[str, float]:
    """The numbers of a step under the names that a chart has; `whole`: those of each tensor too."""
    found = dict(step.scalars)
    for kind in ("gradient.backward", "gradient"):
        norm = step.total_norm(kind)
        if norm is not None:
            found[f"{kind}/norm"] = norm
    if whole:
        for kind, table in step.tables.items():
            for name, norm in zip(table.names, table.column("norm").tolist(), strict=True):
                if not math.isnan(norm):
                    found[f"{kind}/{name}"] = norm
    return found
