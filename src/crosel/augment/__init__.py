"""Batched image operations and the weak, strong and contrastive views made of them."""

from __future__ import annotations

from crosel.augment.ops import Op, OpTable
from crosel.augment.policies import AugmentSettings
from crosel.augment.views import Draw, FeatureView, ImageView, View, make_views

__all__ = ["AugmentSettings", "Draw", "FeatureView", "ImageView", "Op", "OpTable", "View", "make_views"]
