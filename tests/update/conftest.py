"""Gives the tests of the update one Ray cluster, whose workers they share: starting it takes half a minute."""

import pytest
from arlopti_testing.update_workers import cluster


@pytest.fixture(scope="package")
def ray_cluster():
    with cluster():
        yield
