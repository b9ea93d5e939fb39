"""What CroSel does about sets that may miss the truth: its setting `outside`. Beyond the paper, and off by default.

An example that all networks are stable and confident about (β2, β3), with one same label outside S, is dropped, or
taken with that label, from the moment the banks are full, and until they are so about a label inside S
(`update_outside`): a warm-up that goes on with a wrong set learns it by heart. Either way it leaves co-mix, whose
targets lie in S and would be wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crosel.methods.bank import agreed_labels, label_is_candidate


def update_outside(known: Tensor, stable: Tensor, labels: Tensor, candidates: Tensor) -> Tensor:
    """Labels [n] of the examples whose set seems to miss the truth (-1: the others), after one more epoch.

    Where all networks are stable and confident ([v, n]) about one same label ([v, n]), that label decides, outside S or
    inside. Elsewhere what was known stays: networks waver while they learn, and an example that is sent back to its
    wrong set each time is soon learnt by heart.
    """
    agreed = agreed_labels(labels, stable)
    inside = label_is_candidate(agreed.long(), candidates)
    return torch.where(agreed >= 0, agreed.masked_fill(inside, -1), known)


class Keep(nn.Module):
    """Every set is believed, as in the paper. What the other treatments do, they do by other answers."""

    def __init__(self, n: int) -> None:
        super().__init__()

    def update(self, stable: Tensor, labels: Tensor, candidates: Tensor) -> None:
        """Look at what the networks [v, n] say after an epoch."""

    def selected_share(self, learnt: Tensor) -> float:
        """r_s, from what each network learns with one label [v, n]."""
        return float(learnt.float().mean())

    def warmup_pool(self) -> Tensor | None:
        """The examples that the warm-up draws from; None: all."""
        return None

    def selected(self, chosen: Tensor) -> Tensor:
        """The examples [v, n] that are learnt with one label, of those that each network's teacher chose."""
        return chosen

    def mixed(self, wanted: Tensor | None) -> Tensor | None:
        """The examples [n] that co-mix sees, of those that its scope wants; None: all."""
        return wanted

    def labels(self, labels: Tensor, index: Tensor) -> Tensor:
        """The labels [B] of a selected batch."""
        return labels

    def sets(self, sets: Tensor, index: Tensor) -> Tensor:
        """The candidate sets [B, k] of a batch of the warm-up."""
        return sets

    def metrics(self) -> dict[str, float]:
        return {}


class _Outside(Keep):
    label: Tensor  # int32 [n]: what the set seems to miss; -1: nothing

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.register_buffer("label", torch.full((n,), -1, dtype=torch.int32))

    @property
    def found(self) -> Tensor:
        """Examples whose set seems to miss the truth: bool [n]."""
        return self.label >= 0

    def update(self, stable: Tensor, labels: Tensor, candidates: Tensor) -> None:
        self.label.copy_(update_outside(self.label, stable, labels, candidates))

    def mixed(self, wanted: Tensor | None) -> Tensor | None:
        return ~self.found if wanted is None else wanted & ~self.found

    def metrics(self) -> dict[str, float]:
        return {"outside_ratio": float(self.found.float().mean())}


class Drop(_Outside):
    """They are left out everywhere, and do not count in r_s."""

    def selected_share(self, learnt: Tensor) -> float:
        left = learnt[:, ~self.found]
        return float(left.float().mean()) if left.numel() else 0.0

    def warmup_pool(self) -> Tensor | None:
        return None if bool(self.found.all()) else (~self.found).nonzero().squeeze(1)  # it must draw from something

    def selected(self, chosen: Tensor) -> Tensor:
        return chosen & ~self.found


class Take(_Outside):
    """They are learnt with the label that was found, and count as selected; in the warm-up it is their whole set."""

    def selected(self, chosen: Tensor) -> Tensor:
        return chosen | self.found

    def labels(self, labels: Tensor, index: Tensor) -> Tensor:
        taken = self.label[index].long()
        return torch.where(taken >= 0, taken, labels)

    def sets(self, sets: Tensor, index: Tensor) -> Tensor:
        label = self.label[index].long().unsqueeze(1)
        alone = torch.zeros_like(sets).scatter_(1, label.clamp(min=0), True)
        return torch.where(label >= 0, alone, sets)


TREATMENTS = {"keep": Keep, "drop": Drop, "take": Take}
