"""The ways in which a command ends early, each with its exit code: `UserError` for everything a user can mend."""

from __future__ import annotations

import re

_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


_LONGEST = 3000


def on_one_line(text: str) -> str:
    """With escapes for control characters, which names may hold: they would make lines, or move the cursor. What is
    longer than any path is cut in the middle: the place and the remedy stay."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class UserError(ValueError):
    """Bad input, said in one plain line that names the place and the remedy. Exit code 2."""

    def __init__(self, text: str = "") -> None:
        super().__init__(on_one_line(text))


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
