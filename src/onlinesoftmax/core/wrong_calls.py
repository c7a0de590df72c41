"""Wrong calls of the public functions: Python's error, with the argument that was meant or the way to call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

ALIKE: tuple[tuple[str, ...], ...] = (
    ("dim", "axis", "axes"),
    ("mask", "where", "attn_mask", "attention_mask"),
    ("scale", "logit_scale", "temperature"),
    ("softcap", "soft_cap", "logit_softcapping", "final_logit_softcapping", "logits_soft_cap"),
    ("bias", "logit_bias"),
    ("keepdim", "keepdims"),
    ("input", "x", "a", "logits", "local", "hidden_states"),
    ("target", "index", "label", "labels", "selected_token_ids"),
    ("linear_weight", "lin_weight", "lm_head", "lm_head_weight"),
    ("weight", "class_weights", "ce_weight"),
    ("ignore_index", "ignored_index", "padding_idx"),
    ("label_smoothing", "smoothing"),
    ("z_loss", "lse_square_scale", "z_loss_coef"),
    ("return_stats", "return_z_loss", "return_lse", "return_entropy"),
    ("inplace_backward", "inplace"),
    ("k", "top_k", "num_experts_per_tok"),
    ("seed", "key", "rng", "generator"),
    ("renormalize", "norm_topk_prob", "normalize"),
    ("groups", "n_group", "num_groups"),
    ("group_k", "topk_group"),
    ("score", "scoring_func", "score_function"),
    ("support", "return_support"),
    ("group", "process_group"),
    ("device", "gpu", "gpus"),
    ("op", "operation", "function"),
    ("out", "output", "outfile"),
    ("float32", "fp32", "f32", "float"),
    ("float16", "fp16", "f16", "half"),
    ("bfloat16", "bf16"),
    ("float64", "fp64", "f64", "double"),
)
"""Names that libraries and their commands have for one argument, or for one dtype."""


def hinting(function: Function, package: str = "") -> Function:
    """The function, whose error for arguments that it does not take says what to pass instead.

    Args:
        function: A public function, or the `__init__` of a public class.
        package: Name of the module under which users find it; that of the function by default.

    Example:
        >>> def softmax(input, dim=-1, *, scale=1.0): ...
        >>> hinting(softmax)(0, temperature=2.0)
        Traceback (most recent call last):
        TypeError: softmax() got an unexpected keyword argument 'temperature': pass scale=1/temperature
    """
    sentence_of = _sentence

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if (sentence := sentence_of(function, package, str(error), args, kwargs)) is None:
                raise
            # The error of Python, which names no more than this one.
            raise TypeError(sentence) from None

    # doctest looks for the examples of a module in the functions that have its globals.
    of_module: Any = FunctionType(call.__code__, function.__globals__, closure=call.__closure__)
    hinted: Any = wraps(function)(of_module)
    if package:
        # Where pickle looks for the function.
        hinted.__module__ = package
    return cast(Function, hinted)


def _sentence(function: Any, package: str, error: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The error with advice; None where the function takes the arguments, and raised the error itself."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return None
    names, name = list(signature.parameters), function.__name__
    if name == "__init__":
        name = type(args[0]).__name__
        del names[0]
    found = f"{name}() {error.partition('() ')[2]}"
    wrong = [each for each in kwargs if each not in names]
    if not wrong:
        return f"{found}: call {name}({_called(signature)})"
    # The scale of a routing multiplies weights, not logits.
    known = [each for each in names if each != "scale" or "renormalize" not in names]
    advice = _pass(wrong[0], meant(wrong[0], known)) or _others(wrong[0], name, package)
    return f"{found}: {advice or 'it takes ' + ', '.join(names)}"


def _called(signature: inspect.Signature) -> str:
    """The arguments as they are given: by position, and after an asterisk by name."""
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    first = ["*" + each.name if each.kind is each.VAR_POSITIONAL else each.name for each in parameters]
    first = first[: len(first) - len(by_name)]
    return ", ".join([*first, *(["*", *by_name] if by_name else [])])


OTHER_MEANS = "; for other means pass weights as a per_token argument and reduction='sum'"
"""End of the error for a reduction of `linear_token_loss` that it does not have."""


def check_loss(caller: str, loss: Callable[..., Any], per_token: int) -> None:
    """Raise a TypeError if the loss of `linear_token_loss` cannot be called with this many tensors in `per_token`.

    >>> check_loss("linear_token_loss()", lambda logprob, entropy, lse: -logprob, 1)
    Traceback (most recent call last):
    TypeError: linear_token_loss(): loss is called as loss(logprob, entropy, lse, *per_token), here with 4 arguments, \
and takes (logprob, entropy, lse)
    """
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a function of C without a signature
        return
    try:
        signature.bind(*range(3 + per_token))
    except TypeError:
        raise TypeError(
            f"{caller}: loss is called as loss(logprob, entropy, lse, *per_token), here with {3 + per_token} "
            f"arguments, and takes {signature}"
        ) from None


def meant(wrong: str, names: Iterable[str], cutoff: float = 0.78) -> str | None:
    """The name that was meant by a wrong one, of those that there are; None where none is alike.

    A name of no group in ALIKE is alike from the similarity `cutoff` of difflib on.  The default keeps the names of
    other arguments apart, as "largest" and "target" with 0.77.

    >>> meant("gpu", ("dtype", "device")), meant("topp", ("top_k", "top_p")), meant("temperature", ("scale",))
    ('device', 'top_p', 'scale')
    """
    plain = {name.replace("_", ""): name for name in names}
    alike = next((group for group in ALIKE if wrong.lower() in group), ())
    found = plain.get(wrong.replace("_", "").lower()) or next((name for name in alike if name in plain.values()), None)
    # A known argument that is missing here is not a misspelling.
    return found or (None if alike else next(iter(get_close_matches(wrong, plain.values(), 1, cutoff)), None))


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """The sentence about a name that is none of those that are known, with the nearest one if one is near.

    Example:
        >>> unknown("operation", "softmx", ("softmax", "logsumexp"))
        "unknown operation 'softmx'; there are: softmax, logsumexp; did you mean softmax?"
        >>> unknown("operation", "topk_logprobs", ("token_logprobs",))
        "unknown operation 'topk_logprobs'; there are: token_logprobs"
    """
    known = tuple(known)
    # A function of the package is not a misspelling, and lacks what is asked for.
    is_function = name in getattr(sys.modules.get("onlinesoftmax"), "__all__", ())
    near = meant(name, known, 0.65) if isinstance(name, str) and not is_function else None
    return f"unknown {what} {name!r}; there are: {', '.join(known)}{f'; did you mean {near}?' if near else ''}"


def _pass(wrong: str, found: str | None) -> str | None:
    """The advice to pass another argument."""
    if found is None:
        return None
    inverse = {found, wrong} == {"scale", "temperature"}
    return f"pass {found}=1/{wrong}" if inverse else f"pass {found}="


def _others(wrong: str, name: str, package: str) -> str | None:
    """The public functions whose names begin as this one's and that have an argument of this name."""
    module, family = sys.modules.get(package), name.partition("_")[0]
    public = [each for each in getattr(module, "__all__", ()) if each.partition("_")[0] == family]
    functions = [each for each in public if inspect.isfunction(getattr(module, each))]
    found = [each for each in functions if wrong in inspect.signature(getattr(module, each)).parameters]
    return f"{' and '.join(found)} {'take' if len(found) > 1 else 'takes'} {wrong}" if found else None
