"""Writes a repository for the Hugging Face hub: `python hub/build.py FOLDER`, or `make hub`.

    FOLDER/build/torch-universal/__init__.py, layers.py, metadata.json
    FOLDER/build/torch-universal/onlinesoftmax/   the package, without lab, the command line and JAX's functions

Format: https://github.com/huggingface/kernels, docs/source/kernel-requirements.md.  `kernels.get_local_kernel(FOLDER)`
loads the result; `kernels.get_kernel` loads what was uploaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "onlinesoftmax"
LEFT_OUT = ("lab", "cli", "__main__.py", "__pycache__", "*.pyc")
"""Parts that the functions on tensors do not import."""

FUNCTIONS = (
    "cross_entropy", "linear_cross_entropy", "linear_token_logprobs", "load_balancing_loss", "log_softmax", "logsumexp",
    "route", "router_z_loss", "sample", "softmax", "token_logprobs", "topk_logprobs", "verify",
)  # fmt: skip

INIT = f'''"""Softmax and its family at the speed of memory: functions on torch tensors, and layers."""

from . import layers
from .{NAME} import {", ".join(FUNCTIONS)}

__all__ = {[*FUNCTIONS, "layers"]!r}
'''


def build(folder: Path) -> Path:
    """Write the repository in place of an older one, and return the folder of its variant."""
    variant = folder / "build" / "torch-universal"
    if variant.exists():
        shutil.rmtree(variant)
    shutil.copytree(ROOT / "src" / NAME, variant / NAME, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(ROOT / "hub" / "layers.py", variant)
    shutil.copy(ROOT / "LICENSE", folder)
    (variant / "__init__.py").write_text(INIT, encoding="utf-8")
    (variant / "metadata.json").write_text(json.dumps(metadata(variant), indent=2) + "\n", encoding="utf-8")
    return variant


def metadata(variant: Path) -> dict[str, object]:
    """The description that `kernels` reads; its id is the name of the module, and differs with any file."""
    files = {
        path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in files.items())).hexdigest()
    return {
        "name": NAME,
        "id": f"_{NAME}_{whole[:12]}",
        "version": 0,
        "license": "Apache-2.0",
        "python-depends": [],
        # The kernels run from compute capability 8.0 on; without such a GPU, PyTorch's operations run.
        "backend": {"type": "cuda", "archs": ["8.0+PTX"]},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in files.items()},
        },
    }


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
