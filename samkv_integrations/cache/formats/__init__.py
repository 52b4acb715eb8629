"""How keys and values are stored: in 2 to 16 bits, and unrotated."""
