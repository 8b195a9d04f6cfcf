"""Which ops compute what a step asks for: :mod:`.which_op`` has the tables that described and recorded steps share."""
