"""The native libraries: their build and its cache, compilers, loading, and the pages of memory that hold weights.

Of the package this folder may import ``progress``, ``logs``, ``switches``, ``forks``,
``errors`` and ``registry``; :mod:`.build` never imports
torch."""
