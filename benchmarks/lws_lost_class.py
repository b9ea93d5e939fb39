"""Why LWS loses a class: runs on digits with one thing changed at a time, measured on held-out training images.

    python benchmarks/lws_lost_class.py run --variants "plain;hold-5" --seeds 0-15 --out FILE   # 15 s of a core per run
    python benchmarks/lws_lost_class.py table --out FILE                       # the tables in docs/methods/lws.md

FILE gets one line for each run. A run that is already there is not repeated. A quarter of the *training* images is
held out, a different quarter for every seed. The test images are not used. All runs have the preset demo/digits and
uniform q = 0.3. A class counts as lost if less than a tenth of its held-out images are recognised after the last
epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Arguments, add, chosen, digits, done, end_with, origin, read, seeds, some
from torch import Tensor
from torch.nn.functional import logsigmoid

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.methods import lws
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.trainer import fit, predict_chunks

LOST = 0.1


# --- what is changed ------------------------------------------------------------------------------------------------


def hold(epochs: int) -> Callable[[Session], None]:
    """Weights stay at 1/k for the first epochs."""

    def change(session: Session) -> None:
        update = session.method.after_step
        session.method.after_step = lambda b: update(b) if session.progress.epoch >= epochs else None

    return change


def even(session: Session) -> Tensor:
    """1/|S| on the labels in S, 1/(k - |S|) on the others."""
    sets = session.method.candidates
    inside, outside = (side / side.sum(1, keepdim=True).clamp(min=1) for side in (sets, ~sets))
    return inside + outside


def truth(session: Session) -> Tensor:
    """1 on the true label, which no method may know."""
    return torch.nn.functional.one_hot(torch.from_numpy(session.data.y), 10).float()


def fixed(rows: Callable[[Session], Tensor]) -> Callable[[Session], None]:
    """The weights inside S are fixed; those outside change as usual."""

    def change(session: Session) -> None:
        method, update, given = session.method, session.method.after_step, rows(session)

        def put() -> None:
            method.weights.copy_(torch.where(method.candidates, given, method.weights))

        def after_step(batches: Any) -> None:
            update(batches)
            put()

        put()
        method.after_step = after_step

    return change


def even_start(session: Session) -> None:
    """Weights start as two distributions, as after the first update, instead of at 1/k."""
    session.method.weights.copy_(even(session))


def later(epochs: int, change: Callable[[Session], None]) -> Callable[[Session], None]:
    """The change begins after some epochs."""

    def wait(session: Session) -> None:
        session.method.begin_epoch = lambda epoch: change(session) if epoch == epochs + 1 else None

    return wait


def swap(first: int, second: int) -> Callable[[Session], None]:
    """Two classes swap their starting values in the last layer."""

    def change(session: Session) -> None:
        head, to, of = session.method.networks[0].head, [first, second], [second, first]
        with torch.no_grad():
            head.weight[to], head.bias[to] = head.weight[of].clone(), head.bias[of].clone()

    return change


def fading_outside(session: Session) -> None:
    """Weights outside S sum to the probability out there, measured by what it is when nothing is known, and to 1 at
    most: images that are learnt push no longer."""
    update = lws.lws_weights

    def weights(logits: Tensor, candidates: Tensor, epsilon: float) -> Tensor:
        p = torch.softmax(logits, 1) * ~candidates
        sums = p.sum(1, keepdim=True) / (~candidates).float().mean(1, keepdim=True).clamp(min=0.1)
        return torch.where(candidates, 1.0, sums.clamp(max=1)) * update(logits, candidates, epsilon)

    lws.lws_weights = weights


def same_pass(session: Session) -> None:
    """New weights come from the pass that gave the loss, as in the other of the authors' two programs."""
    method = session.method
    network, seen = method.networks[0], []
    network.register_forward_hook(lambda module, args, out: seen.append(out.detach()) if module.training else None)

    def after_step(batches: Any) -> None:
        batch = batches["all"]
        rows = lws.lws_weights(seen[-1], method.candidates[batch.index])
        seen.clear()
        method.write(method.weights, batch, rows)

    method.after_step = after_step


