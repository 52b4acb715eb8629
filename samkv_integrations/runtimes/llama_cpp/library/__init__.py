"""llama.cpp itself: its functions and structures, contexts, states of sequences, positions."""
