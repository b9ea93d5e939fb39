"""Out-of-sample judgement: who trains on what, what a killed run keeps, and what labels are made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from crosel import PartialLabelClassifier
from crosel.candidates import superclass, uniform
from crosel.config import build_config
from crosel.data.dataset import make_dataset
from crosel.errors import Diverged, Interrupted, UserError
from crosel.runs import folds as folds_module
from crosel.runs.folds import assign_folds, drawn_at_random, out_of_sample, read_out_of_sample
from crosel.runs.label_error import OutOfSample, within_sets
from crosel.runs.result import Result, judge_labels
from crosel.training.build import better_method, build_session, resolve
from crosel.training.trainer import fit
from crosel.utils.console import Console


def blobs(n=60, k=3, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, k, n)
    return (np.eye(k)[y] * 3 + rng.normal(size=(n, k))).astype(np.float32), y


def session(sets=None, settings=(), groups=None, n=60):
    x, y = blobs(n)
    sets = uniform(y, 3, 0.3, seed=0) if sets is None else sets
    data = make_dataset(x, sets, y, classes=3, place="test", groups=groups)
    values = {"source": "memory", "method": {"name": "proden"}, "train": {"epochs": 3, "folds": 3}}
    config = build_config(settings=settings, values=values)
    return build_session(resolve(config, data), data, torch.device("cpu"))


def test_one_bar_for_all_folds():
    shown = []

    class Watch(Console):
        def show(self, text, done=None, total=None):
            shown.append((text, done, total))

    out_of_sample(session(settings=["train.log_every=1"]), console=Watch(quiet=True))
    assert shown[0][0] == "part 1/3  epoch 1/3"
    assert [text for text, *_ in shown][-1] == "part 3/3  epoch 3/3"
    done = [done for _, done, _ in shown]
    assert done == sorted(done)
    assert (shown[-1][1], shown[-1][2]) == (pytest.approx(3), 3)


@pytest.mark.parametrize(("images", "rows", "method", "better"), [
    (False, 800, "pico", None), (False, 800, "crosel", "pico"), (False, 800, "pop", "pico"),
    (False, 500, "crosel", None), (False, 500, "proden", "crosel"), (True, 800, "crosel", None),
    (False, 499, "proden", None),
])  # fmt: skip
def test_the_method_for_features_is_named(images, rows, method, better):
    """800 rows for 300 features and 2 classes are many: a linear classifier has 600 weights. Fewer than 500 are fewer
    than in any trial."""
    x = np.zeros((rows, 4, 4), np.uint8) if images else np.zeros((rows, 300))
    data = make_dataset(x, np.ones((rows, 2), bool))
    config = build_config(values={"source": "memory", "method": {"name": method}})
    assert better_method(build_session(resolve(config, data), data, torch.device("cpu"))) == better
    weighed = replace(data, weights=np.ones((rows, 2), np.float32))  # which not every method learns from
    assert better_method(build_session(resolve(config, weighed), weighed, torch.device("cpu"))) is None


@pytest.mark.parametrize(("rows", "settings", "phi", "queue"), [
    (8, [], (0.99, 0.95), 512), (8, ["method.phi_end=0.7", "method.queue=9"], (0.99, 0.7), 9),
    (8, ["network.hidden=[4]"], (0.95, 0.8), 8192), (5, [], (0.95, 0.8), 8192),
])  # fmt: skip
def test_pico_moves_its_weights_more_slowly_on_many_rows_of_features(rows, settings, phi, queue):
    data = make_dataset(np.zeros((rows, 3)), np.ones((rows, 2), bool))
    config = build_config(settings=["source=memory", "method.name=pico", *settings])
    method = resolve(config, data).method
    assert ((method.phi_start, method.phi_end), method.queue) == (phi, queue)


@pytest.mark.parametrize(("n", "k"), [(10, 2), (11, 3), (7, 7)])
def test_folds_are_of_equal_sizes_but_for_one(n, k):
    fold = assign_folds(n, k, seed=3)
    sizes = np.bincount(fold, minlength=k)
    assert sizes.sum() == n
    assert sizes.max() - sizes.min() <= 1
    assert (fold == assign_folds(n, k, seed=3)).all()


@pytest.mark.parametrize("folds", [1, 61])
def test_numbers_of_folds_that_make_no_sense_are_refused_before_training(folds):
    with pytest.raises(UserError, match=r"train\.folds"):
        session(settings=[f"train.folds={folds}"])


def test_no_network_judges_what_it_trained_on(monkeypatch):
    trained = []
    real = folds_module.build_session

    def build(config, data, *rest):
        trained.append({int(name) for name in data.ids})
        assert data.y is None
        return real(config, data, *rest)

    monkeypatch.setattr(folds_module, "build_session", build)
    run = session()
    p = out_of_sample(run).probabilities
    fold = assign_folds(run.data.n, 3, run.config.seed)
    assert [set(range(60)) - rows for rows in trained] == [set(np.flatnonzero(fold == k)) for k in range(3)]
    assert p.sum(axis=1) == pytest.approx(1)


def test_a_killed_run_goes_on_with_the_next_fold(tmp_path, monkeypatch):
    run, path = session(), tmp_path / "folds.npz"
    whole = out_of_sample(run)
    built, real = [], folds_module.build_session
    monkeypatch.setattr(folds_module, "build_session", lambda *given: built.append(1) or real(*given))
    with pytest.raises(Interrupted):
        out_of_sample(run, path, stop_requested=lambda: len(built) > 1)
    assert len(built) == 2
    assert read_out_of_sample(path, run) is None
    again = out_of_sample(run, path)
    assert len(built) == 4, "the first fold is not trained again"
    for found in (again, read_out_of_sample(path, run)):
        assert (found.probabilities == whole.probabilities).all()
        assert found.witness is None


def test_labels_that_networks_selected_are_judged_by_proden(tmp_path, monkeypatch):
    by_crosel, path = session(settings=["method.name=crosel"]), tmp_path / "folds.npz"
    shown, built, real = [], [], folds_module.build_session
    monkeypatch.setattr(folds_module, "build_session", lambda *given: built.append(1) or real(*given))

    class Watch(Console):
        def show(self, text, done=None, total=None):
            shown.append(done)

    with pytest.raises(Interrupted):
        out_of_sample(by_crosel, path, stop_requested=lambda: len(built) > 3)  # by PRODEN without the second part
    found = out_of_sample(by_crosel, path, console=Watch(quiet=True))
    assert len(built) == 8, "the part that was broken off is done again, the first is not"
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(3)
    assert (found.witness == out_of_sample(session()).probabilities).all()
    assert not np.allclose(found.witness, found.probabilities, atol=0.01)
    again = read_out_of_sample(path, by_crosel)
    assert (again.witness == found.witness).all()

    result = Result.of(by_crosel, out_of_sample=again)
    sets = by_crosel.data.candidates
    labels, confidence, error = judge_labels(found, sets)
    assert (result.labels == np.where(sets, found.probabilities, -1).argmax(axis=1)).all()
    assert (result.labels == labels).all()
    assert (result.confidence == confidence).all()
    assert result.error == error
    np.savez(path, **{name: array for name, array in np.load(path).items() if name != "witness"})
    assert read_out_of_sample(path, by_crosel) is None


def test_sets_drawn_by_a_rule_need_no_witness():
    assert out_of_sample(session(settings=["method.name=crosel", "candidates=uniform:q=0.3"])).witness is None


def test_folds_that_diverge_leave_the_run_without_them(monkeypatch, caplog):
    def diverge(*_):
        raise Diverged("the loss is no longer finite")

    monkeypatch.setattr(folds_module, "fit", diverge)
    assert out_of_sample(session()) is None
    assert "no longer finite" in caplog.text


def test_what_is_saved_of_other_sets_is_not_used(tmp_path):
    path = tmp_path / "folds.npz"
    out_of_sample(session(), path)
    assert read_out_of_sample(path, session(sets=np.ones((60, 3), bool))) is None
    path.write_bytes(path.read_bytes()[:100])
    assert read_out_of_sample(path, session()) is None


def test_labels_and_confidence_come_from_the_folds_and_the_weights_do_not_change():
    run, bare = session(), session(settings=["train.folds=0"])
    fit(run)
    fit(bare)
    found = out_of_sample(run)
    for name, tensor in bare.method.state_dict().items():
        assert torch.equal(tensor, run.method.state_dict()[name]), name
    result, before = Result.of(run, out_of_sample=found), Result.of(bare)
    sets, p = run.data.candidates, found.probabilities
    assert before.error is None
    assert (result.labels == np.where(sets, p, -1).argmax(axis=1)).all()
    networks = within_sets(p, sets).max(axis=1).mean()
    assert result.confidence.mean() == pytest.approx(min(1 - result.error.labels.value, networks), abs=1e-3)
    assert result.error.random_sets is False, "no rule is known"
    assert (result.probabilities == p).all()
    disputed = np.array(result.flag_names()) == "disputed"
    assert (disputed == (result.labels != before.labels)).all()


def test_the_error_is_saved_with_the_labels(tmp_path):
    run = session()
    result = Result.of(run, out_of_sample=out_of_sample(run))
    result.save(tmp_path)
    loaded = Result.load(tmp_path, result.examples)
    assert loaded.error == result.error
    (tmp_path / "label_error.json").write_text("{}")
    assert Result.load(tmp_path, result.examples).error is None


def test_answers_outside_their_set_are_flagged_if_they_are_sure():
    run = session()
    p = np.full((60, 3), 0.005, np.float32)
    p[np.arange(60), run.data.y] = 0.99
    run.data.candidates[0] = np.arange(3) != run.data.y[0]
    result = Result.of(run, out_of_sample=OutOfSample(p))
    assert result.flag_names()[0] == "outside"
    assert result.outside_labels[0] == run.data.y[0]
    assert (result.outside_labels[1:] == -1).all()


def test_rules_that_draw_at_random_are_known():
    _, y = blobs()
    for rule, known in (("uniform:q=0.3", True), ("uniform:q=0.3,eta=0.1", False), ("uniform-sets", True)):
        assert drawn_at_random(session(settings=[f"candidates={rule}"])) == (known, None)
    sets = superclass(y, [0, 0, 1], 0.5, seed=0)
    known, possible = drawn_at_random(session(sets, ["candidates=superclass:q=0.5"], groups=(0, 0, 1)))
    assert known
    assert (possible == (np.array([0, 0, 1])[None] == np.array([0, 0, 1])[y][:, None])).all()


def test_the_estimator_says_how_many_labels_are_wrong(tmp_path):
    x, y = blobs(120)
    clf = PartialLabelClassifier("proden", epochs=3, folds=2).fit(x, uniform(y, 3, 0.3, seed=0))
    assert 0 <= clf.label_error_.labels.low <= clf.label_error_.labels.high <= 1
    clf.save(tmp_path / "clf.safetensors")
    assert PartialLabelClassifier.load(tmp_path / "clf.safetensors").label_error_ == clf.label_error_
    assert PartialLabelClassifier("proden", epochs=1, folds=0).fit(x, uniform(y, 3, 0.3, seed=0)).label_error_ is None


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_labels_of_a_run_whose_folds_are_lost_say_so(tmp_path, crosel_cli, damage):
    rows = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "x.npz", x=rows, candidates=np.eye(2, dtype=bool)[(rows[:, 0] > 0).astype(int)])
    run, quick = tmp_path / "run", ("--method", "cc", "--set", "train.epochs=1", "--folds", "2")
    assert crosel_cli("train", tmp_path / "x.npz", *quick, "--out", run).code == 0
    (run / "folds.npz").unlink() if damage == "gone" else (run / "folds.npz").write_bytes(b"PK")
    result = crosel_cli("labels", run, "--out", tmp_path / "l.csv")
    assert result.code == 0
    assert result.err.count("folds.npz is missing, damaged or not complete: labels and confidence come from") == 1
