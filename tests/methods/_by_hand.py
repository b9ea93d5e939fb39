"""Whole runs in numpy: networks, gradients, tables and metrics, written from the papers, in float64, without autograd.

Of the run that is repeated only the draws are taken: starting values, the examples and views of each step, and MixUp's
weights and partners. Everything else, the slopes of the losses too, is worked out here, mostly one example at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
MOMENTUM = 0.9


def softmax(f: Array) -> Array:
    return np.stack([np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in f])


def on_sets(f: Array, sets: Array, temperature: float = 1.0) -> Array:
    """p^(1/T) on each set, renormalised; 0 elsewhere."""
    p = np.zeros(f.shape)
    for i, row in enumerate(softmax(f)):
        sharp = np.array([row[j] ** (1 / temperature) if sets[i, j] else 0.0 for j in range(len(row))])
        p[i] = sharp / sharp.sum()
    return p


def one_hot(labels: Array, k: int) -> Array:
    return np.array([[float(j == label) for j in range(k)] for label in labels])


# --- losses: their values, and their slopes by the logits ----------------------------------------------------------


def soft_loss(f: Array, w: Array) -> tuple[float, Array]:
    """Mean of Σ w (-log p), for rows w that sum to 1."""
    p, n = softmax(f), len(f)
    return -(w * np.log(p)).sum() / n, (p - w) / n


def cc_loss(f: Array, sets: Array) -> tuple[float, Array]:
    """Mean of -log Σ_S p."""
    p, n = softmax(f), len(f)
    inside = [p[i, sets[i]].sum() for i in range(n)]
    return -np.log(inside).sum() / n, (p - on_sets(f, sets)) / n


def lws_loss(f: Array, sets: Array, w: Array, beta: float) -> tuple[float, Array]:
    """Mean of Σ_S w σ(-f) + β Σ_outside w σ(f). The slope of σ is σ(f)σ(-f)."""
    value, slope = 0.0, np.zeros(f.shape)
    for i, j in np.ndindex(*f.shape):
        up, down = 1 / (1 + np.exp(-f[i, j])), 1 / (1 + np.exp(f[i, j]))
        value += w[i, j] * down if sets[i, j] else beta * w[i, j] * up
        slope[i, j] = w[i, j] * up * down * (-1 if sets[i, j] else beta)
    return value / len(f), slope / len(f)


def outside_loss(f: Array, sets: Array) -> tuple[float, Array]:
    """Mean of -Σ_outside log(1 - p_j), whose slope by f_i is p_j (δ_ij - p_i) / (1 - p_j)."""
    value, slope = 0.0, np.zeros(f.shape)
    for row, p in enumerate(softmax(f)):
        for j in np.flatnonzero(~sets[row]):
            value -= np.log(1 - p[j])
            for i in range(len(p)):
                slope[row, i] += p[j] * (float(i == j) - p[i]) / (1 - p[j])
    return value / len(f), slope / len(f)


def contrast_loss(q: Array, others: Array, positive: Array, tau: float, all_queries: bool) -> tuple[float, Array]:
    """Mean over queries of the mean over their positives of -log [exp(q·z⁺/τ) / Σ_z exp(q·z/τ)], and its slope by q.

    With `all_queries`, z runs over the other queries as well, which then move too; positive [B, all z].
    """
    points = np.concatenate([q, others]) if all_queries else others
    value, slope = 0.0, np.zeros(q.shape)
    for i in range(len(q)):
        allowed = [j for j in range(len(points)) if not (all_queries and j == i)]
        scores = {j: float(q[i] @ points[j]) / tau for j in allowed}
        top = max(scores.values())
        whole = sum(np.exp(s - top) for s in scores.values())
        good = [j for j in allowed if positive[i, j]]
        for j in allowed:
            share = np.exp(scores[j] - top) / whole
            if j in good:
                value -= (scores[j] - top - np.log(whole)) / len(good)
            pull = (share - (1 / len(good) if j in good else 0.0)) / tau
            slope[i] += pull * points[j]
            if all_queries and j < len(q):
                slope[j] += pull * q[i]
    return value / len(q), slope / len(q)


# --- a network ------------------------------------------------------------------------------------------------------


@dataclass
class Net:
    """Linear, batch norm, ReLU, linear; or the last alone. Its arrays have the names of `crosel.nn.networks.MLP`."""

    a: dict[str, Array]
    passes: int = 0  # in training mode
    slopes: dict[str, Array] = field(default_factory=dict)
    speed: dict[str, Array] = field(default_factory=dict)

    def forward(self, x: Array, train: bool = True) -> tuple[Array, dict[str, Array]]:
        a = self.a
        if "body.0.weight" not in a:
            return x @ a["head.weight"].T + a["head.bias"], {"h": x}
        z = x @ a["body.0.weight"].T + a["body.0.bias"]
        mean, var = a["body.1.running_mean"], a["body.1.running_var"]
        if train:
            mean, var = z.mean(axis=0), z.var(axis=0)
            self.passes += 1
            a["body.1.running_mean"] = 0.9 * a["body.1.running_mean"] + 0.1 * mean
            a["body.1.running_var"] = 0.9 * a["body.1.running_var"] + 0.1 * z.var(axis=0, ddof=1)
        unit = (z - mean) / np.sqrt(var + 1e-5)
        h = np.maximum(0, a["body.1.weight"] * unit + a["body.1.bias"])
        seen = {"x": x, "unit": unit, "scale": 1 / np.sqrt(var + 1e-5), "h": h}
        return h @ a["head.weight"].T + a["head.bias"], seen

    def backward(self, seen: Mapping[str, Array], of_logits: Array, of_features: Array | float = 0.0) -> None:
        """Add the slopes by all parameters of a pass in training mode."""
        a = self.a
        self._add("head.weight", of_logits.T @ seen["h"])
        self._add("head.bias", of_logits.sum(axis=0))
        if "body.0.weight" not in a:
            return
        unit = seen["unit"]
        of_h = (of_logits @ a["head.weight"] + of_features) * (seen["h"] > 0)
        self._add("body.1.weight", (of_h * unit).sum(axis=0))
        self._add("body.1.bias", of_h.sum(axis=0))
        of_unit = of_h * a["body.1.weight"]
        of_z = seen["scale"] * (of_unit - of_unit.mean(axis=0) - unit * (of_unit * unit).mean(axis=0))
        self._add("body.0.weight", of_z.T @ seen["x"])
        self._add("body.0.bias", of_z.sum(axis=0))

    def _add(self, name: str, slope: Array) -> None:
        self.slopes[name] = self.slopes.get(name, 0.0) + slope

    def step(self, lr: float, decay: float) -> None:
        """SGD with momentum; weight decay is part of the slope. Parameters without a slope stay."""
        for name, slope in self.slopes.items():
            self.speed[name] = MOMENTUM * self.speed.get(name, 0.0) + slope + decay * self.a[name]
            self.a[name] = self.a[name] - lr * self.speed[name]
        self.slopes = {}


# --- a run ----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What was drawn for a step: the examples and views of each stream, λ' and partners of each network."""

    index: dict[str, Array]
    views: dict[str, dict[str, Array]]
    mixes: list[tuple[Array, Array]]  # (partner, weight)


