"""``patch()`` and what it leaves on a model: :mod:`.analyse` decides (:mod:`.plan`), :mod:`.apply` binds and undoes
(:mod:`.ledger`), :mod:`.state` lives on the model. ``packed_files``, ``check``, ``bench`` and ``cli`` import this
folder, which imports none of them."""
