"""Whether several views of each photograph help a linear head on a frozen backbone.

    python benchmarks/views.py --data DIR --weights FILE --work FOLDER --out results/photographs/views.jsonl

`--images` of CIFAR-10's training set, none of those that photographs.py draws from, are embedded as they are and in
four weak views each (crosel's own, at the backbone's size). The head learns from the plain rows in 50 epochs, or from
plain rows and `--views` of the four together in so many fewer, that it takes as many steps. Tested on plain rows.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from photographs import write_images
from PIL import Image
from record import Arguments, add, count, done, end_with, origin, positive

from crosel import PartialLabelClassifier
from crosel.augment import AugmentSettings, make_views
from crosel.candidates import uniform
from crosel.nn.backbones import ImageBackbone, open_backbone

FIRST, HELD_OUT, VIEWS, EPOCHS = 6000, 500, 4, 50


def embed(names: list[str], folder: Path, backbone: ImageBackbone) -> np.ndarray:
    """Embeddings [1 + VIEWS, n, d]: plain ones first."""
    view, generator = make_views((3, backbone.size, backbone.size), AugmentSettings())["weak"], torch.Generator()
    generator.manual_seed(0)
    out = np.zeros((1 + VIEWS, len(names), backbone.dimensions), np.float32)
    for start in range(0, len(names), 50):
        part = slice(start, start + 50)
        pictures = np.stack([backbone.prepare(Image.open(folder / name)) for name in names[part]])
        x = torch.from_numpy(pictures.transpose(0, 3, 1, 2))
        with torch.inference_mode():
            for number in range(1 + VIEWS):
                out[number, part] = backbone.embed(view(x, generator) if number else x).numpy()
        print(f"{start + 50} images", flush=True)
    return out


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True, help="tensors of timm's tf_efficientnet_lite0")
    parser.add_argument("--work", type=Path, required=True, help="folder for images and embeddings")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows run by run")
    parser.add_argument("--images", type=count, default=3000)
    parser.add_argument("--q", type=positive, default=0.3)
    parser.add_argument("--draws", type=count, default=3)
    parser.add_argument("--views", default=f"0;{VIEWS}", help="numbers of views beside the plain rows")
    args = parser.parse_args()
    names, y, _ = write_images(args.data, args.work / "images", FIRST + args.images)
    kept = args.work / "views.npz"
    if not kept.exists():
        backbone = open_backbone("timm/tf_efficientnet_lite0", args.weights)
        assert isinstance(backbone, ImageBackbone)
        np.savez(kept, x=embed(names[FIRST:], args.work / "images", backbone), y=y[FIRST:], side=backbone.size)
    found, there = np.load(kept), done(args.out, "draw", "method", "views")
    x, y, side = found["x"], found["y"], int(found["side"])
    for draw in range(args.draws):
        order = np.random.default_rng(400 + draw).permutation(args.images)
        rows, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
        for method in ("true labels", "cc", "crosel"):
            sets = np.eye(10, dtype=bool)[y[rows]] if method == "true labels" else uniform(y[rows], 10, args.q, draw)
            for views in map(int, args.views.split(";")):
                if (draw, method, views) in there:
                    continue
                start = time.perf_counter()
                head = PartialLabelClassifier(
                    method if method != "true labels" else "cc", network="mlp", network_settings={"hidden": []},
                    epochs=EPOCHS // (1 + views), lr=0.01, train_settings={"weight_decay": 0.1},
                    folds=0, random_state=draw, verbose=False,
                )  # fmt: skip
                head.fit(np.concatenate(x[: 1 + views, rows]), np.concatenate([sets] * (1 + views)))
                accuracy = float((head.predict(x[0, held_out]) == y[held_out]).mean())
                row = {
                    "draw": draw, "method": method, "views": views, "q": args.q, "n": len(rows), "held_out": HELD_OUT,
                    "side": side, "accuracy": accuracy, "seconds": time.perf_counter() - start,
                    "epochs": EPOCHS // (1 + views),
                }  # fmt: skip
                add({**row, **origin("command", "platform", "cpu_count")}, args.out)
                print(f"draw {draw}  {method:<12} {views} views: {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    end_with(main)
