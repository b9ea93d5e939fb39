"""Networks: sizes by hand, wiring against a forward pass of our own, starting weights, choice by name, seeds."""

from __future__ import annotations

import itertools
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.config import build_config
from crosel.data.dataset import make_dataset
from crosel.errors import UserError
from crosel.nn.factory import NetworkSettings, network_factory, network_name
from crosel.nn.networks import MLP, Classifier, ResNet18, SmallCNN, WideResNet, wide_resnet
from crosel.training.build import build_session, resolve

torch.set_num_threads(1)

DEPTHS_AND_WIDTHS = [(10, 1), (10, 2), (16, 1), (16, 4), (22, 3), (28, 2), (28, 10), (34, 10), (40, 2)]


def on_meta(depth: int, width: int, classes: int = 10, channels: int = 3) -> WideResNet:
    """Shapes without numbers: cheap at any size."""
    with torch.device("meta"):
        return wide_resnet(depth, width, classes, channels)


def by_hand(depth: int, width: int, classes: int, channels: int) -> int:
    """Parameters of WRN-d-w: 3x3 convolutions without bias, two numbers a channel in each normalisation."""
    blocks = (depth - 4) // 6
    total = 9 * channels * 16
    inputs = 16
    for outputs in (16 * width, 32 * width, 64 * width):
        first = 2 * inputs + 9 * inputs * outputs + 2 * outputs + 9 * outputs * outputs
        if inputs != outputs:
            first += inputs * outputs
        later = 2 * (2 * outputs + 9 * outputs * outputs)
        total += first + (blocks - 1) * later
        inputs = outputs
    return total + 2 * inputs + inputs * classes + classes


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


# --- wide ResNet --------------------------------------------------------------------------------------------------


def test_wrn_34_10_has_46_2_million_parameters():
    count = parameter_count(on_meta(34, 10))
    assert count == by_hand(34, 10, 10, 3) == 46_160_474
    assert round(count / 1e6, 1) == 46.2


@pytest.mark.parametrize(("depth", "width"), DEPTHS_AND_WIDTHS)
@pytest.mark.parametrize(("classes", "channels"), [(10, 3), (100, 3), (2, 1)])
def test_parameter_counts(depth, width, classes, channels):
    network = on_meta(depth, width, classes, channels)
    assert parameter_count(network) == by_hand(depth, width, classes, channels)
    main = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(main) == 1 + (depth - 4)  # the stem, and two in each block
    assert network.feature_size == 64 * width


def multiply_adds(network: nn.Module, x: Tensor) -> int:
    total = 0

    def count(module: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
        else:
            per_output = module.in_features
        total += out.numel() * per_output

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    network(x)
    for hook in hooks:
        hook.remove()
    return total


def test_wrn_34_10_takes_6_66_billion_multiply_adds():
    network = on_meta(34, 10).eval()
    assert multiply_adds(network, torch.empty(1, 3, 32, 32, device="meta")) / 1e9 == pytest.approx(6.66, abs=0.005)


def test_resnet_18_has_11_2_million_parameters_and_takes_0_56_billion_multiply_adds():
    with torch.device("meta"):
        network = ResNet18(10)
    # As published for small images with pre-activation, 11,171,146, and a last normalisation of 2 x 512.
    assert parameter_count(network) == 11_171_146 + 1024
    macs = multiply_adds(network.eval(), torch.empty(1, 3, 32, 32, device="meta"))
    assert macs / 1e9 == pytest.approx(0.556, abs=0.001)
    assert [m.stride for m in network.modules() if isinstance(m, nn.Conv2d)].count((2, 2)) == 6


def test_resnet_18_by_name():
    network = network_factory(NetworkSettings(name="resnet-18"), (1, 8, 8), 4)()
    assert network.train()(torch.randn(3, 1, 8, 8)).shape == (3, 4)
    assert network.features(torch.randn(3, 1, 8, 8)).shape == (3, 512)


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2)])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (32, 32)])
def test_any_depth_width_channels_and_size(depth, width, channels, size):
    network = wide_resnet(depth, width, 4, channels)
    x = torch.randn(2, channels, *size)
    assert network.eval()(x).shape == (2, 4)
    assert network.features(x).shape == (2, 64 * width)
    out = network.train()(torch.randn(3, channels, *size))
    out.sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def functional_forward(weights: dict[str, Tensor], x: Tensor, depth: int, width: int, training: bool) -> Tensor:
    """The forward pass of a pre-activation WRN, from the weights alone."""

    def normalise(name: str, value: Tensor) -> Tensor:
        if training:
            mean = value.mean(dim=(0, 2, 3))
            variance = value.var(dim=(0, 2, 3), unbiased=False)
        else:
            mean, variance = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
        value = (value - mean.view(-1, 1, 1)) / torch.sqrt(variance + 1e-5).view(-1, 1, 1)
        return value * weights[f"{name}.weight"].view(-1, 1, 1) + weights[f"{name}.bias"].view(-1, 1, 1)

    def activate(name: str, value: Tensor) -> Tensor:
        return normalise(name, value).clamp_min(0)

    x = F.conv2d(x, weights["stem.weight"], padding=1)  # no activation after the stem
    channels, number = 16, 0
    for group, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        for position in range((depth - 4) // 6):
            name, step = f"blocks.{number}", stride if position == 0 else 1
            activated = activate(f"{name}.norm1", x)
            inner = F.conv2d(activated, weights[f"{name}.conv1.weight"], stride=step, padding=1)
            inner = F.conv2d(activate(f"{name}.norm2", inner), weights[f"{name}.conv2.weight"], padding=1)
            if channels != group:  # the activated tensor feeds both branches
                x = inner + F.conv2d(activated, weights[f"{name}.shortcut.weight"], stride=step)
            else:
                x = inner + x
            channels, number = group, number + 1
    x = activate("norm", x)
    pooled = x.sum(dim=(2, 3)) / (x.shape[2] * x.shape[3])
    return pooled @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 2), (22, 1)])
