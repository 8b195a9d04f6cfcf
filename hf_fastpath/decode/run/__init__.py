"""What runs a list of calls: the passes over a step, a program that is recorded once and run often, a CUDA graph."""
