"""What a person sees of a bench: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from crosel.bench.execution import Options, RunResult, last_row
from crosel.bench.suite import BenchRun
from crosel.utils.console import Screen
from crosel.utils.text import duration, percent


def figures(row: Mapping[str, Any]) -> str:
    """What matters of a line of metrics."""
    shown = (("test_accuracy", "accuracy"), ("selection_ratio", "S-ratio"), ("oracle_selection_accuracy", "S-acc"))
    return "  ".join(f"{name} {percent(row[key])}" for key, name in shown if isinstance(row.get(key), float))


class Progress(Screen):
    """Shows runs as they begin, go on and end."""

    def __init__(
        self, runs: Sequence[BenchRun], options: Options, stream: TextIO | None = None, quiet: bool = False
    ) -> None:
        super().__init__(stream, quiet)
        self.options = options
        self.total = len(runs)
        self.width = max((len(run.name) for run in runs), default=0)
        self.ended: Counter[str] = Counter()
        self.running: dict[str, tuple[BenchRun, float]] = {}

    def started(self, run: BenchRun) -> None:
        self.running[run.name] = (run, time.monotonic())
        if self.live:
            self.tick()
        else:
            self.say(f"{'start':<8} {run.name}")

    def finished(self, result: RunResult) -> None:
        self.running.pop(result.run.name, None)
        self.ended[result.status] += 1
        number = f"{sum(self.ended.values()):>{len(str(self.total))}}/{self.total}"
        rest = result.line if result.status == "failed" else figures(result.row)
        took = duration(result.seconds) if result.seconds else ""
        parts = (f"{result.status:<8} {result.run.name:<{self.width}}", number, rest, took)
        self.say("  ".join(part for part in parts if part))
        self.tick()

    def tick(self) -> None:
        """Draw the live table anew."""
        if self.live:
            from rich.text import Text

            most = max(0, shutil.get_terminal_size().lines - 2)  # so that the summary stays in sight
            running = self._running_lines()[:most]
            self.draw(Text("\n".join((*running, self.summary())), no_wrap=True, overflow="ellipsis"))

    def summary(self) -> str:
        counts = [f"{self.ended[name]} {name}" for name in ("done", "skipped", "failed", "stopped") if self.ended[name]]
        waiting = self.total - sum(self.ended.values()) - len(self.running)
        counts += [f"{n} {name}" for n, name in ((len(self.running), "running"), (waiting, "waiting")) if n]
        return f"{self.total} runs: {', '.join(counts)}"

    def _running_lines(self) -> list[str]:
        lines = []
        for run, since in self.running.values():
            row = last_row(self.options.folder(run))
            epoch = f"epoch {row.get('epoch', 0)}/{run.config.train.epochs}"
            parts = (f"{'running':<8} {run.name:<{self.width}}", epoch, figures(row))
            lines.append("  ".join(part for part in (*parts, duration(time.monotonic() - since)) if part))
        return lines