@dataclass
class Data:
    x: Array
    sets: Array
    y: Array
    x_test: Array
    y_test: Array


def named(start: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in start.items() if name.startswith(prefix)}


class Run:
    """One network; what a method adds is in its subclass."""

    networks = 1

    def __init__(self, data: Data, start: Mapping[str, Array], settings: Any, epochs: int) -> None:
        self.data, self.settings, self.epochs = data, settings, epochs
        self.n, self.k = data.sets.shape
        # Standardised by the training examples.
        self.mean, self.std = data.x.mean(axis=0), data.x.std(axis=0)
        self.nets = [Net(named(start, f"networks.{v}.")) for v in range(self.networks)]
        self.uniform = np.array([row / row.sum() for row in data.sets.astype(float)])
        self.begin(start)

    def begin(self, start: Mapping[str, Array]) -> None: ...

    def begin_epoch(self, epoch: int) -> None: ...

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        raise NotImplementedError

    def end_epoch(self, epoch: int) -> dict[str, float]:
        return {}

    def combine(self, outputs: list[Array]) -> Array:
        return softmax(sum(outputs) / len(outputs))

    def tables(self) -> dict[str, Array]:
        return {}

    def standardised(self, x: Array) -> Array:
        return (x - self.mean) / self.std

    def update(self, lr: float, decay: float) -> None:
        for net in self.nets:
            net.step(lr, decay)

    def measure(self) -> dict[str, float]:
        """Plain examples in evaluation mode: covering rate, approximated accuracy, test accuracies."""
        self.outputs = [net.forward(self.standardised(self.data.x), train=False)[0] for net in self.nets]
        p = self.combine(self.outputs)
        covered, approximated = 0, 0.0
        for row, inside in zip(p, self.data.sets, strict=True):
            if inside[row.argmax()]:
                covered += 1
                approximated += row.max() / row[inside].sum()
        tested = [net.forward(self.standardised(self.data.x_test), train=False)[0] for net in self.nets]
        out = {"covering_rate": covered / self.n, "approximated_accuracy": approximated / self.n}
        out["test_accuracy"] = float(np.mean(self.combine(tested).argmax(axis=1) == self.data.y_test))
        if len(tested) > 1:
            for v, f in enumerate(tested, 1):
                out[f"test_accuracy_{v}"] = float(np.mean(f.argmax(axis=1) == self.data.y_test))
        return out

    def repeat(self, epochs: list[list[Step]], lr: float, decay: float) -> list[dict[str, float]]:
        rows = []
        for epoch, steps in enumerate(epochs, 1):
            self.begin_epoch(epoch)
            rate = lr / 10 if epoch > self.epochs / 2 else lr
            rate = rate / 10 if epoch > 0.75 * self.epochs else rate
            reports = [self.step(drawn, rate, decay) for drawn in steps]
            row = {name: sum(report[name] for report in reports) / len(reports) for name in reports[0]}
            rows.append({"lr": rate, **row, **self.measure(), **self.end_epoch(epoch)})
        return rows


