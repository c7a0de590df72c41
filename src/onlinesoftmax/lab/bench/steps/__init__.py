"""The benchmark of whole training steps: a decoder with random weights, and the ways to its loss.

`cases` has the sizes, `peers` the ways from the last hidden states to the loss; `run` measures steps of one decoder.
"""
