"""What one chunk leaves behind, and where it is kept."""
