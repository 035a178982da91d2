"""The kinds of replica behind the one protocol of `gateway.replica`."""
