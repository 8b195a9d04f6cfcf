"""``patch()`` and what it leaves on a model: :mod:`.analyse` decides (:mod:`.plan`), :mod:`.apply` binds and undoes
(:mod:`.ledger`), :mod:`.state` lives on the model. It may import everything but ``explain``, ``verification``,
``quality``, ``bench`` and the command line; of the package, only these and ``quantization.loading`` import it."""
