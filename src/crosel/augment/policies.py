"""What the views may draw: the settings, the pool of the strong view and AutoAugment's policies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from crosel.augment.ops import Op
from crosel.utils.settings import Settings

Entry = tuple[Op, float]
Level = Annotated[int, Field(ge=0, le=255)]
Magnitude = Annotated[int, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]

SIGNED = (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)
ENHANCE = (Op.BRIGHTNESS, Op.COLOUR, Op.CONTRAST, Op.SHARPNESS)


class AugmentSettings(Settings):
    """How images and feature vectors are changed in the views."""

    flip: bool = Field(
        True,
        description="mirror half of the images left to right; off for digits and svhn unless you set it, and to be "
        "switched off for your own images if mirroring changes what they mean",
    )
    padding: int | None = Field(
        None, ge=0, description="pixels of reflected padding before the crop; null: an eighth of the side"
    )
    strong_ops: int = Field(2, ge=0, description="number of random operations in a strong view; default for CroSel: 1")
    strong_chance: Share = Field(0.5, description="probability that each of them is applied")
    strong_magnitudes: tuple[Magnitude, Magnitude] = Field(
        (1, 9), description="smallest and largest magnitude of an operation, on a scale of 0 to 10"
    )
    cutout: Share = Field(
        0.5, description="side of the cut-out square, as a share of the image side; 0: none; default for CroSel: 0.25"
    )
    cutout_fill: Level = Field(
        127,
        description="grey level of the cut-out square; where all images are darker, half of their brightest pixel by "
        "default",
    )
    fill: Level = Field(0, description="grey level of areas that rotating, shearing and moving uncover")
    policy: Literal["cifar10", "svhn"] = Field("cifar10", description="AutoAugment policy of the view `autoaugment`")
    feature_noise: float = Field(
        0.1, ge=0, description="standard deviation of the noise in strong views of standardised features"
    )
    feature_drop: Share = Field(0.1, description="probability that a strong view sets a feature to 0")
    weak_feature_noise: float = Field(
        0.0, ge=0, description="standard deviation of the noise in weak views of features; default for features: 0.3"
    )

    @field_validator("strong_magnitudes")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError("give the smallest magnitude first")
        return value


def strong_value(op: Op, magnitude: int, height: int, width: int) -> float:
    """FixMatch's scale of 0 to 10 for the strong view.

    Posterize keeps 4 + int(4 v / 10) bits, so a larger magnitude v means more bits and a milder change;
    solarize inverts from level 256 - int(256 v / 10) on, so a larger magnitude inverts more.
    """
    if op in ENHANCE:
        return magnitude * 0.9 / 10 + 0.05
    if op is Op.POSTERIZE:
        return 4 + magnitude * 4 // 10
    if op is Op.SOLARIZE:
        return 256 - magnitude * 256 // 10
    if op is Op.ROTATE:
        return magnitude * 30 / 10
    if op in (Op.SHEAR_X, Op.SHEAR_Y):
        return magnitude * 0.3 / 10
    if op in (Op.TRANSLATE_X, Op.TRANSLATE_Y):
        return int(magnitude * 0.3 / 10 * (width if op is Op.TRANSLATE_X else height))
    return 0.0


def strong_entries(magnitudes: tuple[int, int], height: int, width: int) -> list[Entry]:
    """Every (operation, magnitude, sign) of the fourteen operations, each operation equally often.

    A uniform draw from this list is a uniform draw of operation, magnitude and sign.
    """
    pool = [op for op in Op if op is not Op.INVERT]
    levels = range(magnitudes[0], magnitudes[1] + 1)
    return [
        (op, strong_value(op, v, height, width) * (sign if op in SIGNED else 1))
        for op in pool
        for v in levels
        for sign in (1, -1)
    ]


def policy_value(op: Op, magnitude: int, sign: int, height: int, width: int) -> float:
    """AutoAugment's magnitudes 0..9, evenly spaced over each range; enhancements go either way from 1."""
    share = magnitude / 9
    if op in ENHANCE:
        return 1 + sign * 0.9 * share
    if op is Op.POSTERIZE:
        return 8 - round(4 * share)
    if op is Op.SOLARIZE:
        return 256 * (1 - share)
    if op is Op.ROTATE:
        return sign * 30 * share
    if op in (Op.SHEAR_X, Op.SHEAR_Y):
        return sign * 0.3 * share
    if op in (Op.TRANSLATE_X, Op.TRANSLATE_Y):
        return sign * int(150 / 331 * share * (width if op is Op.TRANSLATE_X else height))
    return 0.0


def policy_entries(policy: str, height: int, width: int) -> list[Entry]:
    """Entry (step * 25 + sub-policy) * 2 + sign of a policy, then one identity."""
    entries = [
        (pair[step][0], policy_value(pair[step][0], pair[step][2], sign, height, width))
        for step in (0, 1)
        for pair in POLICIES[policy]
        for sign in (1, -1)
    ]
    return [*entries, (Op.IDENTITY, 0.0)]


Step = tuple[Op, float, int]

