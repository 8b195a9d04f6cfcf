"""Whether a patched model decodes as stock does: the measurements of ``verify()`` and of the self-test of ``patching``.

Of a patched model the folder knows :mod:`..decode.loops.patched` alone; it imports nothing of ``patching``."""
