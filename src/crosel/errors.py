"""The ways in which a command ends early, each with its exit code: `UserError` for everything a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, said in one or two plain lines that name the place and the remedy. Exit code 2."""


class Interrupted(Exception):  # noqa: N818  (not an error)
    """Ctrl-C or SIGTERM: the step was finished and the state saved. Exit code 130."""


class Diverged(RuntimeError):  # noqa: N818
    """The loss is no longer a finite number; the last checkpoint is good. Exit code 2."""

    ids: tuple[str, ...] = ()  # of the examples in the first bad batch


class RankLost(RuntimeError):  # noqa: N818
    """Another process of the same run has ended; the last checkpoint is good. Exit code 1."""


class RankZeroFailed(Exception):  # noqa: N818
    """The run ends because of what rank 0 has found and says; other ranks only take its exit code."""

    def __init__(self, code: int = 2) -> None:
        super().__init__(f"rank 0 ended the run with exit code {code}")
        self.code = code