def with_loss(inside: Callable[[Tensor], Tensor], outside: Callable[[Tensor], Tensor]) -> Callable[[Session], None]:
    """Another loss for each label instead of σ(-f) and σ(f), with the same weights."""

    def terms(logits: Tensor, candidates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(())
        return (
            torch.where(candidates, weights * inside(logits), zero).sum(1).mean(),
            torch.where(candidates, zero, weights * outside(logits)).sum(1).mean(),
        )

    def change(session: Session) -> None:
        lws.lws_terms = terms

    return change


logistic = with_loss(lambda f: -logsigmoid(f), lambda f: -logsigmoid(-f))
Variant = tuple[tuple[str, ...], Callable[[Session], None] | None]
VARIANTS: dict[str, Variant] = {
    "plain": ((), None),
    "hold-5": ((), hold(5)),
    "even-start": ((), even_start),
    "even-inside": ((), fixed(even)),
    "same-pass": ((), same_pass),
    "logistic": ((), logistic),
    "cross-entropy": (("method.loss=cross-entropy",), None),
    "fading-outside": ((), fading_outside),
    "even-5": ((), lambda session: (even_start(session), hold(5)(session))),
    "even-inside-from-1": ((), later(1, fixed(even))),
    "even-inside-from-10": ((), later(10, fixed(even))),
    "truth-from-10": ((), later(10, fixed(truth))),
    "logistic-from-10": ((), later(10, logistic)),
    "q0.1": (("candidates=uniform:q=0.1",), None),
    "q0.1, even-start": (("candidates=uniform:q=0.1",), even_start),
    "q0.5": (("candidates=uniform:q=0.5",), None),
    "q0.5, even-start": (("candidates=uniform:q=0.5",), even_start),
    "q0.5, cross-entropy": (("candidates=uniform:q=0.5", "method.loss=cross-entropy"), None),
    **{f"swap-{a}-{b}": ((), swap(a, b)) for a, b in ((8, 5), (9, 3), (9, 4), (8, 1), (8, 4))},
}


# --- one run --------------------------------------------------------------------------------------------------------


class Watch:
    """After each epoch, for every class c: its share of right answers, mean logit and weight of c on its own images,
    and what d loss / d bias of the class is made of."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, list[float]]] = []

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None: ...
    def on_checkpoint(self, session: Session) -> None: ...

    @torch.no_grad()
    def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
        f = torch.cat([out[0] for _, out in predict_chunks(session, session.data.x)])
        y, sets, w = torch.from_numpy(session.data.y), session.method.candidates, session.method.weights
        own = torch.nn.functional.one_hot(y, f.shape[1]).bool()
        slope = w * torch.sigmoid(f) * torch.sigmoid(-f)
        best_other = f.masked_fill(own | ~sets, -torch.inf).amax(1)
        rival = torch.isfinite(best_other)
        of = {
            "right": (f.argmax(1) == y).float(), "logit": f[own], "weight": w[own],
            "rival_logit": torch.where(rival, best_other, torch.zeros(())),
        }  # fmt: skip
        line = {name: [value[y == c].mean().item() for c in range(f.shape[1])] for name, value in of.items()}
        parts = {"pull_own": own, "pull_others": sets & ~own, "push": ~sets}
        line |= {name: (slope * mask).mean(0).tolist() for name, mask in parts.items()}
        line["bias"] = session.method.networks[0].head.bias.tolist()
        line["logit_on_others"] = [f[y != c, c].mean().item() for c in range(f.shape[1])]
        self.epochs.append({name: [round(v, 5) for v in values] for name, values in line.items()})


def prepare(seed: int, rule: str) -> Any:
    return draw_candidates(digits(seed, held_out=True), rule, seed)


def by_class(session: Session, x: Any, y: Any) -> list[float]:
    said = torch.cat([out[0] for _, out in predict_chunks(session, x)]).argmax(1).numpy()
    return [round(float((said[y == c] == c).mean()), 4) for c in range(10)]


def run(variant: str, seed: int, detail: bool) -> dict[str, Any]:
    started, (settings, change) = time.perf_counter(), VARIANTS[variant]
    values = {"source": "digits", "seed": seed, "candidates": "uniform:q=0.3"}
    config = build_config(preset="demo/digits", settings=["method.name=lws", *settings], values=values)
    data = prepare(seed, config.candidates)
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    terms, weights = lws.lws_terms, lws.lws_weights
    if change:
        change(session)
    watch = Watch()
    try:
        rows = fit(session, (watch,))
    finally:
        lws.lws_terms, lws.lws_weights = terms, weights
    held = by_class(session, data.x_test, data.y_test)
    return {
        "variant": variant, "seed": seed, "held_out_accuracy": round(rows[-1]["test_accuracy"], 4),
        "covering_rate": round(rows[-1]["covering_rate"], 4), "lost": [c for c in range(10) if held[c] < LOST],
        "held_out_by_class": held, "training_by_class": by_class(session, data.x, data.y),
        "mean_logit_after_epoch_1": round(sum(watch.epochs[0]["logit_on_others"]) / 10, 4),
        **({"epochs": watch.epochs} if detail else {}),
        "settings": list(settings), "seconds": round(time.perf_counter() - started, 1),
        **origin("cpu_count"),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| variant | runs | runs that lost a class | classes lost | mean accuracy |", "|---|---|---|---|---|"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        of = [row for row in rows if row["variant"] == variant]
        lost = [row for row in of if row["lost"]]
        classes = " ".join(f"{row['seed']}:{','.join(map(str, row['lost']))}" for row in lost)
        mean = sum(row["held_out_accuracy"] for row in of) / len(of)
        lines.append(f"| {variant} | {len(of)} | {len(lost)} | {classes} | {100 * mean:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--variants", default="plain")
    parser.add_argument("--seeds", type=seeds, default="0-15", help="a range, as in 0-9, or a list, as in 0,3")
    parser.add_argument("--detail", action="store_true", help="record everything that is watched, not only accuracies")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "table":
        print(table(some(read(given.out), given.out)))
        return
    torch.set_num_threads(1)
    variants = chosen(given.variants, VARIANTS, "--variants")
    for seed in given.seeds:
        for variant in variants:
            if (variant, seed) in done(given.out, "variant", "seed"):
                continue
            row = run(variant, seed, given.detail)
            add(row, given.out)
            print(*(row[name] for name in ("variant", "seed", "held_out_accuracy", "lost", "seconds")), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_with(main)
