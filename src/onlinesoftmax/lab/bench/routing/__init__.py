"""The benchmark of routing: from the logits of a gate to experts, weights and counts, alone and with a gradient.

`cases` has the gates, `peers` the ways in PyTorch, `reference` what every way has to return; `measure` times them
beside one read of the logits.
"""
