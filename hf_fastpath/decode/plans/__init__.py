"""Decode plans: the calls of a step with the memory that they need, and the plans of one model that wait for calls."""
