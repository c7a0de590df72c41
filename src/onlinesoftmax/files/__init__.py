"""Softmax over files and over chunks, in bounded memory.

Reading order:

1. `chunks`: `state_of_chunks` and `softmax_chunks`, for any iterable of arrays.
2. `apply`: `apply_file`, for `.npy` and `.safetensors` files; it checks the request and reports what was done.
3. `transfer`: moves one tensor from the source file to the target file, one tile at a time, and converts its elements.
4. `tiles`: divides a tensor among processes, and cuts it into tiles that fit in memory; pure arithmetic on sizes.
5. `team`: the processes that share the work of one file, and fail together.
6. `formats`: reads and writes the headers of both file formats.
7. `disk`: reads and writes bytes at offsets; every error names its file.
"""

from .apply import Report, apply_file
from .chunks import softmax_chunks, state_of_chunks
from .disk import FileError

__all__ = ["FileError", "Report", "apply_file", "softmax_chunks", "state_of_chunks"]
