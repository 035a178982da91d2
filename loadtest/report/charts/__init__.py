"""Charts as inline SVG: numbers in, markup out."""