# The sub-policies found by AutoAugment (Cubuk et al., CVPR 2019, tables 7 and 9): two steps of (operation,
# probability, magnitude). Autocontrast, equalize and invert have no magnitude; the published number is kept.
CIFAR10: tuple[tuple[Step, Step], ...] = (
    ((Op.INVERT, 0.1, 7), (Op.CONTRAST, 0.2, 6)),
    ((Op.ROTATE, 0.7, 2), (Op.TRANSLATE_X, 0.3, 9)),
    ((Op.SHARPNESS, 0.8, 1), (Op.SHARPNESS, 0.9, 3)),
    ((Op.SHEAR_Y, 0.5, 8), (Op.TRANSLATE_Y, 0.7, 9)),
    ((Op.AUTOCONTRAST, 0.5, 8), (Op.EQUALIZE, 0.9, 2)),
    ((Op.SHEAR_Y, 0.2, 7), (Op.POSTERIZE, 0.3, 7)),
    ((Op.COLOUR, 0.4, 3), (Op.BRIGHTNESS, 0.6, 7)),
    ((Op.SHARPNESS, 0.3, 9), (Op.BRIGHTNESS, 0.7, 9)),
    ((Op.EQUALIZE, 0.6, 5), (Op.EQUALIZE, 0.5, 1)),
    ((Op.CONTRAST, 0.6, 7), (Op.SHARPNESS, 0.6, 5)),
    ((Op.COLOUR, 0.7, 7), (Op.TRANSLATE_X, 0.5, 8)),
    ((Op.EQUALIZE, 0.3, 7), (Op.AUTOCONTRAST, 0.4, 8)),
    ((Op.TRANSLATE_Y, 0.4, 3), (Op.SHARPNESS, 0.2, 6)),
    ((Op.BRIGHTNESS, 0.9, 6), (Op.COLOUR, 0.2, 8)),
    ((Op.SOLARIZE, 0.5, 2), (Op.INVERT, 0.0, 3)),
    ((Op.EQUALIZE, 0.2, 0), (Op.AUTOCONTRAST, 0.6, 0)),
    ((Op.EQUALIZE, 0.2, 8), (Op.EQUALIZE, 0.6, 4)),
    ((Op.COLOUR, 0.9, 9), (Op.EQUALIZE, 0.6, 6)),
    ((Op.AUTOCONTRAST, 0.8, 4), (Op.SOLARIZE, 0.2, 8)),
    ((Op.BRIGHTNESS, 0.1, 3), (Op.COLOUR, 0.7, 0)),
    ((Op.SOLARIZE, 0.4, 5), (Op.AUTOCONTRAST, 0.9, 3)),
    ((Op.TRANSLATE_Y, 0.9, 9), (Op.TRANSLATE_Y, 0.7, 9)),
    ((Op.AUTOCONTRAST, 0.9, 2), (Op.SOLARIZE, 0.8, 3)),
    ((Op.EQUALIZE, 0.8, 8), (Op.INVERT, 0.1, 3)),
    ((Op.TRANSLATE_Y, 0.7, 9), (Op.AUTOCONTRAST, 0.9, 1)),
)
SVHN: tuple[tuple[Step, Step], ...] = (
    ((Op.SHEAR_X, 0.9, 4), (Op.INVERT, 0.2, 3)),
    ((Op.SHEAR_Y, 0.9, 8), (Op.INVERT, 0.7, 5)),
    ((Op.EQUALIZE, 0.6, 5), (Op.SOLARIZE, 0.6, 6)),
    ((Op.INVERT, 0.9, 3), (Op.EQUALIZE, 0.6, 3)),
    ((Op.EQUALIZE, 0.6, 1), (Op.ROTATE, 0.9, 3)),
    ((Op.SHEAR_X, 0.9, 4), (Op.AUTOCONTRAST, 0.8, 3)),
    ((Op.SHEAR_Y, 0.9, 8), (Op.INVERT, 0.4, 5)),
    ((Op.SHEAR_Y, 0.9, 5), (Op.SOLARIZE, 0.2, 6)),
    ((Op.INVERT, 0.9, 6), (Op.AUTOCONTRAST, 0.8, 1)),
    ((Op.EQUALIZE, 0.6, 3), (Op.ROTATE, 0.9, 3)),
    ((Op.SHEAR_X, 0.9, 4), (Op.SOLARIZE, 0.3, 3)),
    ((Op.SHEAR_Y, 0.8, 8), (Op.INVERT, 0.7, 4)),
    ((Op.EQUALIZE, 0.9, 5), (Op.TRANSLATE_Y, 0.6, 6)),
    ((Op.INVERT, 0.9, 4), (Op.EQUALIZE, 0.6, 7)),
    ((Op.CONTRAST, 0.3, 3), (Op.ROTATE, 0.8, 4)),
    ((Op.INVERT, 0.8, 5), (Op.TRANSLATE_Y, 0.0, 2)),
    ((Op.SHEAR_Y, 0.7, 6), (Op.SOLARIZE, 0.4, 8)),
    ((Op.INVERT, 0.6, 4), (Op.ROTATE, 0.8, 4)),
    ((Op.SHEAR_Y, 0.3, 7), (Op.TRANSLATE_X, 0.9, 3)),
    ((Op.SHEAR_X, 0.1, 6), (Op.INVERT, 0.6, 5)),
    ((Op.SOLARIZE, 0.7, 2), (Op.TRANSLATE_Y, 0.6, 7)),
    ((Op.SHEAR_Y, 0.8, 4), (Op.INVERT, 0.8, 8)),
    ((Op.SHEAR_X, 0.7, 9), (Op.TRANSLATE_Y, 0.8, 3)),
    ((Op.SHEAR_Y, 0.8, 5), (Op.AUTOCONTRAST, 0.7, 3)),
    ((Op.SHEAR_X, 0.7, 2), (Op.INVERT, 0.1, 5)),
)
POLICIES = {"cifar10": CIFAR10, "svhn": SVHN}
