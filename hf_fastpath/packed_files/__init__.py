"""``save_packed()`` and ``load_packed()``: folders of files that hold a model's packed weights as they are. The folder
imports ``patching``, because loading patches the model."""
