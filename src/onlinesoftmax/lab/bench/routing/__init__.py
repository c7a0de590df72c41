"""The benchmark of routing: from the logits of a gate to experts, weights and counts, alone and with a gradient.

`cases` has the gates, `peers` the ways in PyTorch, `reference` what every way has to return; `run` measures beside one
read of the logits.
"""
