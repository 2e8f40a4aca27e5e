"""What several test files share."""

import os

import pytest


def need(condition: bool, reason: str) -> None:
    """Skip a test whose surroundings lack something; in CI that is a failure, not a skip."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"in CI this must run: {reason}")
    pytest.skip(reason)