def test_wiring(depth, width, training):
    torch.manual_seed(0)
    network = wide_resnet(depth, width, 5).double().train(training)
    with torch.no_grad():
        for name, value in network.state_dict().items():  # no weight at a value that hides a mistake
            if "norm" in name and value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
        weights = {name: value.clone() for name, value in network.state_dict().items()}
        x = torch.randn(3, 3, 9, 8, dtype=torch.float64)
        expected = functional_forward(weights, x, depth, width, training)
        torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)
    assert set(weights) == set(network.state_dict())


def test_kaiming_normal_by_fan_out():
    torch.manual_seed(0)
    network = wide_resnet(16, 4, 10)
    looked = 0
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            w = module.weight.detach()
            expected = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
            # The standard error of a deviation is σ / √(2m).
            assert w.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * w.numel()))
            assert abs(w.mean().item()) < 5 * expected / math.sqrt(w.numel())
            assert w.abs().max() > 2.5 * expected or w.numel() < 1000  # a normal, not a uniform distribution
            assert module.bias is None
            looked += 1
    assert looked == 1 + 2 * 6 + 3
    assert network.head.bias is not None


@pytest.mark.parametrize("depth", [0, 4, 9, 11, 33, 35])
def test_depth_is_six_n_plus_four(depth):
    with pytest.raises(UserError, match=f"6n \\+ 4 .*not {depth}"):
        wide_resnet(depth, 2, 10)


def test_width_is_at_least_one():
    with pytest.raises(UserError, match="width of a wide ResNet must be at least 1, not 0"):
        wide_resnet(10, 0, 10)


# --- small CNN, MLP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", range(1, 9))
@pytest.mark.parametrize("channels", [1, 3])
def test_small_cnn_from_one_pixel_on(side, channels):
    network = SmallCNN(7, channels, width=4)
    x = torch.randn(3, channels, side, side)
    assert network(x).shape == (3, 7)
    assert network.features(x).shape == (3, network.feature_size) == (3, 8)
    assert network.eval()(torch.randn(1, channels, side, 9 - side)).shape == (1, 7)


@pytest.mark.parametrize("width", [1, 8, 32])
def test_small_cnn_parameter_count(width):
    convolutions = 9 * (3 * width + width * width + width * 2 * width + 4 * width * width)
    assert parameter_count(SmallCNN(10, 3, width)) == convolutions + 2 * 6 * width + 2 * width * 10 + 10


