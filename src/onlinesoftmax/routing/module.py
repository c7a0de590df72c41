"""The gate of a mixture of experts as a module; nn.py shows it to users."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..core.arrays import dtype_name, is_dtensor
from ..core.options import LARGEST_FLOAT64, check_number
from ..core.wrong_calls import hinting
from ..torch.arguments import TORCH
from . import Routed, check_no_group, route, total
from .presets import arguments_of
from .rules import checked_rule


class Router(torch.nn.Linear):
    """The gate of a mixture of experts: logits of hidden states, and `onlinesoftmax.route` of them.

    `Router.like` makes the gate of a published model.  Its state has the names that transformers has: `weight`, `bias`,
    and with `correction` the buffer `e_score_correction_bias`.

    Args:
        hidden_size: Size of a hidden state.
        experts: Number of experts.
        k: Number of experts of a token.
        bias: Add a learned bias to the logits.
        correction: Keep a bias that is added to the scores for the choice alone, and that `balance` moves; it stays
            float32 if the module gets another dtype.
        logits_dtype: Dtype in which the logits are computed, whatever autocast says; None for that of the hidden states
            and of autocast.  In bfloat16, rounded logits change the choice for some tokens.
        score, order, groups, group_k, group_score, renormalize, scale: As for `route`.
        device, dtype: Of weight and bias.

    Shape:
        input (..., tokens, hidden_size); the named tuple `Routed`, in training with prob_sums.

    Raises:
        TypeError, ValueError: an argument makes no sense: when the module is made; the input has another width than
            hidden_size.  A call raises what `route` raises too.

    Example:
        >>> router = Router(4, 8, 2, score="sigmoid", correction=True)
        >>> found = router(torch.ones(3, 4))
        >>> found.weights.shape, found.prob_sums.shape
        (torch.Size([3, 2]), torch.Size([8]))
        >>> router
        Router(in_features=4, out_features=8, bias=False, k=2, score='sigmoid', correction=True)
    """

    e_score_correction_bias: torch.Tensor | None

    @hinting
    def __init__(
        self, hidden_size: int, experts: int, k: int, *, bias: bool = False, correction: bool = False,
        logits_dtype: Any = None, score: Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"] = "softmax",
        order: Literal["score_first", "topk_first"] = "score_first", groups: int | None = None,
        group_k: int | None = None, group_score: Literal["top2_sum", "max"] | int = "top2_sum",
        renormalize: bool = True, scale: float = 1.0, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        checked_rule("Router()", experts, k, score, order, (groups, group_k, group_score), renormalize, scale)
        super().__init__(hidden_size, experts, bias=bias, device=device, dtype=dtype)
        self.k = k
        self.logits_dtype = None if logits_dtype is None else getattr(torch, dtype_name(logits_dtype))
        self.options: dict[str, Any] = {
            "score": score, "order": order, "groups": groups, "group_k": group_k, "group_score": group_score,
            "renormalize": renormalize, "scale": scale,
        }  # fmt: skip
        correct = torch.zeros(experts, dtype=torch.float32, device=device) if correction else None
        self.register_buffer("e_score_correction_bias", correct)

    @classmethod
    def like(
        cls, model: Any, hidden_size: int | None = None, experts: int | None = None, k: int | None = None,
        **changes: Any,
    ) -> Router:  # fmt: skip
        """The gate of a published model.

        Args:
            model: A config of transformers, whose sizes and settings (such as norm_topk_prob) the gate takes; or a
                name, "mixtral", "qwen3_moe", "deepseek_v3", "llama4" or "gpt_oss": its `model_type`, whatever the
                capitals and hyphens.
            hidden_size, experts, k: As for the module; a name needs them, and a config has them.
            changes: Other arguments of the module.  They replace those of the model.

        Raises:
            TypeError, ValueError: there is no such model, a size is missing, or the config lacks an attribute.

        Example:
            >>> Router.like("gpt_oss", 2880, 32, 4)
            Router(in_features=2880, out_features=32, bias=True, k=4, order='topk_first')
        """
        found = arguments_of(model)
        sizes = {"hidden_size": hidden_size, "experts": experts, "k": k}
        found |= {name: size for name, size in sizes.items() if size is not None}
        if missing := [name for name in sizes if name not in found]:
            raise TypeError(f"Router.like(): {model!r} is a name and needs {', '.join(missing)} too; a config has them")
        return cls(**{**found, **changes})

    def reset_parameters(self) -> None:
        """Random weights and a correction of 0, as in a new module; after `to_empty`, too."""
        super().reset_parameters()
        # A Linear calls this before the module has the buffer.
        correction = self._buffers.get("e_score_correction_bias")
        if correction is not None:
            torch.nn.init.zeros_(correction)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """PyTorch's, which changes device and dtype; the correction keeps float32, as `balance` adds small steps."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def forward(  # type: ignore[override]  # the result of a Linear is a tensor
        self, input: torch.Tensor, *, indices: torch.Tensor | None = None, mask: torch.Tensor | None = None,
        prob_sums: bool | None = None,
    ) -> Routed:  # fmt: skip
        """The experts of hidden states.

        Args:
            input: Hidden states (..., tokens, hidden_size).
            indices, mask: As for `route`.
            prob_sums: Return them, for `load_balancing_loss`; None for True in training mode and False after `eval()`.
        """
        TORCH.check_array("Router()", "input", input)
        if not input.is_floating_point():
            raise TypeError(f"Router(): input must be hidden states, which are floating point, got {input.dtype}")
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"Router(): input must have hidden_size = {self.in_features} numbers in its last dimension, got shape "
                f"{tuple(input.shape)}"
            )
        if self.logits_dtype is None:
            logits = super().forward(input)
        else:
            with torch.autocast(input.device.type, enabled=False):
                own = None if self.bias is None else self.bias.to(self.logits_dtype)
                logits = torch.nn.functional.linear(input.to(self.logits_dtype), self.weight.to(self.logits_dtype), own)
        with_sums = self.training if prob_sums is None else prob_sums
        bias = self.e_score_correction_bias
        return route(logits, self.k, **self.options, bias=bias, indices=indices, mask=mask, prob_sums=with_sums)

    @torch.no_grad()
    def balance(self, counts: torch.Tensor, rate: float = 1e-3, *, group: Any = None) -> None:
        """Move the correction of each expert by `rate`: up where it has fewer tokens than the mean, else down.

        It balances the experts without a loss; call it after a step of the optimizer.

        Args:
            counts: Counts of a step, (..., experts), as `route` returns them; or their sum over several calls.  A
                DTensor counts for all processes of its mesh.
            rate: Size of the step.
            group: Process group whose counts are added up.

        Raises:
            RuntimeError: the module has no correction.
            TypeError, ValueError: counts is no tensor, or has another number of experts; rate is no finite number.

        Source:
            Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv:2408.15664.
        """
        if self.e_score_correction_bias is None:
            raise RuntimeError("Router.balance(): the module has no correction; make it with correction=True")
        if isinstance(counts, Routed):
            raise TypeError(
                "Router.balance(): counts must be the counts of a routing, not all of it: pass routed.counts"
            )
        TORCH.check_array("Router.balance()", "counts", counts)
        if counts.shape[-1:] != (self.out_features,):
            raise ValueError(
                f"Router.balance(): counts must have one number for each of the {self.out_features} experts in the "
                f"last dimension, got shape {tuple(counts.shape)}"
            )
        step = rate.item() if isinstance(rate, torch.Tensor) else rate
        check_number("Router.balance()", "rate", step, -LARGEST_FLOAT64, LARGEST_FLOAT64)
        own: Any = self.e_score_correction_bias
        # A buffer that is a DTensor is whole on every process.
        own = own.to_local() if is_dtensor(type(own)) else own
        if is_dtensor(type(counts)):
            check_no_group(group)
            counts = counts.full_tensor()  # type: ignore[attr-defined]  # a DTensor
        found, _ = total(counts.reshape(-1, self.out_features).sum(0), group)
        found = found.to(own.dtype)
        own.add_((found.mean() - found).sign(), alpha=step)

    def extra_repr(self) -> str:
        """PyTorch's, with the arguments that are not at their defaults."""
        defaults: Any = route.__kwdefaults__
        changed = [f"{name}={value!r}" for name, value in self.options.items() if value != defaults[name]]
        changed += ["correction=True"] if self.e_score_correction_bias is not None else []
        changed += [] if self.logits_dtype is None else [f"logits_dtype={self.logits_dtype}"]
        return ", ".join([super().extra_repr(), f"k={self.k}", *changed])
