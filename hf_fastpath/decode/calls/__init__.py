"""Calls of ops with named arguments: what a step is a list of, and tables of passes that change such lists."""