@pytest.mark.parametrize("hidden", [(), (6,), (16, 8), (4, 4, 4)])
def test_mlp(hidden):
    network = MLP(12, 5, hidden)
    sizes = [12, *hidden]
    expected = sum(a * b + 3 * b for a, b in itertools.pairwise(sizes)) + sizes[-1] * 5 + 5
    assert parameter_count(network) == expected
    assert network.feature_size == sizes[-1]
    x = torch.randn(4, 12)
    torch.testing.assert_close(network.eval()(x), network.classify(network.features(x)))
    torch.testing.assert_close(network(x.view(4, 3, 2, 2)), network(x))  # images are flattened


@pytest.mark.parametrize("network", [SmallCNN(3, 1, 4), MLP(16, 3, (8,)), WideResNet(10, 1, 3, 1)])
def test_forward_is_classify_of_features(network):
    x = torch.randn(2, 1, 4, 4)
    network.eval()
    assert isinstance(network, Classifier)
    assert network.features(x).shape == (2, network.feature_size)
    assert torch.equal(network(x), network.classify(network.features(x)))


def test_a_classifier_needs_features():
    with pytest.raises(TypeError, match=r"abstract method '?features"):
        Classifier(3, 2)


# --- by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7,), "mlp"), ((1, 8, 8), "small-cnn"), ((3, 15, 64), "small-cnn"), ((3, 64, 15), "small-cnn"),
        ((3, 16, 16), "wrn-28-2"), ((1, 28, 28), "wrn-28-2"), ((3, 224, 224), "wrn-28-2"),
    ],
)  # fmt: skip
def test_auto_chooses_by_shape(shape, expected):
    assert network_name(NetworkSettings(), shape) == expected
    assert network_name(NetworkSettings(name="mlp"), shape) == "mlp"


