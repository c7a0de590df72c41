"""`torch.ops.onlinesoftmax`: the namespace of our operators, which registers them when one of them is first looked up.

A saved program names its operators, and the named tuples among its results.  `import onlinesoftmax` must not import
torch, so both become known when the modules of torch have been imported, before or after.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

PACKAGE = __name__.removesuffix(".torch.namespace")
"""Name of the package, which is another one for a copy from the Hugging Face hub."""

NAMESPACE = PACKAGE.replace(".", "_")

REGISTER = tuple(
    f"{PACKAGE}.{module}"
    for module in ("torch.custom_op", "linear.operators", "routing.operators", "sampling.operators")
)
"""The modules that register operators when they are imported."""


RESULTS = {
    "core.call": ("LossStatistics", "TokenLogprobs"),
    "sampling.results": ("Sampled", "Support", "TopLogprobs", "Verified"),
    "routing.results": ("Routed",),
}
"""The named tuples that functions return, by module: a saved program names those of its results."""


def provide() -> None:
    """Make the namespace and register the named tuples now where PyTorch's modules are imported, else when they are."""
    for name, act in (("torch", _add_to), ("torch._export.serde.serialize", _register_results)):
        if name in sys.modules:
            act(sys.modules[name])
        elif not any(isinstance(finder, _After) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _After(name, act))


class _After:
    """A finder that finds one module as the other finders do, and calls act(module) when it has been executed."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        # Those behind this one: a copy of the package from the hub has such a finder too, which would ask this one.
        first = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        others = (finder for finder in sys.meta_path[first:] if hasattr(finder, "find_spec"))
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
            self.act(module)

        loader.exec_module = exec_module
        return spec


def _register_results(_serialize: Any) -> None:
    """Give the named tuples the names under which `torch.export.save` writes them."""
    register: Any = getattr(sys.modules["torch.utils._pytree"], "_register_namedtuple", None)
    if register is None:
        return
    for module, names in RESULTS.items():
        for name in names:
            kind = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
            register(kind, serialized_type_name=f"{PACKAGE}.{name}")


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
