"""The room of an operation that the library does not have: sparsemax, with CUDA and Triton kernels of its own.

It shows the mechanism that CONTRIBUTING.md describes, and tests/test_own_kernels.py runs it.
"""
