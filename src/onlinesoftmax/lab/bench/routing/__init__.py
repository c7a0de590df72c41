"""The benchmark of routing: from the logits of a gate to experts, weights and counts, alone and with a gradient.

`cases` has the gates, `peers` the ways in PyTorch; `measure` says what every way has to return, and times them
beside one read of the logits.
"""
