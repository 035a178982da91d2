"""Ways to run a decoder program: torch on any device, native C++ on a CPU."""
