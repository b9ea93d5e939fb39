"""Load in a short form: the review page under fifty clients, a stream of predictions. The long forms: `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import growth, review


def test_growth_is_seen_and_noise_is_not() -> None:
    """The measure itself: a leak shows, a plateau after warming up does not."""
    assert growth.growth([100 + i for i in range(100)]) > 50
    assert growth.growth([50.0] * 10 + [100.0] * 90) == 0


def test_fifty_clients_for_a_moment(tmp_path: Path) -> None:
    result = review.run(tmp_path, None, clients=50, seconds=2)
    assert result["errors"] == 0
    assert result["requests"] > 50


@pytest.mark.slow
def test_a_stream_of_predictions(tmp_path: Path) -> None:
    result = growth.predict(tmp_path, None, rows=60_000)
    assert result["rows"] == 60_000
    assert result["grown_mib"] < growth.ALLOWED_MIB
