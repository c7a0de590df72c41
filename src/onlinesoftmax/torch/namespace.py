"""`torch.ops.onlinesoftmax`: the namespace of our operators, which registers them when one of them is first looked up.

A saved program names its operators.  `import onlinesoftmax` must not import torch, so the namespace is made when torch
has been imported, before or after.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

PACKAGE = __name__.removesuffix(".torch.namespace")
"""Name of the package, which is another one for a copy from the Hugging Face hub."""

NAMESPACE = PACKAGE.replace(".", "_")

REGISTER = tuple(
    f"{PACKAGE}.{module}"
    for module in ("torch.custom_op", "linear.operators", "routing.operators", "sampling.operators")
)
"""The modules that register operators when they are imported."""


def provide() -> None:
    """Make the namespace now where torch has been imported, else as soon as it is."""
    if "torch" in sys.modules:
        _add_to(sys.modules["torch"])
    elif not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch:
    """A finder that finds torch as the other finders do, and adds the namespace when torch has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        loader: Any = spec and spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            # The loader gets its own function back, and this finder has done its work.
            loader.__dict__.pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _add_to(module)

        loader.exec_module = exec_module
        return spec


def _add_to(torch: Any) -> None:
    # Another thread may still be importing torch, or the operators have a namespace already.
    if not hasattr(torch, "ops") or NAMESPACE in vars(torch.ops):
        return

    class Operators(torch._ops._OpNamespace):  # type: ignore[misc]  # torch is not imported here
        """Registers our operators when one of them is first looked up."""

        # An operator is saved under the module of its namespace.
        __module__ = torch._ops._OpNamespace.__module__

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                for module in REGISTER:
                    importlib.import_module(module)
            return super().__getattr__(name)

    setattr(torch.ops, NAMESPACE, Operators(NAMESPACE))
