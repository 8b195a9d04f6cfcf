"""Comparing a patched model with stock transformers (:mod:`..parity` has the measurements), and saying beforehand how a
model would do. ``check`` may import all of the package but ``bench`` and ``cli``, which import it."""
