"""CUDA code made and read on a machine without a GPU: compile for a named GPU, look at registers, loads and launches."""
