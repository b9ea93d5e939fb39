"""A small module in the place of timm, for tests of fine-tuning; `test_pretrained.py` takes the real one."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    import pytest

CONFIG = {
    "input_size": (3, 12, 12), "crop_pct": 0.75, "interpolation": "bilinear", "mean": (0.5,) * 3, "std": (0.25,) * 3,
}  # fmt: skip


class Tiny(nn.Module):
    """With what real ones have: a token before all layers, a sequence of blocks, batch norm, one size of images."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)) for _ in range(2)))
        self.recomputes = False

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.recomputes = enable

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (3, 12, 12), "the wrong size"
        x = self.stem(x) + self.token[:, None, None]
        if self.recomputes and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.finish, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.finish(x)

    def finish(self, x: Tensor) -> Tensor:
        return self.blocks(x).relu().mean(dim=(2, 3))


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's of this name: batch norm and an activation."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out


class Conv2dSame(nn.Conv2d):
    """As timm's of this name: a convolution that pads as TensorFlow does."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            pad = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [pad // 2, pad - pad // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, 1, self.groups)


BatchNormAct2d.__module__ = Conv2dSame.__module__ = "timm.layers"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The model `timm/tiny`; notes of every one whether it was made with pretrained weights."""
    made: list[bool] = []
    monkeypatch.setitem(sys.modules, "timm", module(made))
    return made


def module(made: list[bool]) -> Any:

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        made.append(pretrained)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0 if pretrained else len(made))
            return Tiny()

    fake: Any = types.ModuleType("timm")
    fake.list_models = lambda pretrained=False: ["tiny"]
    fake.create_model = create_model
    fake.get_pretrained_cfg = lambda name: types.SimpleNamespace(to_dict=lambda: CONFIG)
    fake.data = types.SimpleNamespace(resolve_data_config=lambda args, pretrained_cfg: pretrained_cfg)
    return fake
