"""The photographs of the benchmarks on features: photos.npz, and votes.npz with what people called them.

    python benchmarks/photo_features.py --data DIR --weights FILE --work FOLDER [--votes CIFAR-10_human.pt] --to DIR

Embeds the first `--n` of the images that photographs.py draws from (CIFAR-10's training set; DIR has
`cifar-10-batches-py`) with timm/tf_efficientnet_lite0: `plain` [n, d] and `y`. `--votes` is the file of CIFAR-10N, in
which three people labelled each training image: `votes` [n, 3].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from photographs import write_images
from PIL import Image
from record import Arguments, count, end_with

from crosel.data.sources import load
from crosel.errors import UserError
from crosel.nn.backbones import ImageBackbone, open_backbone

PEOPLE = ("random_label1", "random_label2", "random_label3")


def embed(paths: list[Path], backbone: ImageBackbone) -> np.ndarray:
    out = np.zeros((len(paths), backbone.dimensions), np.float32)
    for start in range(0, len(paths), 50):
        pictures = np.stack([backbone.prepare(Image.open(path)) for path in paths[start : start + 50]])
        with torch.inference_mode():
            out[start : start + 50] = backbone.embed(torch.from_numpy(pictures.transpose(0, 3, 1, 2))).numpy()
    return out


def plain_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a torch file, of which no code runs; numpy 1 wrote it, whose module has another name now."""
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    known = [(rebuild, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype, np.dtypes.Int64DType]
    with torch.serialization.safe_globals(known):
        found: dict[str, np.ndarray] = torch.load(path, weights_only=True)
    return found


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-py")
    parser.add_argument("--weights", required=True, help="tensors of timm's tf_efficientnet_lite0")
    parser.add_argument("--work", type=Path, required=True, help="folder for the images")
    parser.add_argument("--votes", type=Path, help="CIFAR-10_human.pt of CIFAR-10N")
    parser.add_argument("--to", type=Path, required=True, help="folder of photos.npz and votes.npz")
    parser.add_argument("--n", type=count, default=2500)
    args = parser.parse_args()
    names, y, _ = write_images(args.data, args.work / "images", args.n)
    args.to.mkdir(parents=True, exist_ok=True)
    if args.votes is not None:
        found = plain_arrays(args.votes)
        source = load("cifar10", args.data)
        if not np.array_equal(found["clean_label"], source.y):
            raise UserError(f"{args.votes}: its images are in another order than those of {args.data}")
        rows = [int(Path(name).stem) for name in names]
        votes = np.stack([np.asarray(found[name])[rows] for name in PEOPLE], axis=1)
        np.savez_compressed(args.to / "votes.npz", votes=votes.astype(np.int64))
    backbone = open_backbone("timm/tf_efficientnet_lite0", args.weights)
    assert isinstance(backbone, ImageBackbone)
    np.savez(args.to / "photos.npz", plain=embed([args.work / "images" / name for name in names], backbone), y=y)


if __name__ == "__main__":
    end_with(main)
