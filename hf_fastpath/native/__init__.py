"""The native libraries: the build recipe and its cache, compilers, loading, and the memory that weights lie in.

It may import ``progress``, ``forks``, ``errors`` and ``registry`` of the package; :mod:`.build` never imports torch."""
