"""The loops that generate with plans: whether a call of ``generate()`` is ours, its prompt, its tokens, its drafts.

Of a patched model the folder knows :mod:`.patched` alone; it imports nothing of ``patching``."""
