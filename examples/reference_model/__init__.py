"""How the built-in model was made: its world, its prompts, its training and its evaluation."""
