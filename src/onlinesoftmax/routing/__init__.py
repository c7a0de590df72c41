"""Routing of tokens to the experts of a mixture: choice, weights, counts and the sums of the losses.

rules.py         the numbers of a routing, checked
selection.py     which experts a token chooses: the same on every device, to the last bit of a score
formulas.py      weights, probabilities and logsumexp
reference.py     both for flat rows of torch tensors, and the gradient
run.py           a call: by a kernel, or in PyTorch's operations
"""
