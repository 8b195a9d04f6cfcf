"""``FastpathCache``: layers of keys and values in buffers or in pages, and the changes that users may make to a layer.

``cache`` may import ``ops.kv_cache``, ``compat`` and ``native``. Models, plans and ``patching`` are unknown to it."""
