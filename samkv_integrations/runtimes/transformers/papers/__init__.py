"""Methods that choose by tensors, one file for each paper."""
