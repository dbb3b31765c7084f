"""One shared sandbox for tests that leave no trace, and a factory for those that do."""

import os
import uuid

import pytest
from e2b import Sandbox


@pytest.fixture(scope="session", autouse=True)
def endpoint():
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"):
        assert os.environ.get(name), f"{name} is not set: `source .aenv/env` first"


@pytest.fixture(scope="session")
def run_label():
    """Marks the sandboxes of this run, so that lists can be told from those of others."""
    return {"compat_run": uuid.uuid4().hex}


@pytest.fixture
def make(run_label):
    """Makes sandboxes and removes them at the end of the test."""
    made = []

    def create(*args, **options):
        options["metadata"] = {**run_label, **options.get("metadata", {})}
        options.setdefault("timeout", 120)
        sandbox = Sandbox.create(*args, **options)
        made.append(sandbox)
        return sandbox

    yield create
    for sandbox in made:
        sandbox.kill()


@pytest.fixture(scope="module")
def sandbox():
    shared = Sandbox.create(timeout=600)
    yield shared
    shared.kill()
