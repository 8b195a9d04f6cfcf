"""One decoder token as a list of op calls, its CUDA graph, and the loop that generates with it."""
