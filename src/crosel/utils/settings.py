"""What all settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Settings do not change, unknown names are errors, and no number is infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
