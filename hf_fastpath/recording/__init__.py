"""A decoder's step for one token, recorded from the model's own forward, for models that no architecture file covers.

It may import everything but ``patching``, ``check``, ``bench`` and ``cli``; ``patching`` alone imports it."""
