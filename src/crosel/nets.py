"""Networks by name: wide and plain residual networks, a small CNN, an MLP."""

from crosel.nn.factory import NetworkSettings
from crosel.nn.networks import MLP, Classifier, ResNet18, SmallCNN, WideResNet, wide_resnet

__all__ = ["MLP", "Classifier", "NetworkSettings", "ResNet18", "SmallCNN", "WideResNet", "wide_resnet"]
