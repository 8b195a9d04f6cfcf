"""What a described model is made of: its modules in the roles that an architecture gives them, and their weights."""
