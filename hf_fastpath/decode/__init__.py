"""One decoder token as a list of op calls, its CUDA graph, and the loops that generate with it.

Of a patched model the folder knows :mod:`.patched` alone; it imports nothing of ``patching``."""
