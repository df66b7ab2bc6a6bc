"""For other people's test suites: a pytest plugin that runs a test on every rank of a world."""
