"""Embedding many photographs: how much memory that takes, and how fast it is beside a plain loop.

    python benchmarks/embedding.py memory --work FOLDER --out results/photographs/memory.jsonl
    python benchmarks/embedding.py rate --weights FILE --work FOLDER --out results/photographs/rate.jsonl
    python benchmarks/embedding.py speed --work FOLDER --out results/photographs/speed.jsonl

`memory` embeds `--images` files of 400 pixels, and a tenth of them, each in a process of its own, and notes the most
memory that these had (resident, all of it); with timm's smallest network and random weights, for it is the number of
files that counts. `rate` embeds 256 files at a time with EfficientNet-Lite0, and in turn with a plain loop over the
same files (open, timm's own transform, forward), and with forward passes alone over prepared pictures. Seconds of the
processor stand beside those of the clock, for machines that have other work.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import Arguments, add, count, end_with, origin

SIDE, BATCH, BLOCK, DISTINCT = 400, 64, 256, 200


def make(folder: Path, images: int) -> list[Path]:
    """JPEG files that look like photographs to a decoder. All differ, if only in what comes after the picture."""
    import io

    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    paths, rng, contents = [folder / f"{i:06d}.jpg" for i in range(images)], np.random.default_rng(0), []
    for i, path in enumerate(paths):
        if len(contents) < DISTINCT:
            coarse = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((SIDE + 60, SIDE), Image.Resampling.BICUBIC), np.int16)
            noisy = np.clip(smooth + rng.integers(-12, 13, (*smooth.shape[:2], 1)), 0, 255).astype(np.uint8)
            stream = io.BytesIO()
            Image.fromarray(noisy).save(stream, "JPEG", quality=87)
            contents.append(stream.getvalue())
        if not path.exists():
            path.write_bytes(contents[i % DISTINCT] + b"%d" % i)
    return paths


def embed(paths: list[Path], encoder: Any, beside: Path | None) -> Any:
    from crosel.data.embeddings import Embedder
    from crosel.data.images import read_images
    from crosel.data.settings import DataSettings

    return read_images(paths, DataSettings().embedding(Embedder(encoder)), cache_beside=beside)


def memory(args: Any) -> None:
    paths = make(args.work / "photos", args.images)
    for images in (args.images // 10, args.images):
        child = os.fork()
        if not child:
            import timm
            import torch
            from safetensors.torch import save_file

            from crosel.nn.backbones import open_backbone

            torch.manual_seed(0)
            weights = args.work / "weights.safetensors"
            save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), weights)
            work = args.work / f"cache-{images}"
            work.mkdir()
            start = time.perf_counter()
            found = embed(paths[:images], open_backbone("timm/test_efficientnet", str(weights)), work)
            assert found.shape[0] == images
            (work / "seconds").write_text(str(time.perf_counter() - start))
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        assert status == 0
        seconds = float((args.work / f"cache-{images}" / "seconds").read_text())
        row = {"images": images, "side": SIDE, "network": "timm/test_efficientnet", "seconds": seconds}
        row |= {"peak_mib": used.ru_maxrss / 1024, "load_average": os.getloadavg()[0]}
        add({**row, **origin("command", "platform", "cpu_count")}, args.out)
        print(f"{images} images: {row['peak_mib']:.0f} MiB, {images / seconds:.0f} images/s", flush=True)


def rate(args: Any) -> None:
    import timm
    import torch
    from PIL import Image

    from crosel.nn.backbones import ImageBackbone, open_backbone

    paths = make(args.work / "photos", args.blocks * BLOCK)
    encoder = open_backbone("timm/tf_efficientnet_lite0", args.weights)
    assert isinstance(encoder, ImageBackbone)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(encoder.model), is_training=False)

    def plain_loop(block: list[Path]) -> None:
        with torch.inference_mode():
            for at in range(0, BLOCK, BATCH):
                encoder.model(torch.stack([transform(Image.open(path)) for path in block[at : at + BATCH]]))

    ready = torch.zeros(BATCH, 3, encoder.size, encoder.size)

    def forward_alone(block: list[Path]) -> None:
        with torch.inference_mode():
            for _ in range(0, BLOCK, BATCH):
                encoder.model(ready)

    ways = {"crosel": lambda block: embed(block, encoder, None), "plain loop": plain_loop, "forward": forward_alone}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(args.blocks):
        for name, way in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            way(paths[at * BLOCK : (at + 1) * BLOCK])
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
    images = args.blocks * BLOCK
    rates = {name: images / sum(values) for name, values in seconds.items()}
    row = {"images": images, "side": SIDE, "threads": torch.get_num_threads(), "images_per_second": rates}
    row |= {"of_plain_loop": rates["crosel"] / rates["plain loop"], "of_forward": rates["crosel"] / rates["forward"]}
    row |= {"of_plain_loop_by_cpu_time": sum(cpu_seconds["plain loop"]) / sum(cpu_seconds["crosel"])}
    row |= {"seconds": seconds, "cpu_seconds": cpu_seconds, "load_average": os.getloadavg()[0]}
    add({**row, **origin("command", "platform", "cpu_count")}, args.out)
    print(
        {name: round(value, 1) for name, value in rates.items()},
        f"{row['of_plain_loop']:.2f}",
        f"{row['of_forward']:.2f}",
    )


def speed(args: Any) -> None:
    import torch

    from crosel.nn.backbones import SUGGESTED, ImageBackbone, image_model, picture_settings

    torch.set_num_threads(1)
    for name, *_ in SUGGESTED:
        if not name.startswith("timm/"):
            continue
        model, settings = image_model(name, pretrained=False), picture_settings(name)
        encoder = ImageBackbone(name, model, settings, torch.device("cpu"))
        pictures = np.zeros((2, encoder.size, encoder.size, 3), np.uint8)
        encoder.encode(pictures)
        start, images = time.process_time(), 0
        while images < 4 or time.process_time() - start < 5:
            encoder.encode(pictures)
            images += len(pictures)
        row = {"network": name, "size": encoder.size, "parameters": sum(p.numel() for p in model.parameters())}
        row |= {"images_per_cpu_second": images / (time.process_time() - start), "load_average": os.getloadavg()[0]}
        add({**row, **origin("command", "platform", "cpu_count")}, args.out)
        print(f"{name}: {row['images_per_cpu_second']:.1f} images for each second of a core", flush=True)


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("what", choices=["memory", "rate", "speed"])
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--out", type=Path, required=True, help="record, which grows")
    parser.add_argument("--images", type=count, default=20000, help="memory: how many")
    parser.add_argument("--blocks", type=count, default=4, help="rate: how many times 256 images")
    parser.add_argument("--weights", help="rate: tensors of timm's tf_efficientnet_lite0")
    args = parser.parse_args()
    {"memory": memory, "rate": rate, "speed": speed}[args.what](args)


if __name__ == "__main__":
    end_with(main)
