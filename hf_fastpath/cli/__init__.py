"""The command ``hf-fastpath``.

This folder may import all of the package; nothing imports it."""
