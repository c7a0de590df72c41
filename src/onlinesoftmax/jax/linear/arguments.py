"""The checks of the arguments of a head; errors name the function and the argument."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arguments import wrong_weight
from ...core.arrays import Array, accumulator, array_kind
from ...core.options import ARRAY, ScoreOptions, check_softcap, checked_scale, is_number
from ...core.wrong_calls import OTHER_MEANS
from ...ops.cross_entropy.arguments import check_factors
from .. import array_types
from ..exchange import checked_names, column_of, devices, signed
from ..prepare import as_array, as_labels, checked_dtype
from ..signature import Names

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Head(NamedTuple):
    """The arrays of a head.

    Attributes:
        x: Input, with any number of axes of tokens, and hidden.
        weight: (classes, hidden).
        bias: (classes,), or None.
        target: Target of each token as a signed integer; or a probability of each class.
        options: Scale and softcap; ARRAY stands for a scale of each token.
        scale: The scale of each token; None where it is a number.
        names: Axes of `shard_map` along which the classes are sharded.
    """

    x: Array
    weight: Array
    bias: Array | None
    target: Array
    options: ScoreOptions
    scale: Array | None
    names: Names

    @property
    def soft(self) -> bool:
        """True where the target has class probabilities."""
        return bool(jnp.issubdtype(self.target.dtype, jnp.floating))

    @property
    def classes(self) -> int:
        """Number of classes on all devices."""
        return self.weight.shape[0] * (devices(self.names) if self.names else 1)

    @property
    def column(self) -> Array:
        """The class of each token in 32 bits, and -1 where it is none."""
        return column_of(self.target, self.classes)


def checked_head(name: str, arrays: tuple[Any, ...], options: tuple[Any, Any], soft: bool, axis_name: Any) -> Head:
    """The arrays of a head.

    Args:
        name: Name of the public function, for errors.
        arrays: Its arguments input, linear_weight, target and linear_bias.
        options: Its arguments scale and softcap.
        soft: True where the target may hold class probabilities.
        axis_name: Its argument of this name.
    """
    names = checked_names(name, axis_name)
    # The primitive of a head exchanges nothing; without this check an axis of vmap would give wrong numbers.
    if not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
        raise ValueError(f"{name}: axis_name {axis_name!r} must name axes of jax.shard_map, not of vmap")
    x, weight = as_array(name, "input", arrays[0]), as_array(name, "linear_weight", arrays[1])
    target = as_labels(name, "target", arrays[2])
    bias = None if arrays[3] is None else as_array(name, "linear_bias", arrays[3])
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}: input must be one of {', '.join(DTYPES)}, got {x.dtype}")
    hidden = x.shape[-1] if x.ndim else "hidden"
    if not x.ndim or weight.ndim != 2 or weight.shape[1] != hidden:
        raise ValueError(
            f"{name}: linear_weight must have shape (classes, {hidden}), the last dimension being that of input, got "
            f"{weight.shape} for input {x.shape}{wrong_weight(x.shape, weight.shape, target.shape)}"
        )
    if 0 in weight.shape:
        raise ValueError(f"{name}: linear_weight has no elements, its shape is {weight.shape}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: linear_bias must have shape {weight.shape[:1]}, got {bias.shape}")
    for argument, t in (("linear_weight", weight), ("linear_bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{name}: {argument} has the dtype {t.dtype}, and input {x.dtype}: cast one of them")
    probabilities = soft and jnp.issubdtype(target.dtype, jnp.floating)
    if not probabilities and not jnp.issubdtype(target.dtype, jnp.integer):
        raise TypeError(f"{name}: target must have an integer dtype, got {target.dtype}")
    wanted = (*x.shape[:-1], weight.shape[0]) if probabilities else x.shape[:-1]
    if target.shape != wanted:
        is_label = probabilities and target.shape == x.shape[:-1]
        hint = "; class labels are integers: target.astype(int)" if is_label else ""
        raise ValueError(f"{name}: target has shape {target.shape}, and must have {wanted}{hint}")
    target = constant(f"{name}: target", target) if probabilities else signed(target)
    # JAX adds the gradients up over the axes along which an array does not vary.
    every = frozenset(names).union(*(array_types.varying(t) for t in (x, weight, target)))
    x, weight = (array_types.vary(t, every) for t in (x, weight))
    given, scale = _checked_options(name, *options, x.shape[:-1])
    return Head(x, weight, None if bias is None else array_types.vary(bias, every), target, given, scale, names)


def _checked_options(name: str, scale: Any, softcap: Any, shape: tuple[int, ...]) -> tuple[ScoreOptions, Array | None]:
    """The score options, and the scale of each token where it is an array."""
    check_softcap(name, softcap)
    softcap = None if softcap is None else float(softcap)
    if is_number(scale):
        return ScoreOptions(checked_scale(name, scale), softcap), None
    if array_kind(scale) not in ("numpy", "jax") or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{name}: scale must be a number or a floating-point array, got {scale!r}")
    if math.prod(scale.shape) == 1 and scale.shape != shape:
        scale = jnp.broadcast_to(jnp.asarray(scale).reshape(()), shape)
    return ScoreOptions(ARRAY, softcap), checked_constant(name, "scale", scale, shape)


def checked_acc_dtype(name: str, acc_dtype: Any, x: Array) -> str:
    """The dtype in which the gradient of a weight is added up; None is float32 or float64."""
    wide = accumulator(x)
    found = wide if acc_dtype is None else checked_dtype(name, "acc_dtype", acc_dtype).name
    if found == "float16":
        raise ValueError(f"{name}: acc_dtype=float16 would overflow: its largest number is 65504")
    if found not in (x.dtype.name, wide):
        raise ValueError(f"{name}: acc_dtype must be {wide} or the dtype of the weight, {x.dtype}, got {found}")
    return found


def checked_numbers(name: str, smoothing: Any, z_loss: Any) -> tuple[tuple[str, float], ...]:
    """Label smoothing and z_loss, where they are not 0."""
    check_factors(name, smoothing, z_loss)
    return tuple((one, float(value)) for one, value in (("smoothing", smoothing), ("z_loss", z_loss)) if value)


def checked_reduction(name: str, reduction: Any, *kinds: str) -> str:
    """The reduction, one of some names."""
    if not isinstance(reduction, str) or reduction not in kinds:
        others = "" if "none" in kinds else OTHER_MEANS
        raise ValueError(
            f"{name}: reduction must be {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}, got {reduction!r}{others}"
        )
    return reduction


def checked_constant(name: str, argument: str, value: Any, shape: tuple[int, ...]) -> Array:
    """An array of real numbers of a shape, without a gradient."""
    t = as_array(name, argument, value)
    if jnp.issubdtype(t.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {argument} must hold real numbers, got {t.dtype}")
    if t.shape != shape:
        raise ValueError(f"{name}: {argument} has shape {t.shape}, and must have {shape}")
    return constant(f"{name}: {argument}", t)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def constant(what: str, t: Array) -> Array:
    """The array itself; an error where JAX differentiates with respect to it."""
    return t


def _constant_forward(what: str, t: Any) -> Any:
    if t.perturbed:
        raise TypeError(f"{what} has a gradient, which is not computed: pass jax.lax.stop_gradient of it")
    return t.value, None


def _constant_backward(what: str, *_: Any) -> tuple[None]:
    return (None,)


constant.defvjp(_constant_forward, _constant_backward, symbolic_zeros=True)