class CC(Run):
    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        f, seen = self.nets[0].forward(drawn.views["all"][self.settings.view])
        loss, slope = cc_loss(f, self.data.sets[drawn.index["all"]])
        self.nets[0].backward(seen, slope)
        self.update(lr, decay)
        return {"loss": loss}


class PRODEN(Run):
    def begin(self, start: Mapping[str, Array]) -> None:
        self.w = self.uniform.copy()

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        index = drawn.index["all"]
        f, seen = self.nets[0].forward(drawn.views["all"][self.settings.view])
        loss, slope = soft_loss(f, self.w[index])
        self.w[index] = on_sets(f, self.data.sets[index])
        self.nets[0].backward(seen, slope)
        self.update(lr, decay)
        return {"loss": loss}

    def tables(self) -> dict[str, Array]:
        return {"weights": self.w}


class LWS(Run):
    def begin(self, start: Mapping[str, Array]) -> None:
        self.w = np.full(self.data.sets.shape, 1 / self.k)

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        index, x = drawn.index["all"], drawn.views["all"][self.settings.view]
        sets = self.data.sets[index]
        f, seen = self.nets[0].forward(x)
        loss, slope = lws_loss(f, sets, self.w[index], self.settings.beta)
        inside = lws_loss(f, sets, self.w[index], 0.0)[0]
        self.nets[0].backward(seen, slope)
        self.update(lr, decay)
        for i, p, inner in zip(index, softmax(self.nets[0].forward(x)[0]), sets, strict=True):
            for side in (inner, ~inner):
                self.w[i, side] = p[side] / (p[side].sum() + self.k * 1e-8)
        others = (loss - inside) / self.settings.beta
        return {"loss": loss, "loss_candidates": inside, "loss_others": others}

    def tables(self) -> dict[str, Array]:
        return {"weights": self.w}


