"""One decoder token as a list of op calls, its CUDA graph, and the loops that generate with it.

It may import ``ops``, the cache, ``architecture`` and ``compat``; of a patched model it knows :mod:`.patched` alone,
and nothing of ``patching``."""
