"""The benchmark of sampling: from logits to tokens, to the largest log-probabilities, and drafts.

`cases` has the logits and the filters, `peers` the ways in PyTorch and JAX; `measure` says what every way has to
return, and times them beside one read of the logits.
"""
