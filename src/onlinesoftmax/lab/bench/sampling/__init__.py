"""The benchmark of sampling: from logits to tokens, and to the largest log-probabilities.

`cases` has the logits and the filters, `peers` the ways in PyTorch and JAX, `reference` what every way has to return;
`run` measures beside one read of the logits.
"""
