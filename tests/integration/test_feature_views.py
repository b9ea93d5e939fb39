"""Noise on features is in units of their standard deviation: shifting and scaling a column changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from crosel.augment import AugmentSettings, make_views
from crosel.data.dataset import make_dataset
from crosel.methods.base import Stream
from crosel.training.batches import Normaliser, TrainingTensors


def strong_view(x: np.ndarray) -> torch.Tensor:
    data = make_dataset(x, candidates=np.ones((len(x), 2), bool))
    views = make_views(data.shape, AugmentSettings())
    tensors = TrainingTensors(data, views, Normaliser.of(data), torch.device("cpu"))
    index, streams = {"all": torch.arange(len(x))}, {"all": Stream(("strong",))}
    return tensors.batches(index, streams, torch.Generator().manual_seed(0))["all"]["strong"]


def test_shift_and_scale_of_features_do_not_matter() -> None:
    x = np.random.default_rng(0).normal(size=(200, 5))
    plain, moved = strong_view(x), strong_view(x * 50 + 1000)
    assert torch.allclose(plain, moved, atol=1e-3)
    assert 0.8 < float(plain.std()) < 1.2
    assert (plain == 0).any()  # dropped coordinates sit at the mean
