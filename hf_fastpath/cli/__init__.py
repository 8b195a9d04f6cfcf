"""The command ``hf-fastpath``.

``cli`` may import all of the package; nothing imports it."""
