"""Fixtures for all members: `worker_pool` gives tests real processes."""

pytest_plugins = ["drivetrain.testing.fixtures"]
