"""What compares a patched model with stock transformers, and what says beforehand how a model would do.

It may import all of the package but ``bench`` and ``cli``. These two import it, and the self-test of ``patching``."""
