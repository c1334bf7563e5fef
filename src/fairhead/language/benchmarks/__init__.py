"""Language benchmarks, one file each."""