class CRDPLL(PRODEN):
    def begin_epoch(self, epoch: int) -> None:
        self.weight = min((epoch - 1) / (self.epochs / 2), 1.0) * self.settings.consistency

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        index, net = drawn.index["all"], self.nets[0]
        sets, w = self.data.sets[index], self.w[index]
        passes = [net.forward(x) for x in drawn.views["all"].values()]
        supervised, slope = outside_loss(passes[0][0], sets)
        entropy = sum(-p * np.log(p) for row in w for p in row if p > 0) / len(w)
        consistency = 0.0
        for number, (f, seen) in enumerate(passes):
            cross, slope_of_view = soft_loss(f, w)
            consistency += cross - entropy
            net.backward(seen, self.weight * slope_of_view + (slope if number == 0 else 0.0))
        product = np.prod([softmax(f) ** (1 / 3) for f, _ in passes], axis=0) * sets
        self.w[index] = [row / row.sum() for row in product]
        self.update(lr, decay)
        loss = supervised + self.weight * consistency
        return {"loss": loss, "loss_supervised": supervised, "loss_consistency": consistency}

    def end_epoch(self, epoch: int) -> dict[str, float]:
        return {"consistency_weight": self.weight}


class PoP(PRODEN):
    def begin(self, start: Mapping[str, Array]) -> None:
        super().begin(start)
        self.sets, self.past, self.theta = self.data.sets.copy(), [], self.settings.threshold

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        index, net = drawn.index["all"], self.nets[0]
        passes = [net.forward(x) for x in drawn.views["all"].values()]
        total = 0.0
        for f, seen in passes:
            loss, slope = soft_loss(f, self.w[index])
            net.backward(seen, slope / 3)
            total += loss / 3
        self.w[index] = on_sets(passes[0][0], self.sets[index])
        self.update(lr, decay)
        return {"loss": total}

    def end_epoch(self, epoch: int) -> dict[str, float]:
        s, done = self.settings, epoch - 1
        self.past = [*self.past, self.w.copy()][-s.history :]
        if done >= s.warm_up and (done - s.warm_up) % s.every == 0:
            mean, changed = sum(self.past) / s.history, 0
            for i, row in enumerate(mean):
                for j in np.flatnonzero(self.sets[i]):
                    if row[j] / row.max() < self.theta:
                        self.sets[i, j] = False
                        changed += 1
                self.w[i] = row * self.sets[i] / (row * self.sets[i]).sum()
            if changed < s.settled * self.n * self.k and self.theta < s.cap:
                self.theta = min(s.cap, self.theta * (1 + s.growth))
        return {"threshold": self.theta, "purified_set_size": self.sets.sum() / self.n}

    def tables(self) -> dict[str, Array]:
        return {"weights": self.w, "purified": self.sets, "threshold": np.array(self.theta)}


