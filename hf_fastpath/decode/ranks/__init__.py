"""The processes over which a model is spread: what they tell each other, and the calls in which they meet."""
