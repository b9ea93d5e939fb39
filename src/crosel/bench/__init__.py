"""Many runs: the variants and seeds of a suite, a run folder each. What is done is skipped, what broke is resumed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from crosel.bench.execution import BenchScreen, Executor, Options, RunResult, existing_result, run_all, run_one
from crosel.bench.executors import EXECUTORS, find_executor
from crosel.bench.search import search_suite
from crosel.bench.suite import BenchRun, Suite, check_code, check_data, expand, parse_suite, read_suite, suites
from crosel.errors import UserError
from crosel.utils.text import counted

__all__ = [
    "EXECUTORS", "BenchRun", "Executor", "Options", "RunResult", "Suite", "expand", "parse_suite", "read_suite",
    "run_one", "run_suite", "search_suite", "suites",
]  # fmt: skip

logger = logging.getLogger(__name__)


def run_suite(
    suite: str | Suite,
    out: Path,
    *,
    seeds: int | Sequence[int] | None = None,
    jobs: int = 1,
    device: str = "auto",
    on: str = "local",
    data_dir: Path | None = None,
    settings: Iterable[str] = (),
    only: str | Iterable[str] = (),
    trust_code: bool = False,
    quiet: bool = True,
) -> list[RunResult]:
    """Make the runs of a suite in `out`, and return how each ended; one that fails does not stop the others.

    With `only`, just those are made whose names match one of these shell-style patterns. Parts of a suite may run on
    different machines; copy their folders into one afterwards.
    Networks of your own (`network.name: module:factory`) are imported only with `trust_code`.
    Raises Interrupted on Ctrl-C or SIGTERM, after every run under way has saved its state.
    """
    suite = read_suite(suite) if isinstance(suite, str) else suite
    if suite.search is not None:
        raise UserError(f"{suite.place} has a search; run it with search_suite")
    runs = expand(suite, seeds, data_dir, settings, only)
    options, execute = Options(out, device, jobs, trust_code), find_executor(on)
    todo = [run for run in runs if existing_result(run, options.folder(run)) is None]
    check_code(suite.place, todo, trust_code)
    # On a cluster, the data are where the workers are.
    missing = check_data(suite.place, todo) if on == "local" else []
    logger.info("%s: %s, in %s", suite.title, counted(len(runs), "run"), out)
    for line in missing:
        logger.warning("%s", line)
    return run_all(runs, options, execute, BenchScreen(runs, options, quiet=quiet))
