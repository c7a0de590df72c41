"""The files of the CUDA kernel of sparsemax: none beside those of every kernel."""

KERNEL_FILES = {"row": ("row",)}
