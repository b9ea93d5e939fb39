"""Which sets miss the truth, from out-of-sample probabilities and without true labels: a mixture with one unknown.

With chance η a set of s labels is drawn from the k - 1 wrong ones; otherwise it is the truth with s - 1 others. If all
C(k-1, s) or C(k-1, s-1) sets are equally likely, a set misses the truth with the odds

    η / (1 - η)  ·  s / (k - s)  ·  p(outside S) / p(S)

where p is what networks say that did not train on the example. η is the mean of these chances over all examples; the
likelihood is concave in η, so EM finds it from anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LIKELY = 0.5  # a label outside the set is named if it is more likely the truth than not
_STEPS, _CONVERGED, _TINY = 1000, 1e-7, 1e-12


def missing_odds(probabilities: NDArray[Any], candidates: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What each example adds to the odds that its set misses the truth, [n]; a full set misses nothing."""
    k, size = candidates.shape[1], candidates.sum(axis=1)
    inside = np.where(candidates, probabilities, 0.0).sum(axis=1, dtype=np.float64).clip(_TINY, 1 - _TINY)
    odds: NDArray[np.float64] = np.where(size < k, size / np.maximum(k - size, 1) * (1 - inside) / inside, 0.0)
    return odds


def fit_missing(odds: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """η, and the chance that each set misses the truth."""
    share = 0.05
    for _ in range(_STEPS):
        chance = share * odds / (1 - share + share * odds)
        last, share = share, min(float(chance.mean()), 1 - _TINY)
        if abs(share - last) < _CONVERGED:
            break
    return share, chance


def missed_labels(probabilities: NDArray[Any], candidates: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The label outside the set that is more likely the truth than all others together, [n]; -1 where there is none."""
    _, chance = fit_missing(missing_odds(probabilities, candidates))
    beyond = np.where(candidates, 0.0, probabilities)
    label, total = beyond.argmax(axis=1), np.maximum(beyond.sum(axis=1, dtype=np.float64), _TINY)
    likely: NDArray[np.bool_] = chance * beyond.max(axis=1) / total > LIKELY
    return np.where(likely, label, -1)
