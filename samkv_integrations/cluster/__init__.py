"""Work that several processes and machines share, through Ray."""
