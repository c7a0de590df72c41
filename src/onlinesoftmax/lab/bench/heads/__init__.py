"""The benchmark of functions with a head: forward and backward of hidden states, a weight and targets.

`cases` has their cases, `peers` the ways to compute them; `measure` compares them with exact results of some rows,
and times them.

`steps` measures whole training steps, with a decoder before the head: `step_peers` has the ways from the last hidden
states to the loss.
"""
