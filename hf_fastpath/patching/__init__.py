"""``patch()`` and what it leaves on a model: :mod:`.analyse` decides (:mod:`.plan`), :mod:`.apply` binds and undoes
(:mod:`.ledger`), :mod:`.state` lives on the model. It may import all but ``bench``, ``cli`` and of ``check``
all but ``comparison``; beside these, saving and loading of quantized weights import it."""
