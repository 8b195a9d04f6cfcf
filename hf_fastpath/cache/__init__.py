"""``FastpathCache``: layers of keys and values in buffers or in pages, and what users may do to a layer.

It may import ``ops.kv_cache``, ``compat`` and ``native``, and knows nothing of models, plans or ``patching``."""
