"""Writes a comparison into a folder: the verdict, the table, the page, on demand a workbook."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorprobe.comparing.comparison import Compared, Source, compare_captures
from tensorprobe.comparing.measure import Progress
from tensorprobe.comparing.rank_streams import PairsOfRanks
from tensorprobe.comparing.verdict import Verdict
from tensorprobe.config import Names
from tensorprobe.keywords import keywords
from tensorprobe.monitoring.publishing import publish
from tensorprobe.report.along import plot
from tensorprobe.report.columns import table
from tensorprobe.report.csv import write_csv
from tensorprobe.report.error_plot import error_plot
from tensorprobe.report.html import write_comparison
from tensorprobe.report.rank_tables import write_ranks
from tensorprobe.store.outputs import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICT_FILE = "verdict.json"
CSV_FILE = "comparison.csv"
XLSX_FILE = "comparison.xlsx"
PLOT_FILE = "errors.svg"
MAPPING_FILE = "mapping.yaml"


class Comparison(Compared):
    """What two captures have in common and where they part, with files to show for it.

    comparison = tp.compare("runs/npu", "runs/cpu")
    print(comparison.verdict)
    comparison.save("report/")
    """

    @keywords(folder="path")
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        columns: str = "native",
        xlsx: bool = False,
        model_explorer: bool = False,
        writers: Names = (),
    ) -> list[Path]:
        """Write verdict.json, comparison.csv and report.html into a folder.

        With `xlsx` a workbook too, with `model_explorer` files for Google's Model Explorer.
        `writers` are those of tp.publish: wandb, mlflow, tensorboard.
        """
        paths = save(self, Path(path), columns=columns, xlsx=xlsx, model_explorer=model_explorer)
        if writers:
            publish(path, writers)
        return paths

    def plot(self) -> Figure:
        """The error along the run as a matplotlib figure (`pip install 'tensorprobe[plot]'`)."""
        return plot(self)


@keywords(processes="jobs", seconds="timeout")
def compare(
    actual: Source,
    expected: Source,
    *,
    noise: Sequence[Source] = (),
    mapping: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    at: str | Sequence[str] = (),
    rows: str | None = None,
    within: float | None = None,
    layout: str | os.PathLike[str] | None = None,
    step: int | None = None,
    rank: int | None = None,
    jobs: int | None = None,
    timeout: float = 120.0,
    replay: bool = True,
    references: str | os.PathLike[str] | None = None,
    imports: Sequence[str | os.PathLike[str]] = (),
    engine: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two captures and name the call that made them differ.

        comparison = tp.compare("runs/npu", "runs/cpu")
        print(comparison.verdict)

    `noise` are further runs of the expected side: what they differ by is no divergence. `mapping`
    is a file, or a dict, that says which calls or modules are the same. `at` compares chosen places
    only: "outputs", "gradients", "modules", patterns of paths; `rows` says which rows of them go
    together, `within` how far they may be apart (see docs/compare.md). `layout` is a layout.yaml of
    the run that has several ranks, where the other is one process (docs/ranks.md). `jobs` processes
    measure tensors (default: one a core, where that is worth it). `timeout` is how many seconds may
    be spent on replaying suspects; 0 or `replay=False` leaves it out. `references` is a Python file
    with tp.reference functions; `imports` are packages whose operators, functions and modules a
    replay may call besides torch's. `engine` spreads ranks over the workers of Ray: "ray", or
    "ray://HOST:PORT" of a cluster.
    """
    compared = compare_captures(
        actual, expected, noise=noise, mapping=mapping, at=at, rows=rows, within=within,
        layout=layout, step=step, rank=rank, jobs=jobs, timeout=timeout, replay=replay,
        references=references, imports=imports, engine=engine, progress=progress,
    )  # fmt: skip
    return with_files(compared)


def with_files(compared: Compared) -> Comparison:
    """The same, as users get it."""
    c = compared
    return Comparison(c.actual, c.expected, c.pairs, c.verdict, c.structure, c.proposed, c._alone)


def verdict_text(verdict: Verdict) -> str:
    """What verdict.json holds."""
    return json.dumps(verdict.to_json(), indent=1, allow_nan=False) + "\n"


def save(
    comparison: Compared,
    folder: Path,
    *,
    columns: str = "native",
    xlsx: bool = False,
    model_explorer: bool = False,
) -> list[Path]:
    """Write the files and give their paths."""
    rows = table(comparison, columns)  # first: an unknown name must not leave half a report
    check_output(folder, comparison.actual.path, comparison.expected.path)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / VERDICT_FILE, folder / CSV_FILE]
    paths[0].write_text(verdict_text(comparison.verdict), encoding="utf-8")
    if isinstance(comparison.pairs, PairsOfRanks) and columns == "native":
        write_ranks(paths[1], comparison, comparison.pairs)
    else:
        write_csv(paths[1], rows)
    if comparison.verdict.at:
        paths.append(folder / PLOT_FILE)
        paths[-1].write_text(error_plot(comparison.verdict), encoding="utf-8")
    if comparison.proposed:
        paths.append(folder / MAPPING_FILE)
        lines = [f"{json.dumps(a)}: {json.dumps(e)}\n" for a, e in comparison.proposed.items()]
        paths[-1].write_text("".join(lines), encoding="utf-8")  # JSON's texts are YAML's too
    paths += write_comparison(folder, comparison)
    if model_explorer:
        from tensorprobe.report.model_explorer import write_model_explorer

        paths += write_model_explorer(folder, comparison)
    if xlsx:  # last: too many rows for it are an error, and the rest is there
        from tensorprobe.report.xlsx import write_xlsx

        paths.append(folder / XLSX_FILE)
        write_xlsx(paths[-1], comparison, columns)
    return paths