class PiCO(PRODEN):
    def begin(self, start: Mapping[str, Array]) -> None:
        super().begin(start)
        self.head, self.key_head = named(start, "head."), named(start, "key_head.")
        self.key = Net(named(start, "key_network."))
        self.speed: dict[str, Array] = {}
        self.prototypes = np.zeros((self.k, self.settings.dimensions))
        self.queue = [(key, -1) for key in start["queue"]]

    def begin_epoch(self, epoch: int) -> None:
        self.warm, self.phi = epoch <= self.settings.proto_start, 0.95 - 0.15 * (epoch - 1) / self.epochs

    @staticmethod
    def embed(head: Mapping[str, Array], h: Array) -> tuple[Array, Array, Array]:
        middle = np.maximum(0, h @ head["0.weight"].T + head["0.bias"])
        raw = middle @ head["2.weight"].T + head["2.bias"]
        return raw / np.linalg.norm(raw, axis=1, keepdims=True), raw, middle

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        s, net, index = self.settings, self.nets[0], drawn.index["all"]
        sets, size = self.data.sets[index], len(index)
        x, x_key = drawn.views["all"].values()
        f, seen = net.forward(x)
        q, raw, middle = self.embed(self.head, seen["h"])
        labels = [max(np.flatnonzero(sets[i]), key=lambda j, i=i: f[i, j]) for i in range(size)]
        if not self.warm:
            for i in range(size):
                near = max(np.flatnonzero(sets[i]), key=lambda j, i=i: q[i] @ self.prototypes[j])
                self.w[index[i]] = self.phi * self.w[index[i]] + (1 - self.phi) * one_hot(np.array([near]), self.k)[0]
        for label, embedded in zip(labels, q, strict=True):
            old = self.prototypes[label]
            self.prototypes[label] = s.proto_momentum * old + (1 - s.proto_momentum) * embedded
        self.prototypes = np.array([row / (np.linalg.norm(row) or 1.0) for row in self.prototypes])

        m = s.key_momentum
        for theirs, ours in ((self.key.a, net.a), (self.key_head, self.head)):
            for name in ours:
                if "running" not in name and "num_batches" not in name:
                    theirs[name] = m * theirs[name] + (1 - m) * ours[name]
        keys = self.embed(self.key_head, self.key.forward(x_key)[1]["h"])[0]
        queue, tags = np.array([key for key, _ in self.queue]), [tag for _, tag in self.queue]
        if self.warm:  # every query has its own key and the queue
            contrast, of_q = 0.0, np.zeros(q.shape)
            for i in range(size):
                first = np.eye(1, 1 + len(queue), dtype=bool)
                others = np.concatenate([keys[i : i + 1], queue])
                value, slope = contrast_loss(q[i : i + 1], others, first, s.temperature, all_queries=False)
                contrast += value / size
                of_q[i] = slope[0] / size
        else:
            positive = np.array([[a == b for b in (*labels, *labels, *tags)] for a in labels])
            contrast, of_q = contrast_loss(q, np.concatenate([keys, queue]), positive, s.temperature, all_queries=True)
        self.queue = [*self.queue, *zip(keys, labels, strict=True)][-len(self.queue) :]

        classified, slope = soft_loss(f, self.w[index])
        of_q = s.contrast * of_q
        # Back through the unit length, and through the head.
        of_raw = (of_q - q * (of_q * q).sum(axis=1, keepdims=True)) / np.linalg.norm(raw, axis=1, keepdims=True)
        of_middle = (of_raw @ self.head["2.weight"]) * (middle > 0)
        slopes = {
            "2.weight": of_raw.T @ middle, "2.bias": of_raw.sum(axis=0),
            "0.weight": of_middle.T @ seen["h"], "0.bias": of_middle.sum(axis=0),
        }  # fmt: skip
        net.backward(seen, slope, of_middle @ self.head["0.weight"])
        for name, of_head in slopes.items():
            self.speed[name] = MOMENTUM * self.speed.get(name, 0.0) + of_head + decay * self.head[name]
            self.head[name] = self.head[name] - lr * self.speed[name]
        self.update(lr, decay)
        loss = classified + s.contrast * contrast
        return {"loss": loss, "loss_class": classified, "loss_contrast": contrast}

    def end_epoch(self, epoch: int) -> dict[str, float]:
        return {"phi": self.phi}

    def tables(self) -> dict[str, Array]:
        heads = {f"head.{name}": a for name, a in self.head.items()}
        heads |= {f"key_head.{name}": a for name, a in self.key_head.items()}
        heads |= {f"key_network.{name}": a for name, a in self.key.a.items() if "num_batches" not in name}
        return {"weights": self.w, "prototypes": self.prototypes, **heads}


