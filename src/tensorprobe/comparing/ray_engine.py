"""Ray as the engine: of this machine, or of a cluster that is there already."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tensorprobe.comparing.rank_processes import TRIES, Doing, Raised, in_order
from tensorprobe.comparing.rank_work import RankFailed, Work
from tensorprobe.errors import MissingDependency, TensorprobeError

Task = TypeVar("Task")
Result = TypeVar("Result")


class NoCluster(TensorprobeError):
    """A cluster that cannot be joined."""


class RayEngine:
    """Sends each rank to a worker of Ray; one that is killed, Ray starts again."""

    def __init__(self, address: str | None, jobs: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise MissingDependency("ray", "`engine=ray`", "ray") from None
        self._ray: Any = ray
        # A worker of this machine is to find what this process finds.
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            n = jobs or len(os.sched_getaffinity(0))
            options |= {"num_cpus": n, "include_dashboard": False, "runtime_env": paths}
        else:
            options["address"] = address
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the error says it all
                ray.init(**options)
        except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
            raise NoCluster(
                f"no Ray cluster could be used at '{address or 'this machine'}': "
                f"{_first_line(error).rstrip('.')}. Look whether it runs: ray status"
            ) from error
        self._most = max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def run(
        self, work: Work[Task, Result], tasks: Iterator[Task]
    ) -> Iterator[tuple[Task, Result | RankFailed]]:
        ray = self._ray
        number = ray.put(pickle.dumps(work, pickle.HIGHEST_PROTOCOL))
        remote = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_do)

        def ask(task: Task) -> Result | RankFailed:
            packed = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
            try:
                answer = pickle.loads(ray.get(remote.remote(number, packed)))
            except (
                ray.exceptions.WorkerCrashedError,
                ray.exceptions.OutOfMemoryError,
                ray.exceptions.NodeDiedError,
                ray.exceptions.ObjectLostError,
            ) as error:
                return RankFailed(f"{TRIES} workers of Ray have died of it: {_first_line(error)}")
            if isinstance(answer, Raised):
                raise answer.error
            found: Result | RankFailed = answer
            return found

        with ThreadPoolExecutor(self._most) as pool:
            yield from in_order(pool, ask, tasks, self._most)

    def close(self) -> None:
        self._ray.shutdown()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


_known: dict[bytes, Doing] = {}  # in a worker: what it did last


def _do(work: bytes, task: bytes) -> bytes:
    """In a worker of Ray."""
    if work not in _known:
        _known.clear()
        _known[work] = Doing(work)
    return pickle.dumps(_known[work](pickle.loads(task)), pickle.HIGHEST_PROTOCOL)
