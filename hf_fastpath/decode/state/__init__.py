"""What a model was when its step was made, and whether it still is: its Python values, tensors and modules."""
