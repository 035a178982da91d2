"""The parts of the page, one each: what it says and the charts that show it."""
