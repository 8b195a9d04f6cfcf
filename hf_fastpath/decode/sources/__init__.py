"""Sources of steps: :mod:`.step_source`` declares what a source answers, :mod:`.described` is a model with a file."""
