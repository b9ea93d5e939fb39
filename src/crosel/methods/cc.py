"""CC, classifier-consistent partial-label learning.

Lei Feng et al., "Provably Consistent Partial-Label Learning", NeurIPS 2020.

Legend: f logits, p = softmax(f), S candidate set.

    L = mean of -log Σ_{j in S} p_j = mean of [logsumexp(f) - logsumexp(f on S)]      -> `crosel.methods.losses.cc_loss`

There is no state: candidate labels are never told apart except by what the network itself learns.

The released code takes the logarithm of a sum of probabilities, which can be 0; we stay in log space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field

from crosel.methods.base import Batch, Losses, Method, MethodSettings, Stream, register
from crosel.methods.losses import cc_loss


class CCSettings(MethodSettings):
    name: Literal["cc"] = "cc"
    view: Literal["plain", "weak", "strong"] = Field("weak", description="augmentation of the training batch")


@register
class CC(Method):
    name = "cc"
    title = "CC"
    paper = "Feng et al., Provably Consistent Partial-Label Learning, NeurIPS 2020"
    Settings = CCSettings
    settings: CCSettings

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream((self.settings.view,))}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch = batches["all"]
        logits = self.networks[0](batch[self.settings.view])
        return Losses(cc_loss(logits, self.candidates[batch.index], self.log_weights_of(batch)))
