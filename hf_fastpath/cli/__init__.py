"""The command ``hf-fastpath``.

It may import all of the package; nothing imports it."""
