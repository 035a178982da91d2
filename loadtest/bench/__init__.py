"""The benchmarks of forebay itself, part by part: `make bench`."""
