"""``profile()``: where the time of a decode step goes, call by call.

Nothing here runs, and nothing elsewhere asks for it, unless ``profile()`` is called: it puts a runner of its own on the
plans that its calls of ``generate()`` take, and takes it off again."""
