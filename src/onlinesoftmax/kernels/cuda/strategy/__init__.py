"""The strategies in CUDA C++: a folder for each, with its kernels and the blocks that it proposes to the planner."""
