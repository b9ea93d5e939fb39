"""Inputs for every reader, led by coverage: an input that reaches code of crosel anew is kept, and changed further.

    python tests/faults/fuzz.py FOLDER --minutes 60

Needs atheris (`pip install atheris`). FOLDER keeps what was reached from one call to the next, and `found.jsonl` what
failed: any exception but a UserError of one line, or ten seconds. What it finds becomes a test beside its reader.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import atheris

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Inputs for every reader, led by coverage.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    a = parser.parse_args()
    corpus = a.folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["crosel"]):
        from _confined import Late
        from _inputs import Readers, changed
        from soak.hostile import prepare

        prepare()
        readers = Readers(Path(tempfile.mkdtemp(prefix="crosel-fuzz-")) / "inputs")
    names = sorted(readers.kinds)  # the first byte of an input says which of them reads it
    for at, name in enumerate(names):
        for n, content in enumerate(readers.kinds[name].seeds):
            (corpus / f"good-{at}-{n}").write_bytes(bytes([at]) + content)
    seen: set[str] = set()

    def read(data: bytes) -> None:
        if not data:
            return
        name = names[data[0] % len(names)]
        try:
            readers.read(readers.kinds[name], data[1:])
        except (Exception, Late) as error:
            where = [
                f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if "crosel" in f.filename
            ]
            if (key := f"{name} {type(error).__name__} {where[-1:]}") not in seen:
                seen.add(key)
                row = {"reader": name, "failed": traceback.format_exc()[-2500:],
                       "content": base64.b64encode(data[1:]).decode()}  # fmt: skip
                with open(a.folder / "found.jsonl", "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")

    def change(data: bytes, most: int, seed: int) -> bytes:
        """Half of them inside of what is packed, the others wherever libFuzzer likes."""
        rng = random.Random(seed)
        kind = readers.kinds[names[data[0] % len(names)]] if data else None
        if kind is None or rng.random() < 0.5:
            return bytes(data[:1] + atheris.Mutate(data[1:], most - 1))
        return (data[:1] + changed(kind, [data[1:], *kind.seeds], rng))[:most]

    # It stops a slow input by the same signal as we do.
    options = [f"-max_total_time={round(60 * a.minutes)}", "-timeout=0", "-rss_limit_mb=0", "-max_len=65536",
               "-print_final_stats=1", f"-artifact_prefix={a.folder}/died-"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], read, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