class CroSel(Run):
    def __init__(self, data: Data, start: Mapping[str, Array], settings: Any, epochs: int) -> None:
        self.networks = settings.networks
        super().__init__(data, start, settings, epochs)

    def begin(self, start: Mapping[str, Array]) -> None:
        self.banks: list[list[Array]] = [[] for _ in self.nets]
        self.chosen: list[dict[int, int]] = [{} for _ in self.nets]  # D_sel of each: example -> label
        self.lambda_d = 0.0

    def begin_epoch(self, epoch: int) -> None:
        s = self.settings
        self.warm = epoch <= s.warmup
        share = sum(len(chosen) / self.n for chosen in self.chosen) / len(self.nets) if s.dynamic_lambda else 0.0
        self.lambda_d = 0.0 if self.warm or s.scope == "none" else (1 - share) * s.lambda_cr

    def step(self, drawn: Step, lr: float, decay: float) -> dict[str, float]:
        parts = [self._warm_up(v, drawn) if self.warm else self._select(v, drawn) for v in range(len(self.nets))]
        self.update(lr, decay)
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

    def _warm_up(self, v: int, drawn: Step) -> dict[str, float]:
        stream, view = f"all_{v}", self.settings.warmup_view
        f, seen = self.nets[v].forward(drawn.views[stream][view])
        loss, slope = cc_loss(f, self.data.sets[drawn.index[stream]])
        self.nets[v].backward(seen, slope)
        return {"loss": loss, "loss_selected": 0.0, "loss_comix": 0.0}

    def _select(self, v: int, drawn: Step) -> dict[str, float]:
        s, net = self.settings, self.nets[v]
        taught = self.chosen[-1 - v]  # by the other network; one network teaches itself
        picked, mixed = drawn.index.get(f"selected_{v}"), drawn.index.get(f"all_{v}")
        assert (picked is not None) == bool(taught)
        assert (mixed is not None) == (s.scope == "all" or (s.scope == "unselected" and len(taught) < self.n))
        selected = comix = 0.0
        if mixed is not None:
            assert s.scope == "all" or not set(mixed.tolist()) & set(taught)
            x_w, x_s = (drawn.views[f"all_{v}"][view] for view in ("weak", "strong"))
            x, sets = np.concatenate([x_w, x_s]), self.data.sets[mixed]
            f, _ = net.forward(x, train=s.target_mode == "train")
            of_weak, of_strong = f[: len(x_w)], f[len(x_w) :]
            p = np.concatenate([on_sets(of_strong, sets, s.temperature), on_sets(of_weak, sets, s.temperature)])
            partner, weight = drawn.mixes.pop(0)
            share = np.broadcast_to(weight, len(x))[:, None]
            x, p = share * x + (1 - share) * x[partner], share * p + (1 - share) * p[partner]
        if picked is not None:
            f, seen = net.forward(drawn.views[f"selected_{v}"][s.selected_view])
            labels = np.array([taught[int(i)] for i in picked])
            selected, slope = soft_loss(f, one_hot(labels, self.k))
            net.backward(seen, slope)
        if mixed is not None:
            f, seen = net.forward(x)
            comix, slope = soft_loss(f, p)
            net.backward(seen, self.lambda_d * slope)
        return {"loss": selected + self.lambda_d * comix, "loss_selected": selected, "loss_comix": comix}

    def end_epoch(self, epoch: int) -> dict[str, float]:
        s, right, shares = self.settings, [], []
        for v, f in enumerate(self.outputs):
            self.banks[v] = [*self.banks[v], softmax(f)][-s.bank_length :]
            past, self.chosen[v] = self.banks[v], {}
            for i in range(self.n):
                label = int(past[-1][i].argmax())
                first = self.data.sets[i, label]
                second = len(past) == s.bank_length and all(q[i].argmax() == label for q in past)
                third = sum(q[i].max() for q in past) / s.bank_length > s.gamma
                if all((first, second, third)[criterion - 1] for criterion in s.criteria):
                    self.chosen[v][i] = label
            shares.append(len(self.chosen[v]) / self.n)
            if self.chosen[v]:
                right.append(np.mean([self.data.y[i] == label for i, label in self.chosen[v].items()]))
        out = {"lambda_d": self.lambda_d, "selection_ratio": sum(shares) / len(shares)}
        out |= {f"selection_ratio_{v}": share for v, share in enumerate(shares, 1)} if len(shares) > 1 else {}
        return out | ({"oracle_selection_accuracy": sum(right) / len(right)} if right else {})

    def combine(self, outputs: list[Array]) -> Array:
        if self.settings.ensemble == "probabilities":
            return sum(softmax(f) for f in outputs) / len(outputs)
        return super().combine(outputs)

    def tables(self) -> dict[str, Array]:
        selected = [[i in chosen for i in range(self.n)] for chosen in self.chosen]
        labels = [bank[-1].argmax(axis=1) for bank in self.banks]
        banks = {f"banks.{v}.confidence": np.max(bank, axis=2) for v, bank in enumerate(self.banks)}
        banks |= {f"banks.{v}.labels": np.argmax(bank, axis=2) for v, bank in enumerate(self.banks)}
        return {"selected": np.array(selected), "labels": np.array(labels), **banks}
