"""One decoder token as a list of op calls, its CUDA graph, and the loops that generate with it.

A sub-folder imports only those before it: ``calls``, ``ranks``, ``run``, ``model``, ``lower``, ``sources``, ``state``,
``placed``, ``plans``, ``loops``."""
