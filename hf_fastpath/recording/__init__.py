"""A decoder's step for one token, recorded from the model's own forward, for models that no architecture file covers.

Of the folders that ``tests/test_imports.py`` puts in order, it imports none behind ``decode``."""
