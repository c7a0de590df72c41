"""Types in the signatures of the reference: as the source code writes them, with choices and arrays spelled in full."""

from __future__ import annotations

import collections.abc
import inspect
import re
import sys
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_overloads

from sphinx.util.inspect import stringify_signature

from onlinesoftmax.core import annotations

RESULTS = {
    "Explanation", "HeadExplanation", "Plan", "Problem", "Replaced", "Report", "RouteExplanation", "SampleExplanation",
    "State", "VerifyExplanation",
}  # fmt: skip
"""Classes whose objects only the library makes: their pages describe the fields, and no call."""

RECORDS = {
    **dict.fromkeys(("Sampled", "Support", "TopLogprobs", "Verified"), "onlinesoftmax.sampling."),
    **dict.fromkeys(("LossStatistics", "TokenLogprobs"), "onlinesoftmax.core.call."),
    "Routed": "onlinesoftmax.routing.",
    "Shards": "onlinesoftmax.distributed.",
}
"""Named tuples, and the modules under which the reference has them."""

OTHERS = {
    "A": "torch.Tensor | numpy.ndarray",
    "ArrayLike": "jax.typing.ArrayLike",
    "Model": "torch.nn.Module",
    "Progress": "collections.abc.Callable[[int, int], None]",
    "Tensor": "torch.Tensor",
    "Any": "typing.Any",
    **{name: f"collections.abc.{name}" for name in collections.abc.__all__},
}
"""Names whose meaning is the same wherever the package writes them."""


def spelled(name: str, scope: dict[str, Any]) -> str:
    """A name of an annotation in full: the choices of a Literal, the module of a class that has a page."""
    value = scope.get(name, vars(annotations).get(name))
    if name in OTHERS:
        return OTHERS[name]
    if get_origin(value) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(value)))}]"
    if get_origin(value) is UnionType and name in ("Axis", "AxisName"):
        return str(value)
    if name in RECORDS or name in RESULTS:
        known = isinstance(value, type) and value.__module__ != annotations.__name__
        return f"{value.__module__}.{name}" if known else RECORDS[name] + name
    return "jax.Array" if name == "Array" and value is getattr(sys.modules.get("jax"), "Array", None) else name


def typed(annotation: Any, scope: dict[str, Any]) -> Any:
    """The text of an annotation; one that is not given stays so."""
    if annotation is inspect.Parameter.empty:
        return annotation
    text = getattr(annotation, "__forward_arg__", annotation)
    text = text if isinstance(text, str) else inspect.formatannotation(text)
    return re.sub(r"(?<![\w.'\"])[A-Za-z_]\w*(?![\w.'\"])", lambda found: spelled(found[0], scope), text)


def write(app: Any, what: str, name: str, found: Any, options: Any, args: Any, returned: Any) -> Any:
    """The parameters of a callable object, and the type of its result: of each overload, if it has some."""
    if what == "class" and found.__name__ in RESULTS:
        return "", ""
    if what not in ("class", "function", "method"):
        return None
    function = inspect.unwrap(found)
    scope = vars(sys.modules[found.__module__]) | getattr(getattr(function, "__func__", function), "__globals__", {})
    signature = inspect.signature(found)
    shown = [
        one.replace(annotation=typed(one.annotation, scope)) for one in signature.parameters.values()
        if one.name not in ("self", "cls", "_cls")
    ]  # fmt: skip
    results = [inspect.signature(one).return_annotation for one in get_overloads(function)]
    results = [typed(one, scope) for one in results or [signature.return_annotation]]
    has_result = what != "class" and results[0] not in (inspect.Parameter.empty, "typing.Any", "None")
    text = stringify_signature(inspect.Signature(shown), unqualified_typehints=False)
    return text, " | ".join(dict.fromkeys(results)) if has_result else None


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", write)
    return {"parallel_read_safe": True}
