"""Which layers of a model quantized ones replace: those that :mod:`.quantizing` quantizes, or those that a checkpoint
brings quantized (:mod:`.repacking`). :mod:`.model_methods` has what then becomes of the model's methods."""