@pytest.mark.parametrize(
    ("settings", "shape", "kind", "count"),
    [
        (NetworkSettings(name="wrn-10-2"), (1, 8, 8), WideResNet, by_hand(10, 2, 4, 1)),
        (NetworkSettings(name="small-cnn", width=2), (3, 8, 8), SmallCNN, 9 * (6 + 4 + 8 + 16) + 24 + 16 + 4),
        (NetworkSettings(name="mlp", hidden=(5,)), (3, 2, 2), MLP, 12 * 5 + 15 + 24),
        (NetworkSettings(hidden=()), (6,), MLP, 28),
    ],
)
def test_factories_build_what_was_asked_for(settings, shape, kind, count):
    factory = network_factory(settings, shape, classes=4)
    first, second = factory(), factory()
    assert isinstance(first, kind)
    assert first is not second
    assert parameter_count(first) == count
    assert first.eval()(torch.zeros(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize("name", ["wrn-28-2", "resnet-18", "small-cnn"])
def test_image_networks_refuse_features(name):
    with pytest.raises(UserError, match=rf"'{name}' is for images.*--set network\.name=mlp"):
        network_factory(NetworkSettings(name=name), (5,), 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smal-cnn", r"unknown network 'smal-cnn' \(did you mean 'small-cnn'\?\); choose .*small-cnn, .*mlp"),
        ("wrn-28", r"unknown network 'wrn-28' \(did you mean 'wrn-28-2'\?\)"),
        ("xyz", "unknown network 'xyz'; choose from"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(UserError, match=message):
        network_factory(NetworkSettings(name=name), (3, 8, 8), 3)


def test_a_wrong_depth_by_name():
    with pytest.raises(UserError, match="not 33"):
        network_factory(NetworkSettings(name="wrn-33-2"), (3, 8, 8), 3)()


@pytest.mark.parametrize("values", [{"width": 0}, {"widht": 3}, {"hidden": ("a",)}])
def test_settings_are_checked(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        NetworkSettings(**values)


@pytest.mark.parametrize("hidden", [(0,), (-4,)])
def test_layer_sizes_are_checked(hidden):
    with pytest.raises(ValueError, match="hidden"):
        NetworkSettings(hidden=hidden)


# --- the user's own -----------------------------------------------------------------------------------------------


@pytest.fixture
def user_module(monkeypatch) -> str:
    """A module that only this test can import."""
    own = types.ModuleType("networks_of_a_user")
    calls: list[tuple[int, tuple[int, ...]]] = []

    def linear(classes: int, shape: tuple[int, ...]) -> nn.Module:
        calls.append((classes, shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))

    own.calls, own.linear, own.nothing, own.number = calls, linear, lambda classes, shape: None, 3.14
    monkeypatch.setitem(sys.modules, own.__name__, own)
    return own.__name__


def test_own_factory_by_import_string(user_module):
    factory = network_factory(NetworkSettings(name=f"{user_module}:linear"), (3, 2, 2), 4, trust_code=True)
    assert factory()(torch.zeros(5, 3, 2, 2)).shape == (5, 4)
    assert sys.modules[user_module].calls == [(4, (3, 2, 2))]


def test_own_factory_needs_trust(monkeypatch):
    """Nothing is imported before trust is given."""
    monkeypatch.setattr("crosel.nn.factory.import_by_name", lambda name: pytest.fail(f"imported {name}"))
    with pytest.raises(UserError, match=r"'somewhere:build' is code from outside crosel; add --trust-code"):
        network_factory(NetworkSettings(name="somewhere:build"), (5,), 3)


@pytest.mark.parametrize("name", ["no_such_module_here:f", "math:no_such_name", ":f", "math:"])
def test_own_factory_that_cannot_be_imported(name):
    with pytest.raises(UserError, match=rf"network '{name}' cannot be imported \(.*\); check the name"):
        network_factory(NetworkSettings(name=name), (5,), 3, trust_code=True)


def test_own_factory_in_the_working_folder(tmp_path, monkeypatch):
    """The installed command has no working folder among its places to import from; installed modules come first."""
    (tmp_path / "net_of_mine.py").write_text(
        "from torch import nn\n\n\ndef make(classes, shape):\n    return nn.Linear(shape[0], classes)\n"
    )
    (tmp_path / "colorsys.py").write_text("raise AssertionError('it takes the place of an installed module')\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    settings = NetworkSettings(name="net_of_mine:make")
    with pytest.raises(UserError, match=r"\(No module named 'net_of_mine'\); check the name, and that its file is in"):
        network_factory(settings, (5,), 3, trust_code=True)
    monkeypatch.chdir(tmp_path)
    assert network_factory(settings, (5,), 3, trust_code=True)()(torch.zeros(2, 5)).shape == (2, 3)
    with pytest.raises(UserError, match=r"cannot be imported \(module 'colorsys' has no attribute 'make'\)"):
        network_factory(NetworkSettings(name="colorsys:make"), (5,), 3, trust_code=True)
    monkeypatch.delitem(sys.modules, "net_of_mine")


RAISING = {
    "net_raising.py": """
import torch
from torch import nn

from net_raising_helper import look_up


def by_zero(classes, shape):
    return nn.Linear(shape[0] // 0, classes)


def inside_torch(classes, shape):
    return nn.Linear(-3, classes)


def in_a_file_beside(classes, shape):
    return look_up(classes)


@torch.no_grad()
def decorated(classes, shape):
    assert shape is None


def ends(classes, shape):
    raise SystemExit


class Net(nn.Linear):
    def forward(self, x):
        return self.missing(x)


def in_forward(classes, shape):
    return Net(shape[0], classes)


def of_text(classes, shape):
    return nn.Linear(eval("1 +"), classes)
""",
    "net_raising_helper.py": "def look_up(n):\n    return {}[n]\n",
    "net_of_bad_syntax.py": "import math\n\ndef make(:\n",
    "net_of_no_name.py": "import math\n\nlayer = nn.Linear\n",
    "net_of_a_bad_import.py": "import math\nimport net_of_no_name\n",
    "net_that_ends.py": "import sys\n\nsys.exit(0)\n",
    "net_package/__init__.py": "",
    "net_package/nets.py": "from net_package.deep.blocks import make\n",
    "net_package/deep/__init__.py": "",
    "net_package/deep/blocks.py": "def make(classes, shape):\n    raise OSError('one line\\nand another')\n",
}


@pytest.fixture
def raising(tmp_path, monkeypatch):
    for name, text in RAISING.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.lstrip("\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for module in [name for name in sys.modules if name.startswith("net_")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("name", "says", "file", "line"),
    [
        ("net_raising:by_zero", "be built: ZeroDivisionError: ", "net_raising.py", 8),
        ("net_raising:inside_torch", "be built: RuntimeError: ", "net_raising.py", 12),
        ("net_raising:in_a_file_beside", "be built: KeyError: 3", "net_raising_helper.py", 2),
        ("net_raising:decorated", "be built: AssertionError", "net_raising.py", 21),
        ("net_raising:ends", "be built: SystemExit", "net_raising.py", 25),
        ("net_package.nets:make", "be built: OSError: one line and another", "net_package/deep/blocks.py", 2),
        ("net_of_bad_syntax:make", "be imported: SyntaxError: ", "net_of_bad_syntax.py", 3),
        ("net_of_no_name:make", "be imported: NameError: name 'nn' is not defined", "net_of_no_name.py", 3),
        ("net_of_a_bad_import:make", "be imported: NameError: name 'nn' is not defined", "net_of_no_name.py", 3),
        ("net_that_ends:make", "be imported: SystemExit: 0", "net_that_ends.py", 3),
        ("net_raising:in_forward", "take inputs of shape (5,): AttributeError: 'Net' object has", "net_raising.py", 30),
        ("net_raising:of_text", "be built: SyntaxError: invalid syntax (<string>, line 1)", "net_raising.py", 38),
    ],
)
def test_own_factory_that_raises_is_told_with_the_users_own_line(raising, name, says, file, line):
    """Wherever it was raised below: in torch, under a decorator, in another file of the user's."""
    data = make_dataset(np.zeros((4, 5)), candidates=np.ones((4, 3), dtype=bool))
    config = build_config(settings=[f"network.name={name}", "method.name=cc"], values={"source": "toy"})
    with pytest.raises(UserError) as caught:
        build_session(resolve(config, data), data, torch.device("cpu"), trust_code=True)
    told = str(caught.value)
    assert told.startswith(f"network '{name}' cannot {says}")
    assert told.endswith(f" ({raising / file}, line {line}); correct it there")
    assert "\n" not in told
    assert caught.value.__cause__ is not None  # in Python, the whole traceback is there


def test_own_factory_that_needs_too_much_memory_is_told_as_such(raising):
    (raising / "net_too_large.py").write_text("def make(classes, shape):\n    raise MemoryError\n")
    with pytest.raises(MemoryError):  # for which there is another line, with what to change
        network_factory(NetworkSettings(name="net_too_large:make"), (5,), 3, trust_code=True)()


def test_own_factory_that_returns_no_module(user_module):
    factory = network_factory(NetworkSettings(name=f"{user_module}:nothing"), (5,), 3, trust_code=True)
    with pytest.raises(UserError, match=r"returned NoneType, not a torch\.nn\.Module"):
        factory()


def test_own_factory_that_takes_other_names(user_module, monkeypatch):
    monkeypatch.setattr(sys.modules[user_module], "other", lambda k, size: nn.Linear(size[0], k), raising=False)
    says = (
        r"is called as factory\(classes=k, shape=shape\), which it does not take \(missing a required argument: 'k'\)"
    )
    with pytest.raises(UserError, match=says):
        network_factory(NetworkSettings(name=f"{user_module}:other"), (5,), 3, trust_code=True)


@pytest.mark.parametrize("name", ["{}:number", ".relative:f"])
def test_own_factory_that_is_none(name, user_module):
    name = name.format(user_module)
    with pytest.raises(UserError, match="network"):
        network_factory(NetworkSettings(name=name), (5,), 3, trust_code=True)()


# --- seeds --------------------------------------------------------------------------------------------------------


def starting_weights(seed: int, source_seed: int = 0) -> list[Tensor]:
    """All weights of each of the two networks of a new session."""
    x = np.random.default_rng(source_seed).normal(size=(12, 4))
    data = make_dataset(x, candidates=np.ones((12, 3), dtype=bool))
    config = build_config(settings=["network.hidden=[5]", f"seed={seed}"], values={"source": "toy"})
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    return [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in session.method.networks]


def test_two_networks_start_different_and_follow_the_seed():
    first, again, other = starting_weights(1), starting_weights(1), starting_weights(2)
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    everything = [*first, *other]
    assert not any(torch.equal(a, b) for i, a in enumerate(everything) for b in everything[:i])


def test_starting_weights_depend_on_nothing_but_the_seed():
    expected = starting_weights(1)
    torch.manual_seed(77)
    torch.randn(100)
    assert all(torch.equal(a, b) for a, b in zip(expected, starting_weights(1, source_seed=5), strict=True))


def test_building_networks_leaves_the_global_state_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    starting_weights(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_building_networks_leaves_cuda_alone(monkeypatch):
    touched = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched.append)
    starting_weights(1)
    assert touched == []
