"""``patch()`` and what it leaves on a model: :mod:`.analyse` decides (:mod:`.plan`), :mod:`.apply` binds and undoes
(:mod:`.ledger`), :mod:`.state` lives on the model. ``patching`` may import all but ``bench``, ``cli`` and the modules
of ``check`` other than ``comparison``. The saving and loading of quantized weights imports this folder, as those do."""
