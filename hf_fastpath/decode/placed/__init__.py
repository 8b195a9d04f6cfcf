"""Models whose weights lie on several devices, in host memory, or in shards of ranks, and programs over them."""
