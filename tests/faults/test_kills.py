"""A short form of the soak with SIGKILL, over all methods; chosen moments of one run are in test_sigkill.py."""

from __future__ import annotations

from pathlib import Path

from soak import kills


def test_a_few_kills_over_all_methods(tmp_path: Path) -> None:
    score = kills.soak(tmp_path, kills=7, seed=4)
    assert score.kills == 7
    assert set(score.by_method) <= set(kills.METHODS)
    assert score.finished >= len(kills.METHODS)
    assert (score.lost_epochs, score.damaged) == (0, 0)
