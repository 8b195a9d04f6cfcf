"""One decoder token as a list of op calls, its CUDA graph, and the loops that generate with it.

``decode`` may import ``ops``, the cache, ``architecture`` and ``compat``. Of a patched model the folder knows
:mod:`.patched` alone; it imports nothing of ``patching``."""
