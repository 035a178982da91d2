"""A fleet that is not there: discrete events, and the decisions of `policies`."""
