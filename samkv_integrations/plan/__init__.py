"""What of a prompt is computed, what is loaded, what is kept."""
