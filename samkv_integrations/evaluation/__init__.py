"""What `samkv tune`, `ask`, `quickstart` and `plan` share with the benchmarks of a clone."""
